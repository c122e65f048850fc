"""The end of a forked rank: what the interpreter does at its own end, but for taking apart what the ranks share."""

import atexit
import contextlib
import ctypes
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Collection
from typing import NoReturn

from hvdtrain.engines import program


def run_and_leave(found: program.Program, shared: Collection[str], report: Callable[[int], object]) -> NoReturn:
    """Run the program and end the process as the interpreter would.

    shared: modules that were there before the fork. report: told at once where the program has failed, with its exit code:
    what is still to be done at the end may wait for other ranks (`hvd.shutdown`).

    The interpreter's own end takes every module apart. In a forked process that copies nearly every page which holds a
    Python object: 0.4 s of a core and 160 MB for each rank, only to be freed. Here it is done to what the program itself has
    made: so files that it left open are written, and its objects are told.
    """
    code, interrupted = 0, False
    try:
        program.run(found)
    except SystemExit as left:
        code = _code_of(left)
    except BaseException as error:
        code, interrupted = 1, isinstance(error, KeyboardInterrupt)
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        sys.excepthook(type(error), error, error.__traceback__)
        sys.last_traceback = sys.last_value = None  # they hold what is to be taken apart
        error.__traceback__ = None
    if code != 0:
        with contextlib.suppress(OSError):  # the starter is gone
            report(128 + signal.SIGINT if interrupted else code)
    finish = getattr(threading, "_shutdown", None)  # waits for threads that are no daemons
    for step in (finish, atexit._run_exitfuncs, lambda: _take_apart(shared)):
        with contextlib.suppress(BaseException):
            step()  # type: ignore[misc]
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BaseException):
            stream.flush()
    ctypes.CDLL(None).fflush(None)  # what C has printed
    if interrupted:  # as the interpreter does: a shell wants to know
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code)


def _code_of(left: SystemExit) -> int:
    if left.code is None:
        return 0
    if isinstance(left.code, int):
        return left.code & 0xFF
    print(left.code, file=sys.stderr)
    return 1


def _take_apart(shared: Collection[str]) -> None:
    """Clear what the program and the modules that only it has imported hold, and collect what is then unreachable."""
    own = [module for name, module in list(sys.modules.items()) if name not in shared or name == "__main__"]
    for module in own:
        names = getattr(module, "__dict__", None)
        if isinstance(names, dict):
            for name in [name for name in names if name not in ("__builtins__", "__name__", "__spec__", "__loader__")]:
                names[name] = None  # as the interpreter does: who is told may still look for it
    gc.collect()
