"""The exit of a forked rank: like the interpreter's, but without clearing the modules that the ranks share."""

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
    """Run the program and exit as the interpreter would.

    shared: modules that were imported before the fork. report: called with the exit code as soon as the program has failed,
    because exit handlers may wait for other ranks (`hvd.shutdown`).

    The interpreter clears all modules at exit. In a forked process, that copies nearly every memory page with Python
    objects: 0.4 s of CPU time and 160 MB per rank. Here only the program's own modules are cleared, so that open files are
    flushed and finalizers run.
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
        sys.last_traceback = sys.last_value = None  # they keep the program's objects alive
        error.__traceback__ = None
    if code != 0:
        with contextlib.suppress(OSError):  # the starter has exited
            report(128 + signal.SIGINT if interrupted else code)
    finish = getattr(threading, "_shutdown", None)  # waits for non-daemon threads
    for step in (finish, atexit._run_exitfuncs, lambda: _take_apart(shared)):
        with contextlib.suppress(BaseException):
            step()  # type: ignore[misc]
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BaseException):
            stream.flush()
    ctypes.CDLL(None).fflush(None)  # buffers of C stdio
    if interrupted:  # like the interpreter, end by the signal, so that a shell notices it
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
    """Clear the program's module and the modules that only it has imported, then run the garbage collector."""
    own = [module for name, module in list(sys.modules.items()) if name not in shared or name == "__main__"]
    for module in own:
        names = getattr(module, "__dict__", None)
        if isinstance(names, dict):
            for name in [name for name in names if name not in ("__builtins__", "__name__", "__spec__", "__loader__")]:
                names[name] = None  # like the interpreter: finalizers may still look up the name
    gc.collect()
