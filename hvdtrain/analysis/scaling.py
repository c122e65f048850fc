"""How training scales: `hvdtrain.benchmark --np 1,2,4` starts itself with each engine on so many ranks.

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
from hvdtrain.analysis.launching import INTERRUPTED, VARIANTS, command, complaint, interrupt, run_job, slots
from hvdtrain.engines import lines
from hvdtrain.engines.errors import UserError
from hvdtrain.engines.launchers import announced
from hvdtrain.flags import Flags
from hvdtrain.output.run_output import versions

APART = "no communication"  # the bound


class Configuration(NamedTuple):
    """One configuration to measure. name: a variant of an engine, or the bound."""

    name: str
    ranks: int

    def __str__(self) -> str:
        return f"{self.name}, {self.ranks} rank{'s'[: self.ranks > 1]}"


Rounds = list[dict[Configuration, dict[str, Any]]]  # by round: the benchmark.json of each that succeeded
Row = dict[str, Any]  # of the table: see `summarize`


def rank_counts(text: str) -> list[int]:
    """Return "1,2,4" as sorted numbers. Raises ArgumentTypeError."""
    return sorted({cli.positive_int(number) for number in text.split(",")})


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that are of --np alone: the ranks get all others."""
    add = parser.add_argument
    add("--np", type=rank_counts, metavar="N,N,...", help="start itself on so many ranks, and compare with the bound")
    add("--engines", type=cli.some_of(VARIANTS), help=f"with --np: of {','.join(VARIANTS)} (default: horovod,ddp)")
    add("--rounds", type=cli.positive_int, default=3, help="with --np: runs of every configuration (default: 3)")
    add("--hosts", help="with --np: NAME:SLOTS,... for horovodrun and mpirun (default: this one)")
    add("--interface", metavar="NAME", help="with --hosts: network interface between them (default: searched for)")
    add("--timeout", type=cli.positive, default=600, help="with --np: of a run, in seconds (default: 600)")


def settle(flags: Flags, argv: Sequence[str]) -> None:
    """Set what follows from --np; `flags.passed` is what each rank gets. Raises UserError."""
    if announced().size > 1:
        raise UserError("--np starts the launchers itself: leave out yours, or --np", everywhere=True)
    mine = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_flags(mine)
    mine.add_argument("--output-dir")
    passed = mine.parse_known_args(argv)[1]
    for flag in ("--engine", "--no-communication", "--collectives"):
        if any(word.split("=")[0] == flag for word in passed):
            raise UserError(f"{flag} is not for --np, which compares --engines with their bound: leave it out")
    flags.engines = flags.engines or ["horovod", "ddp"]
    flags.output_dir = flags.output_dir or Path("runs/scaling")
    hosts = slots(flags.hosts) if flags.hosts else {}
    if hosts and flags.np[-1] > sum(hosts.values()):
        message = f"--np {flags.np[-1]}, but --hosts {flags.hosts} has {sum(hosts.values())} slots: add hosts or slots"
        raise UserError(message)
    if flags.interface and not hosts:
        raise UserError("--interface joins hosts: name them with --hosts NAME:SLOTS,...")
    if flags.threads is None:
        most = min([flags.np[-1], max(hosts.values(), default=flags.np[-1])])  # ranks on one host
        flags.threads = max(1, len(os.sched_getaffinity(0)) // most)
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
    bound = which.name == APART
    variant = "ddp" if bound else which.name  # without communication, Gloo's threads sleep; Horovod's do not
    words = [*flags.passed, "--output-dir", str(directory.absolute()), *["--no-communication"] * bound]
    return command(variant, which.ranks, "hvdtrain.benchmark", words, flags.hosts, flags.interface)


def measure(which: Configuration, flags: Flags, directory: Path) -> dict[str, Any]:
    """Run one configuration once, and return the content of benchmark.json. Raises UserError or OSError."""
    log, result = directory / "log", directory / "benchmark.json"
    directory.mkdir(parents=True, exist_ok=True)
    result.unlink(missing_ok=True)  # of an earlier measurement
    ended = run_job(command_of(which, flags, directory), flags.timeout, log)
    if ended.code is None:
        raise UserError(f"not finished after {flags.timeout:g} s, killed; see {log}")
    if ended.code != 0:
        why = complaint(log)
        raise UserError(f"exit code {ended.code}{f': {why}' if why else ''}; see {log}")
    if not result.exists():
        raise UserError(f"wrote no {result}: is --output-dir shared with the first of --hosts?")
    return dict(json.loads(result.read_text()))


def measure_all(flags: Flags, planned: list[Configuration], rounds: Rounds, failed: dict[Configuration, str]) -> None:
    """Fill `rounds` and `failed` after each run, so that an interruption loses nothing. What failed is not run again."""
    order = random.Random(flags.seed)
    for number in range(1, flags.rounds + 1):
        rounds.append({})
        for which in order.sample(planned, len(planned)):
            if which in failed:
                continue
            name = f"{which.name}-{which.ranks}-round{number}".replace(" ", "-")
            about = f"round {number}/{flags.rounds}  {which!s:28}"
            try:
                rounds[-1][which] = result = measure(which, flags, flags.output_dir / "runs" / name)
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


def summarize(rounds: Rounds, planned: Sequence[Configuration]) -> list[Row]:
    """Return one row per configuration that succeeded at least once.

    efficiency: its rate over that of the bound in the same round; None if no round has both.
    """
    rows: list[Row] = []
    for which in planned:
        here, bound = [results for results in rounds if which in results], Configuration(APART, which.ranks)
        if not here:
            continue
        times = [results[which]["seconds_per_sample"] for results in here]
        rows.append(
            dict(
                name=which.name, ranks=which.ranks, rounds=len(here),
                samples_per_second=spread(rate(results[which]) for results in here),
                efficiency=spread(rate(results[which]) / rate(results[bound]) for results in here if bound in results),
                communication=statistics.median(one["communication"] / sum(one.values()) for one in times),
            )
        )  # fmt: skip
    return rows


def table(rows: Sequence[Row]) -> str:
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


def write(flags: Flags, rows: Sequence[Row], rounds: Rounds, failed: dict[Configuration, str]) -> None:
    """Write scaling.json to --output-dir. Raises UserError."""
    runs = [
        dict(round=number, name=which.name, **result)
        for number, results in enumerate(rounds, 1)
        for which, result in results.items()
    ]
    content = dict(
        config=flags.given(), hardware=measuring.hardware(), versions=versions(), rows=rows, runs=runs,
        failed={str(which): why for which, why in failed.items()},
    )  # fmt: skip
    measuring.write_json(flags.output_dir / "scaling.json", content)


def run(flags: Flags) -> int:
    """Measure, print the table, write the file. Returns the exit code."""
    measuring.make_directory(flags.output_dir)
    signal.signal(signal.SIGTERM, interrupt)  # batch systems end jobs with SIGTERM: treat it like Ctrl-C
    planned = configurations(flags.engines, flags.np)
    threads = f"{flags.threads} torch thread{'s'[: flags.threads > 1]} per rank"
    lines.say(f"{flags.model}, {flags.rounds} rounds, {threads}: {'; '.join(map(str, planned))}")
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
    rows = summarize(rounds, planned)
    if rows:
        lines.say(f"\n{table(rows)}\n")  # first: there may be no space to write it
        write(flags, rows, rounds, failed)
        lines.say(f"{flags.output_dir}/scaling.json")
    for which, why in failed.items():
        lines.put(sys.stderr, f"hvdtrain.benchmark: error: {which}: {why}\n")
    return code or int(bool(failed))
