"""A plain Horovod script as it comes and under hvdtrain.tuned: whole commands, interleaved, over MPI and over Gloo.

python -m tests.bench.foreign --data-dir DIR                        5 rounds, 2 ranks; DIR has MNIST's compressed files
python -m tests.bench.foreign --ranks 2,4 --script "SCRIPT ARGUMENTS..."

Each round runs both sides of each comparison once, in a random order. Printed: the seconds of each run; by launcher and
number of ranks the median and range of both sides, and of the ratio of a round.
"""

import argparse
import os
import random
import shlex
import statistics
import sys
import tempfile
from pathlib import Path

from hvdtrain.analysis.launching import program
from tests.bench.measurements import ROOT, job

LAUNCHERS = {"MPI": ["horovodrun"], "Gloo": ["horovodrun", "--gloo"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=lambda text: Path(text).resolve(), help="of MNIST (default: noise)")
    parser.add_argument("--samples", default="20000", help="(default: 20000)")
    parser.add_argument("--ranks", default="2", help="such as 2,4 (default: 2)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--script", help="another script with its arguments (default: tests/foreign/mnist.py)")
    flags = parser.parse_args()
    words = [str(ROOT / "tests" / "foreign" / "mnist.py"), "--samples", flags.samples]
    if flags.data_dir is not None:
        words += ["--data-dir", str(flags.data_dir)]
    words = shlex.split(flags.script) if flags.script else words
    sides = {"as it comes": words, "tuned": ["-m", "hvdtrain.tuned", *words]}
    kinds = [(name, int(ranks)) for ranks in flags.ranks.split(",") for name in LAUNCHERS]
    seconds: dict[tuple[str, int, str], list[float]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for number in range(1, flags.rounds + 1):
            for name, ranks in random.sample(kinds, len(kinds)):
                for side in random.sample(list(sides), 2):
                    start = [program(LAUNCHERS[name][0]), *LAUNCHERS[name][1:], "-np", str(ranks), sys.executable]
                    took = job([*start, *sides[side]], Path(scratch) / "log")
                    seconds.setdefault((name, ranks, side), []).append(took)
                    print(f"round {number}  {name}, {ranks} ranks, {side}: {took:.1f} s", flush=True)
    print(f"load average at the end: {os.getloadavg()[0]:.1f}\n")
    print("| over | ranks | as it comes, s | tuned, s | times as fast |\n|---|---:|---|---|---|")
    for name, ranks in kinds:
        plain, tuned = (seconds[name, ranks, side] for side in sides)
        ratios = [before / after for before, after in zip(plain, tuned, strict=True)]
        cells = " | ".join(f"{statistics.median(v):.3g} ({min(v):.3g} to {max(v):.3g})" for v in (plain, tuned, ratios))
        print(f"| {name} | {ranks} | {cells} |")


if __name__ == "__main__":
    main()
