"""How long N ranks take from the command to its end, by what starts them, and how much memory they take together.

python -m tests.bench.starting                                                   all of docs/launching.md's table: an hour
python -m tests.bench.starting --ways mpirun,starter --ranks 2,8 --rounds 3      some of it
python -m tests.bench.starting --before ../older                                 beside an older checkout with its own .venv
python -m tests.bench.starting --init --ways gloo,processes,starter --ranks 8    `hvd.init()` alone

Each round runs every configuration once, in a random order: `python -m hvdtrain.mnist --dataset digits --epochs 1`, which
trains for less than a second. Then one more run of each is looked at four times a second: the most memory at once that all
its processes have, pages that they share counted once (the sum of Pss in /proc/PID/smaps_rollup).
--init: seconds of `hvd.init()` on the rank that came last, for which no time is spent on waiting for another's import.
srun's ways start a Slurm of this machine's packages in a namespace: as root, with slurm-wlm and munge installed.
"""

import argparse
import contextlib
import os
import random
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from hvdtrain.analysis.measuring import hardware
from tests.e2e import slurm
from tests.e2e.cluster import Cluster
from tests.e2e.launchers import MARK, ROOT, environment, kill, members, new_job

TRAIN = "-m hvdtrain.mnist --dataset digits --epochs 1 --no-progress"
INIT = f"{ROOT}/tests/bench/init.py"
BARE = '-c "import torch, horovod.torch"'
# A process per rank, as a scheduler without MPI starts them.
EACH = (
    "bash -c 'pids=; for rank in $(seq 0 $(({ranks} - 1))); do RANK=$rank python -m hvdtrain.starter {program} & "
    'pids="$pids $!"; done; for pid in $pids; do wait $pid || exit; done\''
)
WAYS = {
    "bare": f"mpirun --oversubscribe -np {{ranks}} python {BARE}",  # what importing alone takes
    "mpirun": "mpirun --oversubscribe -np {ranks} python {program}",
    "horovodrun": "horovodrun -np {ranks} python {program}",
    "gloo": "horovodrun --gloo -np {ranks} python {program}",
    "torchrun": "torchrun --standalone --nproc-per-node {ranks} {program} --engine ddp",
    "processes": EACH,
    "srun": "srun --overcommit --ntasks {ranks} python -m hvdtrain.starter {program}",
    "srun-forked": "srun --ntasks 1 python -m hvdtrain.starter --oversubscribe --local-ranks {ranks} {program}",
    "starter": "python -m hvdtrain.starter --oversubscribe --local-ranks {ranks} {program}",
}
SINCE = ("bare", "srun-forked", "starter")  # not in an older checkout, or the same there
SECONDS = 300.0  # that a run may take
LOOK_SECONDS = 0.25


class Cell(NamedTuple):
    """What is run: a way of `WAYS`, a number of ranks, and the checkout whose .venv is used (None: this one)."""

    way: str
    ranks: int
    before: Path | None = None

    def name(self) -> str:
        return f"{self.way}, before" if self.before else self.way


class Bench:
    """Runs cells. node: where there is one, the Slurm on which srun's ways run."""

    def __init__(self, *, init: bool, node: slurm.Slurm | None):
        self.init, self.node = init, node

    def run(self, cell: Cell, *, look: bool) -> tuple[float, float]:
        """Return the seconds of one run, and the most MiB that its processes took together (0 if not asked to `look`)."""
        job, most = new_job(), 0.0
        env = environment(
            **{MARK: job, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(random.randrange(20_000, 30_000))},
            WORLD_SIZE=str(cell.ranks),
        )
        for name in (
            "OMP_WAIT_POLICY",
            *([] if cell.way == "processes" else ["MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE"]),
        ):
            del env[name]
        if cell.before:
            env["PATH"] = f"{cell.before.resolve()}/.venv/bin{os.pathsep}{env['PATH']}"
        words = shlex.split(WAYS[cell.way].format(ranks=cell.ranks, program=INIT if self.init else TRAIN))
        if cell.way.startswith("srun"):
            assert self.node is not None
            words = self.node.cluster.inside("a", words)
            env["SLURM_CONF"] = f"{self.node.directory}/slurm.conf"
        began = time.monotonic()
        with tempfile.TemporaryFile("w+") as output:
            process = subprocess.Popen(
                words, cwd=cell.before or ROOT, env=env, stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            try:
                while look and process.poll() is None and time.monotonic() - began < SECONDS:
                    most = max(most, sum(map(mebibytes, members(job))))
                    time.sleep(LOOK_SECONDS)
                code = process.wait(timeout=SECONDS)
                seconds = time.monotonic() - began
            finally:
                kill(job)
            output.seek(0)
            said = output.read()
        if code != 0:
            raise SystemExit(f"{cell.name()}, {cell.ranks} ranks: exit code {code}\n{said[-2000:]}")
        if self.init:
            took = [float(found) for found in re.findall(r"hvd\.init: ([0-9.]+) s", said)]
            assert len(took) == cell.ranks, said
            return min(took), most
        return seconds, most


@contextlib.contextmanager
def a_slurm(wanted: bool) -> Iterator[slurm.Slurm | None]:
    if not wanted:
        yield None
        return
    if missing := slurm.why_not():
        raise SystemExit(missing)
    with tempfile.TemporaryDirectory(prefix="hvd") as folder, Cluster(Path(folder), ["a", "b"]) as cluster:
        yield slurm.Slurm(cluster, cluster.directory)


def mebibytes(pid: int) -> float:
    """Return the process's proportional share of the memory that it has mapped."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) / 1024
    return 0.0


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="tests.bench.starting", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ways", default=",".join(WAYS), help="default: %(default)s")
    parser.add_argument("--ranks", default="2,8,16,24", help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--before", type=Path, metavar="CHECKOUT", help="an older checkout, after its `make setup`")
    parser.add_argument("--before-ways", help="of --ways, those to run there (default: all that it has)")
    parser.add_argument("--init", action="store_true", help="time `hvd.init()` alone")
    parser.add_argument("--no-memory", action="store_true")
    flags = parser.parse_args()
    ways, numbers = flags.ways.split(","), [int(word) for word in flags.ranks.split(",")]
    if unknown := set(ways) - set(WAYS):
        parser.error(f"--ways {','.join(sorted(unknown))}: choose from {', '.join(WAYS)}")
    cells = [Cell(way, ranks) for way in ways for ranks in numbers]
    if flags.before:
        there = flags.before_ways.split(",") if flags.before_ways else [way for way in ways if way not in SINCE]
        cells += [Cell(way, ranks, flags.before) for way in there for ranks in numbers]
    with a_slurm(any(way.startswith("srun") for way in ways)) as node:
        bench = Bench(init=flags.init, node=node)
        seconds: dict[Cell, list[float]] = {cell: [] for cell in cells}
        for _ in range(flags.rounds):
            for cell in random.sample(cells, len(cells)):
                seconds[cell].append(bench.run(cell, look=False)[0])
                print(f"{cell.name():20}{cell.ranks:4} ranks {seconds[cell][-1]:8.2f} s", file=sys.stderr, flush=True)
        print(f"{hardware()}; medians of {flags.rounds} (least to most)\n")
        print("| ranks | started by | seconds | MiB in all |\n|---:|---|---:|---:|")
        for cell in sorted(cells, key=lambda cell: (cell.ranks, list(WAYS).index(cell.way), cell.before is None)):
            took, digits = seconds[cell], 2 if flags.init else 1
            memory = "" if flags.no_memory else f"{bench.run(cell, look=True)[1]:,.0f}"
            spread = f"{min(took):.{digits}f} to {max(took):.{digits}f}"
            print(f"| {cell.ranks} | {cell.name()} | {statistics.median(took):.{digits}f} ({spread}) | {memory} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
