"""What the fork server of the DataLoader workers imports before it forks them (`loading.start_workers_early`): the modules
that they share, and the rank's program, which each worker would otherwise import by itself: torch alone takes seconds of
CPU time and 200 MB per worker.

The server is multiprocessing's. Its own way to import the program, a preload of "__main__", does nothing before 3.12.8 and
3.13.1 (python/cpython#126631), nothing for `python -m NAME`, and ends the server if the program fails.
"""

import contextlib
import importlib
import io
import json
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import process, spawn

from hvdtrain.launching import startup
from hvdtrain.launching.processes import PR_SET_PDEATHSIG, prctl

WANTED = "hvdtrain-wants-"  # begins what the server's command line says, as the name of a module that there is not
LONGEST = 2**16  # characters; Linux allows twice as many in an argument


def wanted(modules: Sequence[str]) -> str:
    """Return what the server must know, as a name that Python can quote: JSON in hexadecimal digits.

    Without the program if that would be too long.
    """
    prepared = spawn.get_preparation_data("server")
    keys = ("sys_path", "sys_argv", "orig_dir", "dir", "init_main_from_name", "init_main_from_path")
    for program in ({key: prepared[key] for key in keys if key in prepared}, None):
        text = json.dumps([list(modules), program], default=str).encode().hex()  # there may be a Path in sys.argv
        if len(text) <= LONGEST:
            break
    # In a name, not in an environment variable:
    # glibc's setenv is not safe while other threads, such as MPI's, read the environment.
    return WANTED + text


def import_all(modules: Sequence[str], program: Mapping[str, object] | None) -> None:
    """Import the modules, without those that are not installed, and then the program.

    Until that is done, the kernel ends this process with the rank: a launcher waits for it, because the server holds its
    output open, and a job that is started again shares the cores with it.
    """
    # The server itself notices the rank's end only after the imports,
    # half a minute on few cores. A launcher would wait for that.
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for name in modules:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    if program is not None:
        import_program(dict(program))
    # What is imported by now stays until the end, so the garbage collector need not examine it: not in the workers, where
    # that would copy shared memory pages, and not when the server exits, which takes 0.2 s of CPU time instead of 1.1.
    startup.freeze()
    prctl(PR_SET_PDEATHSIG, 0)  # from here on, it exits with what the program does at its exit


def import_program(preparation: dict[str, object]) -> None:
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
            spawn.prepare(preparation)
    except (Exception, SystemExit):
        pass
    finally:
        del current._inheriting  # type: ignore[attr-defined] # private
    start = sys.modules.get("hvdtrain.engines.choice")
    if start is not None and start.refused_in_worker:
        raise SystemExit


# In the server; not in a worker, which has the server's command line, and imports this if the server could not.
if not getattr(process.current_process(), "_inheriting", False) and (
    found := re.search(f"{WANTED}([0-9a-f]+)", sys.orig_argv[-1])
):
    import_all(*json.loads(bytes.fromhex(found[1])))
