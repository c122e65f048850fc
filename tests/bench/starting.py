"""How long N ranks take from the command to its end, by what starts them, and how much memory they take together.

python -m tests.bench.starting                                                   all of docs/run.md's table: an hour
python -m tests.bench.starting --ways mpirun,starter --ranks 2,8 --rounds 3      some of it
python -m tests.bench.starting --init --ways gloo,processes,starter --ranks 8    `hvd.init()` alone

Each round runs every configuration once, in a random order: `python -m hvdtrain.mnist --dataset digits --epochs 1`, which
trains for less than a second. Then one more run of each is looked at four times a second: the most memory at once that all
its processes have, pages that they share counted once (the sum of Pss in /proc/PID/smaps_rollup).
--init: seconds of `hvd.init()` on the rank that came last, for which no time is spent on waiting for another's import.
srun's ways start a Slurm of this machine's packages in a namespace: as root, with slurm-wlm and munge installed.
"""

import argparse
import contextlib
import random
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from hvdtrain.analysis.measuring import hardware
from tests.bench.paired import rounds, spread
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
SECONDS = 300.0  # that a run may take
LOOK_SECONDS = 0.25


class Cell(NamedTuple):
    """What is run: a way of `WAYS`, and a number of ranks."""

    way: str
    ranks: int


class Bench:
    """Runs cells. node: where there is one, the Slurm on which srun's ways run."""

    def __init__(self, *, init: bool, node: slurm.Slurm | None):
        self.init, self.node = init, node

    def run(self, cell: Cell, *, look: bool) -> tuple[float, float]:
        """Return the seconds of one run, and the most MiB that its processes took together (0 if not asked to `look`)."""
        job, most = new_job(), 0.0
        meeting = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(random.randrange(20_000, 30_000)),
            "WORLD_SIZE": str(cell.ranks),
        }
        env = environment(**{MARK: job}, **(meeting if cell.way == "processes" else {}))
        del env["OMP_WAIT_POLICY"]
        words = shlex.split(WAYS[cell.way].format(ranks=cell.ranks, program=INIT if self.init else TRAIN))
        if cell.way.startswith("srun"):
            assert self.node is not None
            words = self.node.cluster.inside("a", words)
            env["SLURM_CONF"] = f"{self.node.directory}/slurm.conf"
        began = time.monotonic()
        with tempfile.TemporaryFile("w+") as output:
            process = subprocess.Popen(
                words, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=output,
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
            raise SystemExit(f"{cell.way}, {cell.ranks} ranks: exit code {code}\n{said[-2000:]}")
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
    parser.add_argument("--init", action="store_true", help="time `hvd.init()` alone")
    parser.add_argument("--no-memory", action="store_true")
    flags = parser.parse_args()
    ways, numbers = flags.ways.split(","), [int(word) for word in flags.ranks.split(",")]
    if unknown := set(ways) - set(WAYS):
        parser.error(f"--ways {','.join(sorted(unknown))}: choose from {', '.join(WAYS)}")
    cells = [Cell(way, ranks) for way in ways for ranks in numbers]
    with a_slurm(any(way.startswith("srun") for way in ways)) as node:
        bench = Bench(init=flags.init, node=node)
        found = rounds(flags.rounds, cells, lambda cell: bench.run(cell, look=False)[0])
        print(f"{hardware()}; medians of {flags.rounds} (least to most)\n")
        print("| ranks | started by | seconds | MiB in all |\n|---:|---|---:|---:|")
        for cell in sorted(cells, key=lambda cell: (cell.ranks, list(WAYS).index(cell.way))):
            memory = "" if flags.no_memory else f"{bench.run(cell, look=True)[1]:,.0f}"
            took = spread(found[cell], ".2f" if flags.init else ".1f")
            print(f"| {cell.ranks} | {cell.way} | {took} | {memory} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
