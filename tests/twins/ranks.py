"""What every rank of a job does: the twins that the parent names, one after the other. Writes each verdict as a line.

mpirun -np 2 python -m tests.twins.ranks ENGINE DIRECTORY     DIRECTORY/names has a name in each line

A rank leaves after a twin that hung, died or ended otherwise than on the others: what is left is for another job.
"""

import faulthandler
import json
import os
import sys
import time
import warnings
from pathlib import Path

from hvdtrain.engines.choice import start_engine
from tests.twins.catalogue import catalogue
from tests.twins.twin import outcome

LIMIT, WITH_WORKERS = (
    90.0,
    400.0,
)  # seconds that a twin may take; with processes that import the program on a busy machine
ALONE = 20.0  # seconds that the other ranks may take longer


def verdicts_of(directory: Path, name: str, ranks: int) -> list[str]:
    """Return what each rank has come to, once all have or ALONE seconds are over."""
    until = time.monotonic() + ALONE
    while True:
        kinds = [
            json.loads(line)[1] for rank in range(ranks) for line in lines(directory, rank) if f'["{name}", ' in line
        ]
        if len(kinds) == ranks or time.monotonic() > until:
            return kinds
        time.sleep(0.002)


def lines(directory: Path, rank: int) -> list[str]:
    """Return what a rank has written last: a name as it begins, its verdict as it ends. It may be one twin ahead."""
    path = directory / f"rank-{rank}"
    return [line for line in path.read_text().splitlines()[-4:] if line.endswith("]")] if path.exists() else []


def main() -> None:
    engine_name, directory = sys.argv[1], Path(sys.argv[2])
    wanted = set((directory / "names").read_text().splitlines())
    warnings.simplefilter("ignore")
    (directory / f"pid-{os.getpid()}").touch()
    twins = list(catalogue())  # before the engine is started: SyncBatchNorm then runs on GPUs only
    with start_engine(engine_name, device="cpu") as engine, (directory / f"rank-{engine.rank}").open("a") as file:
        stack = (directory / f"stack-{engine.rank}").open("w")
        for twin in twins:
            if twin.name not in wanted:
                continue
            began = time.monotonic()
            print(json.dumps([twin.name]), file=file, flush=True)
            starts = twin.brief or "num_workers" in twin.name
            faulthandler.dump_traceback_later(WITH_WORKERS if starts else LIMIT, exit=True, file=stack)
            verdict = outcome(engine, twin)
            faulthandler.cancel_dump_traceback_later()
            seconds = round(time.monotonic() - began, 2)
            print(json.dumps([twin.name, verdict.kind, verdict.detail, seconds]), file=file, flush=True)
            kinds = verdicts_of(directory, twin.name, engine.size)
            if kinds != [verdict.kind] * engine.size or verdict.kind in ("TRACEBACK", "failed"):
                (directory / "ended").touch()
                os._exit(9)


if __name__ == "__main__":
    main()
