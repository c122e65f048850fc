"""Horovod scripts as they come and under hvdtrain.tuned: whole commands, interleaved, over MPI and over Gloo.

python -m tests.bench.foreign --data-dir DIR --ranks 2,4            3 scripts, 5 rounds; DIR has MNIST's compressed files
python -m tests.bench.foreign --scripts mnist,sparse --over MPI --rounds 1       some of them
python -m tests.bench.foreign --script "SCRIPT ARGUMENTS..."        your own; may be given several times

Each round runs both sides of each comparison one right after the other, in a random order. Printed: the seconds of each run;
then a table, by script, launcher and number of ranks: median and range of both sides, and of the ratio of a round. A run
that fails, or is not over after --limit seconds, is named, and its round does not count.
"""

import argparse
import os
import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from hvdtrain.analysis.launching import program, run_job
from tests.bench.measurements import ROOT, users_environment
from tests.bench.paired import once, rounds, spread

LAUNCHERS = {"MPI": ["horovodrun"], "Gloo": ["horovodrun", "--gloo"]}
SIDES = ("untuned", "tuned")
SCRIPTS = {  # a few seconds each, most of them start-up
    "mnist": ["mnist.py", "--samples", "8000"],
    "language model": ["language_model.py"],
    "sparse": ["sparse_gradients.py"],
}
Seconds = dict[str, float | None]  # by side; None: failed, or took too long


class Kind(NamedTuple):
    script: str
    over: str
    ranks: int


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=lambda text: Path(text).resolve(), help="of MNIST (default: noise)")
    parser.add_argument("--ranks", default="2", help="such as 2,4 (default: 2)")
    parser.add_argument("--over", default=",".join(LAUNCHERS), help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scripts", help=f"of {', '.join(SCRIPTS)} (default: all, or none with --script)")
    parser.add_argument("--script", action="append", default=[], help="a script of your own, with its arguments")
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
    found = {name: [str(ROOT / "tests/foreign" / SCRIPTS[name][0]), *SCRIPTS[name][1:]] for name in flags.scripts}
    if flags.data_dir is not None and "mnist" in found:
        found["mnist"] += ["--data-dir", str(flags.data_dir)]
    return found | {Path(words[0]).stem: words for words in map(shlex.split, flags.script)}


def measure(words: list[str], over: str, ranks: int, side: str, limit: float) -> float | None:
    """Return the wall seconds of the whole command; None where it failed, which is said."""
    start = [program(LAUNCHERS[over][0]), *LAUNCHERS[over][1:], "-np", str(ranks), sys.executable]
    command = [*start, *(["-m", "hvdtrain.tuned"] if side == "tuned" else []), *words]
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch) / "log"
        ended = run_job(command, limit, log)
        if ended.code == 0:
            return ended.seconds
        how = "was not over in time" if ended.code is None else f"ended with {ended.code}"
        said = " ".join(log.read_text(errors="replace").split())[-400:]
        print(f"FAILED: {shlex.join(command)} {how}: {said}", flush=True)
        return None


def main() -> None:
    flags = parse()
    os.environ.update(users_environment())
    scripts = commands(flags)
    kinds = [Kind(name, over, int(n)) for name in scripts for n in flags.ranks.split(",") for over in flags.over]

    def both(kind: Kind) -> Seconds:
        return once(SIDES, lambda side: measure(scripts[kind.script], kind.over, kind.ranks, side, flags.limit))

    found = rounds(flags.rounds, kinds, both)
    print(f"load average at the end: {os.getloadavg()[0]:.1f}\n\n{table(found)}")


def table(found: Mapping[Kind, Sequence[Seconds]]) -> str:
    lines = [
        "| script | over | ranks | rounds | untuned, s | tuned, s | times as fast |",
        "|---|---|---:|---:|---|---|---|",
    ]
    for (script, over, ranks), pairs in sorted(found.items()):
        whole = [
            (plain, tuned) for plain, tuned in ([pair[side] for side in SIDES] for pair in pairs) if plain and tuned
        ]
        failed = f" ({len(pairs) - len(whole)} failed)" if len(whole) < len(pairs) else ""
        plain, tuned, ratio = ([pair[0] for pair in whole], [pair[1] for pair in whole], [a / b for a, b in whole])
        cells = " | ".join(map(spread, (plain, tuned, ratio)))
        lines.append(f"| {script} | {over} | {ranks} | {len(whole)}{failed} | {cells} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
