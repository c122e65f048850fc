"""How long N ranks take from the command to its end, by what starts them, and how much memory they take together.

python -m tests.bench.starting                                                   all of docs/launching.md's table: an hour
python -m tests.bench.starting --ways mpirun,starter --ranks 2,8 --rounds 3      some of it

Each round runs every configuration once, in a random order: `python -m hvdtrain.mnist --dataset digits --epochs 1`, which
trains for less than a second. Then one more run of each is looked at four times a second: the most memory at once that all
its processes have, pages that they share counted once (the sum of Pss in /proc/PID/smaps_rollup).
"""

import argparse
import contextlib
import os
import random
import shlex
import statistics
import subprocess
import sys
import time
from pathlib import Path

from hvdtrain.analysis.measuring import hardware
from tests.e2e.launchers import MARK, PYTHON, ROOT, environment, kill, members, new_job

TRAIN = "-m hvdtrain.mnist --dataset digits --epochs 1 --no-progress"
BARE = '-c "import torch, horovod.torch"'
WAYS = {
    "bare": f"mpirun --oversubscribe -np {{ranks}} {PYTHON} {BARE}",  # what importing alone takes
    "mpirun": f"mpirun --oversubscribe -np {{ranks}} {PYTHON} {TRAIN}",
    "horovodrun": f"horovodrun -np {{ranks}} {PYTHON} {TRAIN}",
    "gloo": f"horovodrun --gloo -np {{ranks}} {PYTHON} {TRAIN}",
    "torchrun": f"torchrun --standalone --nproc-per-node {{ranks}} {TRAIN} --engine ddp",
    # As srun starts them: a process per rank, each of which brings Gloo up with the others.
    "processes": f"{PYTHON} -m tests.bench.starting --run-processes {{ranks}}",
    "starter": f"{PYTHON} -m hvdtrain.starter --oversubscribe --local-ranks {{ranks}} {TRAIN}",
}
SECONDS = 300.0  # that a run may take
LOOK_SECONDS = 0.25


def run(way: str, ranks: int, *, look: bool) -> tuple[float, float]:
    """Return the seconds of one run, and the most MiB that its processes took together (0 where nobody is to `look`)."""
    job, most = new_job(), 0.0
    began = time.monotonic()
    process = subprocess.Popen(
        shlex.split(WAYS[way].format(ranks=ranks)), cwd=ROOT, env=environment(**{MARK: job}), stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        while look and process.poll() is None and time.monotonic() - began < SECONDS:
            most = max(most, sum(map(mebibytes, members(job))))
            time.sleep(LOOK_SECONDS)
        code = process.wait(timeout=SECONDS)
    finally:
        kill(job)
    if code != 0:
        raise SystemExit(f"{way}, {ranks} ranks: exit code {code}")
    return time.monotonic() - began, most


def mebibytes(pid: int) -> float:
    """Return the process's proportional share of the memory that it has mapped."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) / 1024
    return 0.0


def run_processes(ranks: int) -> int:
    """Start a process for each rank, and wait for them all."""
    meeting = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(random.randrange(20_000, 30_000)),
        "WORLD_SIZE": str(ranks),
    }
    words = [sys.executable, "-m", "hvdtrain.starter", *TRAIN.split()]
    started = [subprocess.Popen(words, env=os.environ | meeting | {"RANK": str(rank)}) for rank in range(ranks)]
    return max(abs(process.wait()) for process in started)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="tests.bench.starting", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ways", default=",".join(WAYS), help="default: %(default)s")
    parser.add_argument("--ranks", default="2,8,16,24", help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--run-processes", type=int, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.run_processes:
        return run_processes(flags.run_processes)
    cells = [(way, int(ranks)) for way in flags.ways.split(",") for ranks in flags.ranks.split(",")]
    seconds: dict[tuple[str, int], list[float]] = {cell: [] for cell in cells}
    for _ in range(flags.rounds):
        for cell in random.sample(cells, len(cells)):
            seconds[cell].append(run(*cell, look=False)[0])
            print(f"{cell[0]:12}{cell[1]:4} ranks {seconds[cell][-1]:8.2f} s", file=sys.stderr, flush=True)
    print(f"{hardware()}; medians of {flags.rounds} (least to most)\n")
    print("| ranks | started by | seconds | MiB in all |\n|---:|---|---:|---:|")
    for way, ranks in sorted(cells, key=lambda cell: (cell[1], list(WAYS).index(cell[0]))):
        took = seconds[way, ranks]
        memory = "" if flags.no_memory else f"{run(way, ranks, look=True)[1]:,.0f}"
        print(f"| {ranks} | {way} | {statistics.median(took):.1f} ({min(took):.1f} to {max(took):.1f}) | {memory} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
