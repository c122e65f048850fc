"""What every rank of a job does: the twins that the parent names, one after the other. Writes each verdict as a line.

mpirun -np 2 python -m tests.twins.ranks ENGINE DIRECTORY     DIRECTORY/names has a name in each line
"""

import json
import os
import sys
import time
import warnings
from pathlib import Path

from hvdtrain.engines.start import start
from tests.twins.catalogue import catalogue
from tests.twins.twin import Verdict, outcome


def main() -> None:
    engine_name, directory = sys.argv[1], Path(sys.argv[2])
    wanted = set((directory / "names").read_text().splitlines())
    warnings.simplefilter("ignore")
    (directory / f"pid-{os.getpid()}").touch()
    with start(engine_name, device="cpu") as engine, (directory / f"rank-{engine.rank}").open("a") as file:
        for twin in catalogue():
            if twin.name not in wanted:
                continue
            began = time.monotonic()
            verdict: Verdict = outcome(engine, twin)
            seconds = round(time.monotonic() - began, 2)
            print(json.dumps([twin.name, verdict.kind, verdict.detail, seconds]), file=file, flush=True)
            engine.barrier()  # so that a rank that ended alone is waited for here, and no twin is begun twice


if __name__ == "__main__":
    main()
