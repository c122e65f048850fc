"""Measure how training scales: hvdtrain.benchmark over engines and numbers of ranks, compared with two bounds.

python -m hvdtrain.scaling                                            this host: horovod, ddp; the ConvNet; 1 to all cores
python -m hvdtrain.scaling --engines horovod,ddp,horovod-gloo --ranks 1,2,4,8 --rounds 7 --output-dir OUT
python -m hvdtrain.scaling --ranks 1,4,8 --hosts a:4,b:4              two hosts
python -m hvdtrain.scaling -- --model resnet50 --amp bf16             flags after -- go to hvdtrain.benchmark

The bounds are one rank alone, times N; and N ranks that train at the same time without communicating, and so share cores,
caches and memory in the same way. Each round runs every configuration once, in a new order. Ratios are taken within a
round, so that changes on the machine affect both sides. Results are medians over rounds, with minimum and maximum.
--output-dir gets scaling.json, its plots as scaling.png, and the log of every run.

Exit codes: 1 if a configuration failed (it is reported, and the others continue); 130 after Ctrl-C, which ends the running
job and keeps the measurements so far.
"""

from hvdtrain.launching import startup

if __name__ == "__main__":
    startup.begin()

import json
import os
import random
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from hvdtrain import cli
from hvdtrain.analysis import measuring, plotting
from hvdtrain.analysis import scaling_results as results
from hvdtrain.analysis.launching import INTERRUPTED, VARIANTS, command, complaint, interrupt, run_job, slots
from hvdtrain.analysis.scaling_results import ALONE, APART, Benchmark, Configuration, Rounds, rate
from hvdtrain.engines import lines
from hvdtrain.engines.errors import UserError
from hvdtrain.engines.launchers import announced
from hvdtrain.launching.exit_codes import run

QUICK = ["--model", "convnet", "--repeats", "5"]  # of hvdtrain.benchmark; flags after -- override them


def rank_counts(text: str) -> list[int]:
    """Return "1,2,4" as sorted numbers. Raises ArgumentTypeError."""
    return sorted({cli.positive_int(number) for number in text.split(",")})


def parse(argv: Sequence[str] | None = None) -> cli.Flags:
    """Return the parsed command line with defaults filled in. Raises UserError on bad input."""
    parser = cli.Parser("hvdtrain.scaling", __doc__)
    add = parser.add_argument
    engines = f"of {','.join(VARIANTS)} (default: horovod,ddp)"
    add("--engines", type=cli.some_of(VARIANTS), default=["horovod", "ddp"], help=engines)
    counts = "numbers of ranks (default: 1, 2, 4, ... up to the cores or GPUs, at least 2)"
    add("--ranks", type=rank_counts, help=counts)
    add("--rounds", type=cli.positive_int, default=3, help="runs of every configuration (default: 3)")
    add("--hosts", help="NAME:SLOTS,... for horovodrun and mpirun (default: this one)")
    add("--interface", metavar="NAME", help="network interface between the hosts (default: searched for)")
    add("--threads", type=cli.threads, help="per rank (default: cores / most ranks on a host)")
    add("--timeout", type=cli.positive, default=600, help="of a run, in seconds (default: 600)")
    add("--seed", type=cli.seed, default=1, help="seed for the order within rounds (default: 1)")
    default = Path("runs/scaling")
    add("--output-dir", type=Path, default=default, help="for tables, plots and logs (default: runs/scaling)")
    add("benchmark", nargs="*", metavar="-- FLAGS", help="flags of hvdtrain.benchmark")
    flags = parser.parse_args(argv)
    cores = len(os.sched_getaffinity(0))
    total = slots(flags.hosts) if flags.hosts else None
    most = total or max(2, devices(cores))
    flags.ranks = flags.ranks or [2**power for power in range(most.bit_length())]
    if total is not None and flags.ranks[-1] > total:
        raise UserError(f"--ranks {flags.ranks[-1]}, but --hosts {flags.hosts} has {total} slots: add hosts or slots")
    if flags.interface and not flags.hosts:
        raise UserError("--interface joins hosts: name them with --hosts NAME:SLOTS,...")
    if flags.threads is None:
        hosts = flags.hosts.split(",") if flags.hosts else []
        per_host = max((int(host.rpartition(":")[2]) for host in hosts), default=flags.ranks[-1])
        flags.threads = max(1, cores // min(per_host, flags.ranks[-1]))
    return flags


def devices(cores: int) -> int:
    """Return the number of ranks that fit on this host: one per GPU, or else one per core."""
    import torch

    return torch.cuda.device_count() or cores


def configurations(engines: Sequence[str], ranks: Sequence[int]) -> list[Configuration]:
    """Return the bounds, then each engine at each number of ranks; a single-process engine at one only."""
    found = [Configuration(ALONE, 1)] + [Configuration(APART, count) for count in ranks if count > 1]
    for engine in engines:
        alone = VARIANTS[engine][0] == ""
        found += [Configuration(engine, count) for count in ([1] if alone else ranks)]
    return found


def command_of(which: Configuration, flags: cli.Flags, directory: Path) -> list[str]:
    """Return the command line that runs one configuration."""
    bound = which.name in (ALONE, APART)
    variant = "ddp" if bound else which.name  # without communication, Gloo's threads sleep; Horovod's do not
    benchmark = [*QUICK, *flags.benchmark, "--threads", str(flags.threads), "--output-dir", str(directory.absolute())]
    benchmark += ["--no-communication"] * bound
    return command(variant, which.ranks, "hvdtrain.benchmark", benchmark, flags.hosts, flags.interface)


def measure(which: Configuration, flags: cli.Flags, directory: Path) -> Benchmark | str:
    """Run one configuration once, and return the content of benchmark.json, or why there is none."""
    log, result = directory / "log", directory / "benchmark.json"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        result.unlink(missing_ok=True)  # of an earlier measurement
        ended = run_job(command_of(which, flags, directory), flags.timeout, log)
    except (UserError, OSError) as error:  # no launcher, or such as a full disk
        return str(error)
    if ended.code is None:
        return f"not finished after {flags.timeout:g} s, killed; see {log}"
    if ended.code != 0:
        why = complaint(log)
        return f"exit code {ended.code}{f': {why}' if why else ''}; see {log}"
    if not result.exists():
        return f"wrote no {result}: is --output-dir shared with the first of --hosts?"
    content: Benchmark = json.loads(result.read_text())
    return content


def measure_all(
    flags: cli.Flags, planned: list[Configuration], rounds: Rounds, failed: dict[Configuration, str]
) -> None:
    """Fill `rounds` and `failed` after each run, so that an interruption loses nothing. What failed is not run again."""
    order = random.Random(flags.seed)
    for number in range(flags.rounds):
        rounds.append({})
        for which in order.sample(planned, len(planned)):
            if which in failed:
                continue
            directory = flags.output_dir / "runs" / f"{which.name}-{which.ranks}-round{number + 1}"
            outcome = measure(which, flags, directory)
            said = f"round {number + 1}/{flags.rounds}  {which!s:28}"
            if isinstance(outcome, str):
                failed[which] = outcome
                lines.say(f"{said} FAILED: {outcome}")
            else:
                rounds[-1][which] = outcome
                lines.say(f"{said} {rate(outcome):12,.1f} samples/s")


def main() -> int:
    flags = parse()
    if announced().size > 1:
        raise UserError("hvdtrain.scaling starts the launchers itself: start it without one")
    plotting.require_matplotlib()
    measuring.make_directory(flags.output_dir)
    signal.signal(signal.SIGTERM, interrupt)  # batch systems end jobs with SIGTERM: treat it like Ctrl-C
    planned = configurations(flags.engines, flags.ranks)
    names = "; ".join(str(which) for which in planned)
    threads = f"{flags.threads} torch thread{'s'[: flags.threads > 1]} per rank"
    lines.say(f"{len(planned)} configurations, {flags.rounds} rounds, {threads}: {names}")
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if load > cores / 4:
        lines.say(f"this machine is busy (load average {load:.1f}, {cores} cores): expect a wide spread")
    rounds: Rounds = []
    failed: dict[Configuration, str] = {}
    code = 0
    try:
        measure_all(flags, planned, rounds, failed)
    except KeyboardInterrupt:
        code = INTERRUPTED
        lines.put(sys.stderr, "interrupted: ended the running job, kept the measurements so far\n")
    rows = results.summarize(rounds, planned)
    if rows:
        lines.say(f"\n{results.table(rows)}\n")  # first: there may be no space to write it
        results.write(flags, rows, rounds, failed)
        lines.say(f"{flags.output_dir}: scaling.json, scaling.png")
    for which, why in failed.items():
        lines.put(sys.stderr, f"hvdtrain.scaling: error: {which}: {why}\n")
    return code or int(bool(failed))


if __name__ == "__main__":
    run(main)
