"""How training scales: `hvdtrain.benchmark --np 1,2,4` starts itself with each engine on so many ranks of this host.

The bound is as many ranks that train at the same time without communicating, and so share cores, caches and memory in the
same way. Each round runs every configuration once, in a new order. Ratios are taken within a round, so that changes on the
machine affect both sides. Results are medians over rounds, with minimum and maximum.

Exit codes: 1 if a configuration failed (it is reported, and the others continue); 130 after Ctrl-C, which ends the running
job and keeps the measurements so far.
"""

import argparse
import json
import os
import random
import signal
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hvdtrain import cli
from hvdtrain.analysis import measuring
from hvdtrain.analysis.launching import VARIANTS, command, run_job
from hvdtrain.engines import lines
from hvdtrain.engines.cores import cores_here
from hvdtrain.engines.errors import UserError
from hvdtrain.engines.launchers import announced
from hvdtrain.flags import Flags
from hvdtrain.output.run_output import versions

APART = "no communication"  # the bound
NOT_PASSED = ("--engine", "--no-communication", "--collectives")
ELSEWHERE = (
    "--np measures this host; on several, start hvdtrain.benchmark, and again with --no-communication, by mpirun"
)


class Configuration(NamedTuple):
    """One configuration to measure. name: a variant of an engine, or the bound."""

    name: str
    ranks: int

    def __str__(self) -> str:
        return f"{self.name}, {self.ranks} rank{'s'[: self.ranks > 1]}"


Rounds = list[dict[Configuration, dict[str, Any]]]  # by round: the benchmark.json of each that succeeded
ScalingRow = dict[str, Any]  # of the table: see `summarize_rounds`


def rank_counts(text: str) -> list[int]:
    """Return "1,2,4" as sorted numbers. Raises ArgumentTypeError."""
    return sorted({cli.positive_int(number) for number in text.split(",")})


def add_scaling_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that are of --np alone: the ranks get all others."""
    add = parser.add_argument
    add("--np", type=rank_counts, metavar="N,N,...", help="start itself on so many ranks, and compare with the bound")
    add("--engines", type=cli.names_from(VARIANTS), help=f"with --np: of {','.join(VARIANTS)} (default: horovod,ddp)")
    add("--rounds", type=cli.positive_int, default=3, help="with --np: runs of every configuration (default: 3)")
    add("--timeout", type=cli.positive, default=600, help="with --np: of a run, in seconds (default: 600)")
    for flag in ("--hosts", "--interface"):
        add(flag, action=cli.RemovedFlag, const=ELSEWHERE, nargs="?", dest=argparse.SUPPRESS, help=argparse.SUPPRESS)


def settle_passed(flags: Flags, argv: Sequence[str]) -> None:
    """Set what follows from --np; `flags.passed` is what each rank gets. Raises UserError."""
    if announced().size > 1:
        raise UserError("--np starts the launchers itself: leave out yours, or --np", everywhere=True)
    mine = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_scaling_flags(mine)
    mine.add_argument("--output-dir")
    passed = mine.parse_known_args(argv)[1]
    for flag in NOT_PASSED:
        if any(word.split("=")[0] == flag for word in passed):
            raise UserError(f"{flag} is not for --np, which compares --engines with their bound: leave it out")
    flags.engines = flags.engines or ["horovod", "ddp"]
    flags.output_dir = flags.output_dir or Path("runs/scaling")
    # As many as the largest number of ranks has cores for: every rank has the same in all runs.
    flags.threads = flags.threads or max(1, cores_here(os.environ, announced()) // flags.np[-1])
    flags.passed = [*passed, "--model", flags.model, "--repeats", str(flags.repeats), "--threads", str(flags.threads)]


def configurations(engines: Sequence[str], ranks: Sequence[int]) -> list[Configuration]:
    """Return the bounds, then each engine at each number of ranks; a single-process engine at one only."""
    alone = {engine for engine in engines if VARIANTS[engine][0] == ""}
    bounds = [Configuration(APART, count) for count in sorted({*ranks, *([1] if alone else [])})]
    return bounds + [
        Configuration(engine, count) for engine in engines for count in ([1] if engine in alone else ranks)
    ]


def command_of(which: Configuration, flags: Flags, directory: Path) -> list[str]:
    """Return the command line that runs one configuration."""
    words = [*flags.passed, "--output-dir", str(directory.absolute())]
    if which.name == APART:  # without communication, Gloo's threads sleep; Horovod's do not
        return command("ddp", which.ranks, "hvdtrain.benchmark", [*words, "--no-communication"])
    return command(which.name, which.ranks, "hvdtrain.benchmark", words)


def measure_configuration(which: Configuration, flags: Flags, directory: Path) -> dict[str, Any]:
    """Run one configuration once, and return the content of benchmark.json. Raises UserError or OSError."""
    log, result = directory / "log", directory / "benchmark.json"
    directory.mkdir(parents=True, exist_ok=True)
    result.unlink(missing_ok=True)  # of an earlier measurement
    code = run_job(command_of(which, flags, directory), flags.timeout, log)
    if code is None:
        raise UserError(f"not finished after {flags.timeout:g} s, killed; see {log}")
    if code != 0 or not result.exists():
        said = [line.strip() for line in log.read_text(errors="replace").splitlines() if "rror" in line]
        raise UserError(f"exit code {code}{f': {said[0]}' if said else ''}; see {log}")
    return dict(json.loads(result.read_text()))


def measure_all(flags: Flags, planned: list[Configuration], rounds: Rounds, failed: dict[Configuration, str]) -> None:
    """Fill `rounds` and `failed` after each run, so that an interruption loses nothing. What failed is not run again."""
    order = random.Random(flags.seed)
    for number in range(1, flags.rounds + 1):
        rounds.append({})
        # A new order in each round, and ratios within a round: a slow minute affects both sides.
        for which in order.sample(planned, len(planned)):
            if which in failed:
                continue
            name = f"{which.name}-{which.ranks}-round{number}".replace(" ", "-")
            about = f"round {number}/{flags.rounds}  {which!s:28}"
            try:
                rounds[-1][which] = result = measure_configuration(which, flags, flags.output_dir / "runs" / name)
                lines.say(f"{about} {rate(result):12,.1f} samples/s")
            except (UserError, OSError) as error:  # also no launcher, or a full disk
                failed[which] = str(error)
                lines.say(f"{about} FAILED: {error}")


def rate(result: dict[str, Any]) -> float:
    """Return the samples per second of a benchmark.json."""
    return float(result["samples_per_second"]["mean"])


def spread(values: Iterable[float]) -> dict[str, float] | None:
    """Return the middle of measurements and their range; None if there are none."""
    known = list(values)
    return dict(median=statistics.median(known), least=min(known), most=max(known)) if known else None


def summarize_rounds(rounds: Rounds, planned: Sequence[Configuration]) -> list[ScalingRow]:
    """Return one row per configuration that succeeded at least once.

    efficiency: its rate over that of the bound in the same round; None if no round has both.
    """
    rows: list[ScalingRow] = []
    for which in planned:
        bound = Configuration(APART, which.ranks)
        if here := [results for results in rounds if which in results]:
            times = [results[which]["seconds_per_sample"] for results in here]
            ratios = (rate(results[which]) / rate(results[bound]) for results in here if bound in results)
            rates = spread(rate(results[which]) for results in here)
            row = dict(name=which.name, ranks=which.ranks, rounds=len(here), samples_per_second=rates)
            waits = statistics.median(one["communication"] / sum(one.values()) for one in times)
            rows.append(row | dict(efficiency=spread(ratios), communication=waits))
    return rows


def scaling_table(rows: Sequence[ScalingRow]) -> str:
    """Return the rows as a Markdown table: median (minimum to maximum)."""

    def cell(value: dict[str, float] | None, digits: int = 2) -> str:
        low, middle, high = (f"{value[name]:,.{digits}f}" if value else "" for name in ("least", "median", "most"))
        return f"{middle} ({low} to {high})" if value else "-"

    shown = ["| | ranks | samples/s | of N without communication | communication |", "|---|---:|---:|---:|---:|"]
    for row in rows:
        rates = cell(row["samples_per_second"], 0 if row["samples_per_second"]["median"] >= 100 else 1)
        cells = [row["name"], str(row["ranks"]), rates, cell(row["efficiency"]), format(row["communication"], ".0%")]
        shown.append(f"| {' | '.join(cells)} |")
    return "\n".join(shown)


def write_scaling(flags: Flags, rows: Sequence[ScalingRow], rounds: Rounds, failed: dict[Configuration, str]) -> None:
    """Write scaling.json to --output-dir. Raises UserError."""
    numbered = [(number, *one) for number, results in enumerate(rounds, 1) for one in results.items()]
    runs = [dict(round=number, name=which.name, **result) for number, which, result in numbered]
    content = dict(config=flags.given(), hardware=measuring.hardware(), versions=versions(), rows=rows, runs=runs)
    whole = content | dict(failed={str(which): why for which, why in failed.items()})
    measuring.write_json(flags.output_dir / "scaling.json", whole)


def interrupt(number: int, frame: object) -> None:
    """Signal handler: raise KeyboardInterrupt."""
    raise KeyboardInterrupt


def run_configurations(flags: Flags) -> int:
    """Measure, print the table, write the file. Returns the exit code."""
    measuring.make_writable(flags.output_dir)
    for number in (signal.SIGTERM, signal.SIGHUP):  # of a batch system, of a closed terminal: as Ctrl-C
        if signal.getsignal(number) != signal.SIG_IGN:  # as by nohup
            signal.signal(number, interrupt)
    planned = configurations(flags.engines, flags.np)
    threads = f"{flags.threads} torch thread{'s'[: flags.threads > 1]} per rank"
    lines.say(f"{flags.model}, {flags.rounds} rounds, {threads}: {'; '.join(map(str, planned))}")
    rounds: Rounds = []
    failed: dict[Configuration, str] = {}
    code = 0
    try:
        measure_all(flags, planned, rounds, failed)
    except KeyboardInterrupt:
        code = 130
        lines.put_line(sys.stderr, "interrupted: ended the running job, kept the measurements so far\n")
    if rows := summarize_rounds(rounds, planned):
        lines.say(f"\n{scaling_table(rows)}\n")  # first: there may be no space to write it
        write_scaling(flags, rows, rounds, failed)
        lines.say(f"{flags.output_dir}/scaling.json")
    for which, why in failed.items():
        lines.put_line(sys.stderr, f"hvdtrain.benchmark: error: {which}: {why}\n")
    return code or int(bool(failed))
