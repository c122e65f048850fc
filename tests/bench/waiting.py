"""How long Horovod's calls take with our waiting code (launch/patches/18 and 19) and as released, which polls.

python -m tests.bench.waiting --ranks 2,3 --rounds 3
python -m tests.bench.waiting --ranks 2 --rounds 30 --only shutdown     only calls with this in their name

Each round runs one job of each kind, in a random order: MPI and Gloo, each number of ranks, waiting code on and off.
Printed: by call, the median and the largest over rounds of each job's median, in milliseconds. A job has one shutdown: its
rows need many rounds. Aim: no median is 50 ms longer.
"""

import argparse
import json
import os
import random
import shlex
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

from tests.bench.paired import rounds
from tests.e2e.launchers import LAUNCHERS, PYTHON, launch

OVER = {"MPI": "mpirun", "Gloo": "gloo"}
SETTINGS = {"OMP_NUM_THREADS": "1", "OMPI_MCA_mpi_yield_when_idle": "1"}  # as hvdtrain.tuned has them
IDLE_SECONDS = 2.5  # that the others spend elsewhere while one rank shuts down
SHUTDOWN = "shutdown while the others idle"
MOST = 50.0  # milliseconds


class Call(NamedTuple):
    times: int
    call: Callable[[], object]
    pause: float = 0.0  # seconds before each, which do not count


def calls() -> dict[str, Call]:
    """Return what to call, by name. Every rank calls the same."""
    import horovod.torch as hvd
    import torch

    one, block, rows = torch.ones(1), torch.ones(16_384), torch.ones(4 * hvd.size())
    return {
        "allreduce, 4 B": Call(200, lambda: hvd.allreduce(one, name="small")),
        "allreduce, 64 KiB": Call(100, lambda: hvd.allreduce(block, name="block")),
        "grouped allreduce, 8 tensors": Call(100, lambda: hvd.grouped_allreduce([one] * 8, name="group")),
        "allgather": Call(100, lambda: hvd.allgather(one, name="gather")),
        "broadcast": Call(100, lambda: hvd.broadcast(one, 0, name="broadcast")),
        "alltoall": Call(100, lambda: hvd.alltoall(rows, name="alltoall")),
        "reducescatter": Call(100, lambda: hvd.reducescatter(rows, name="scatter")),
        "barrier": Call(100, hvd.barrier),
        "allreduce after 0.1 s without any": Call(20, lambda: hvd.allreduce(one, name="idle"), pause=0.1),
    }


def measure(only: str) -> None:
    """On every rank; the one that shuts down first prints the median of each call, in milliseconds, as JSON."""
    import horovod.torch as hvd

    hvd.init()
    medians = {}
    for name, (times, call, pause) in calls().items():
        if only not in name:
            continue
        took = []
        for _ in range(times + 5):
            time.sleep(pause)
            began = time.perf_counter()
            call()
            took.append(time.perf_counter() - began)
        medians[name] = 1000 * statistics.median(took[5:])
    hvd.barrier()
    if hvd.rank() != hvd.size() - 1:
        time.sleep(IDLE_SECONDS)
        return
    # The others' threads sleep by now; the moment is random, because they wake at regular times after the barrier.
    time.sleep(random.uniform(0.3, 1.3))
    began = time.perf_counter()
    hvd.shutdown()
    medians[SHUTDOWN] = 1000 * (time.perf_counter() - began)
    print(f"\n{json.dumps(medians)}", flush=True)


def job(over: str, ranks: int, wake: bool, only: str) -> dict[str, float]:
    variables = SETTINGS | {"HOROVOD_WAKE_ON_ENQUEUE": str(int(wake))} | ({"HOROVOD_CYCLE_TIME": "0.1"} if wake else {})
    start = LAUNCHERS[OVER[over]].format(ranks=ranks)
    chosen = f"--only {shlex.quote(only)}" if only else ""
    done = launch(f"{start} {PYTHON} -m tests.bench.waiting --measure {chosen}", timeout=180, **variables)
    assert done.code == 0, done
    lines = [line[line.index("{") :] for line in done.stdout.splitlines() if SHUTDOWN in line]
    return {name: took for name, took in json.loads(lines[0]).items() if only in name}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,3")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", metavar="TEXT", help="measure only calls with TEXT in their name")
    parser.add_argument("--measure", action="store_true", help="be one rank of such a job")
    flags = parser.parse_args()
    if flags.measure:
        measure(flags.only)
        return
    kinds = [(over, int(ranks), wake) for over in OVER for ranks in flags.ranks.split(",") for wake in (True, False)]
    found = rounds(flags.rounds, kinds, lambda kind: job(*kind, flags.only))
    if not any(any(jobs) for jobs in found.values()):
        parser.error(f"--only {flags.only}: no call has this in its name")
    print(f"load average at the end: {os.getloadavg()[0]:.1f}\n")
    print("| call | over | ranks | polling, ms | waiting, ms | more | largest: polling, ms | waiting, ms |")
    print("|---|---|---:|---:|---:|---:|---:|---:|")
    slower = []
    for over, ranks, wake in kinds:
        for name in found[over, ranks, False][0] if wake else ():
            polled, waited = ([one[name] for one in found[over, ranks, on]] for on in (False, True))
            off, on = statistics.median(polled), statistics.median(waited)
            row = f"| {name} | {over} | {ranks} | {off:.3g} | {on:.3g} | {on - off:+.3g} |"
            print(f"{row} {max(polled):.3g} | {max(waited):.3g} |")
            slower += [name] * (on - off > MOST)
    print(f"\nmore than {MOST:g} ms longer: {', '.join(slower) or 'none'}")


if __name__ == "__main__":
    main()
