"""Horovod scripts as they come and under hvdtrain.tuned: whole commands, interleaved, over MPI and over Gloo.

python -m tests.bench.foreign --data-dir DIR --ranks 2,4            3 scripts, 5 rounds; DIR has MNIST's compressed files
python -m tests.bench.foreign --scripts mnist,sparse --over MPI --rounds 1       some of them
python -m tests.bench.foreign --results FILE                        goes on where FILE ends; with --rounds 0, only the table
python -m tests.bench.foreign --script "SCRIPT ARGUMENTS..."        your own; may be given several times

Each round runs both sides of each comparison one right after the other, in a random order. Printed: the seconds of each run;
then a table, by script, launcher and number of ranks: median and range of both sides, and of the ratio of a round. A run
that fails, or is not over after --limit seconds, is named, and its round does not count.
"""

import argparse
import json
import os
import random
import shlex
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from hvdtrain.analysis.launching import program, run_job
from tests.bench.measurements import ROOT, users_environment
from tests.bench.paired import spread

LAUNCHERS = {"MPI": ["horovodrun"], "Gloo": ["horovodrun", "--gloo"]}
SIDES = ("as it comes", "tuned")
FOREIGN = ROOT / "tests" / "foreign"
SCRIPTS = {  # a few seconds each, most of them start-up
    "mnist": ["mnist.py", "--samples", "8000"],
    "language model": ["language_model.py"],
    "sparse": ["sparse_gradients.py"],
}


class Run(NamedTuple):
    script: str
    over: str
    ranks: int
    round: int
    side: str
    seconds: float | None  # None: failed, or took too long


def number_list(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=lambda text: Path(text).resolve(), help="of MNIST (default: noise)")
    parser.add_argument("--ranks", type=number_list, default=[2], help="such as 2,4 (default: 2)")
    parser.add_argument("--over", default=",".join(LAUNCHERS), help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scripts", help=f"of {', '.join(SCRIPTS)} (default: all, or none with --script)")
    parser.add_argument("--script", action="append", default=[], help="a script of your own, with its arguments")
    parser.add_argument("--results", type=Path, help="a file of JSON lines: runs found there are not repeated")
    parser.add_argument(
        "--limit", type=float, default=180.0, metavar="SECONDS", help="for a run (default: %(default)s)"
    )
    flags = parser.parse_args()
    flags.over = flags.over.split(",")
    flags.scripts = flags.scripts.split(",") if flags.scripts else [] if flags.script else list(SCRIPTS)
    for names, known in ((flags.scripts, SCRIPTS), (flags.over, LAUNCHERS)):
        if unknown := [name for name in names if name not in known]:
            parser.error(f"nothing is called {unknown[0]!r}: choose from {', '.join(known)}")
    return flags


def commands(flags: argparse.Namespace) -> dict[str, list[str]]:
    found = {name: [str(FOREIGN / SCRIPTS[name][0]), *SCRIPTS[name][1:]] for name in flags.scripts}
    if flags.data_dir is not None and "mnist" in found:
        found["mnist"] += ["--data-dir", str(flags.data_dir)]
    return found | {Path(words[0]).stem: words for words in map(shlex.split, flags.script)}


def measure(words: list[str], over: str, ranks: int, side: str, limit: float) -> float | None:
    """Return the wall seconds of the whole command; None where it failed, which is said."""
    start = [program(LAUNCHERS[over][0]), *LAUNCHERS[over][1:], "-np", str(ranks), sys.executable]
    tuned = ["-m", "hvdtrain.tuned"] if side == "tuned" else []
    command = [*start, *tuned, *words]
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch) / "log"
        ended = run_job(command, limit, log)
        if ended.code == 0:
            return ended.seconds
        how = "was not over in time" if ended.code is None else f"ended with {ended.code}"
        print(
            f"FAILED: {shlex.join(command)} {how}: {' '.join(log.read_text(errors='replace').split())[-400:]}",
            flush=True,
        )
        return None


def read(path: Path | None) -> list[Run]:
    if path is None or not path.exists():
        return []
    return [Run(**json.loads(line)) for line in path.read_text().splitlines()]


def main() -> None:
    flags = parse()
    os.environ.update(users_environment())
    scripts, runs = commands(flags), read(flags.results)
    done = {run[:5] for run in runs}
    kinds = [(script, over, ranks) for script in scripts for ranks in flags.ranks for over in flags.over]
    for number in range(1, flags.rounds + 1):
        for script, over, ranks in random.sample(kinds, len(kinds)):
            if all((script, over, ranks, number, side) in done for side in SIDES):
                continue
            for side in random.sample(SIDES, 2):  # both again, where only one was there: they belong together
                took = measure(scripts[script], over, ranks, side, flags.limit)
                run = Run(script, over, ranks, number, side, took)
                runs = [other for other in runs if other[:5] != run[:5]] + [run]
                shown = "failed" if took is None else f"{took:.1f} s"
                print(f"round {number}  {script}, {over}, {ranks} ranks, {side}: {shown}", flush=True)
            if flags.results is not None:
                flags.results.write_text("".join(json.dumps(run._asdict()) + "\n" for run in runs))
    print(f"load average at the end: {os.getloadavg()[0]:.1f}\n")
    print(table(runs))


def table(runs: list[Run]) -> str:
    seconds: dict[tuple[str, str, int], dict[int, dict[str, float | None]]] = defaultdict(lambda: defaultdict(dict))
    for run in runs:
        seconds[run.script, run.over, run.ranks][run.round][run.side] = run.seconds
    lines = [
        "| script | over | ranks | rounds | as it comes, s | tuned, s | times as fast |",
        "|---|---|---:|---:|---|---|---|",
    ]
    for (script, over, ranks), rounds in sorted(seconds.items()):
        pairs = [(sides.get(SIDES[0]), sides.get(SIDES[1])) for sides in rounds.values()]
        whole = [(plain, tuned) for plain, tuned in pairs if plain is not None and tuned is not None]
        failed = f" ({len(pairs) - len(whole)} failed)" if len(whole) < len(pairs) else ""
        plain, tuned = [plain for plain, _ in whole], [tuned for _, tuned in whole]
        cells = " | ".join(spread(v) for v in (plain, tuned, [before / after for before, after in whole]))
        lines.append(f"| {script} | {over} | {ranks} | {len(whole)}{failed} | {cells} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
