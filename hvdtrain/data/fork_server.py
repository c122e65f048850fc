"""The last module that the fork server of the input workers imports (`loading.start_workers_early`).

It imports the rank's program, as each worker would otherwise do by itself: torch alone takes seconds of CPU time and 200 MB
per worker. Python's own way, a preload of "__main__", does nothing before 3.12.8 and 3.13.1 (python/cpython#126631), nothing
for `python -m NAME`, and ends the server if the program fails.

What is imported by then stays until the end, so the garbage collector need not examine it: not in the workers, where that
would copy the memory pages that they share with the server, and not when the server exits. That takes 0.2 s of CPU time then
instead of 1.1 s, for which a launcher waits, because the server holds its output open.
"""

import contextlib
import gc
import io
import json
import re
import sys
from multiprocessing import process, spawn

from hvdtrain.data.loading import PROGRAM
from hvdtrain.engines import start
from hvdtrain.launching.processes import PR_SET_PDEATHSIG, prctl


def import_program(preparation: str) -> None:
    """Import the program as multiprocessing does in a worker. If that fails, a worker will do the same, and say so.

    Raises SystemExit if the program starts to train: no worker could import it, and the rank says so (`inputs.iterate`).
    """
    current = process.current_process()
    current._inheriting = True  # type: ignore[attr-defined] # private: as in a worker, no new processes
    with contextlib.suppress(ImportError):
        import mpi4py

        mpi4py.rc.initialize = False  # `from mpi4py import MPI` would join the job as one more process
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            spawn.prepare(json.loads(preparation))
    except (Exception, SystemExit):
        pass
    finally:
        del current._inheriting  # type: ignore[attr-defined] # private
    if start.refused_in_worker:
        raise SystemExit


if found := re.search(f"{PROGRAM}([0-9a-f]*)", sys.orig_argv[-1]):
    if found[1]:
        import_program(bytes.fromhex(found[1]).decode())
    gc.freeze()
    prctl(PR_SET_PDEATHSIG, 0)  # see ends_with_rank.py; from here on, it exits with what the program does at its exit
