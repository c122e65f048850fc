"""The exit of a forked rank: the interpreter's own, up to the point where it would clear all modules.

That would copy nearly every memory page with Python objects that the ranks share: 0.4 s of CPU time and 160 MB per rank. The
interpreter waits for threads and calls exit handlers, in reverse order. `prepare_exit` registers one before all others, so
it is called last: it does what clearing the modules would do for the program, and ends the process.
"""

import atexit
import contextlib
import ctypes
import gc
import io
import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

from hvdtrain.engines.lines import put_line
from hvdtrain.launching import run_script

_ended: tuple[int, dict[str, object]] | None = None  # in a rank whose program has ended: its exit code and namespace


def prepare_exit() -> None:
    """Register the last exit handler. Call it before the imports that the ranks share."""
    atexit.register(_end)


def run_rank(program: run_script.Program, report: Callable[[int], object]) -> NoReturn:
    """Run the program and exit as the interpreter would.

    report: called with the exit code as soon as the program has failed, because exit handlers may wait for other ranks
    (`hvd.shutdown`).
    """
    global _ended
    code = 0
    try:
        run_script.run_program(program)
    except SystemExit as left:
        code = code_of(left)
    except BaseException as error:
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        sys.excepthook(type(error), error, error.__traceback__)
        sys.last_traceback = sys.last_value = None  # they keep the program's objects alive
        error.__traceback__ = None
    if code != 0:
        with contextlib.suppress(OSError):  # nobody hears it any more
            report(code if code > 0 else 128 - code)
    _ended = code, program.main.__dict__
    sys.exit(code)


def code_of(left: SystemExit) -> int:
    """Return the exit code of a program that was left by this exception, as the interpreter does."""
    if left.code is None:
        return 0
    if isinstance(left.code, int):
        return left.code & 0xFF
    put_line(sys.stderr, f"{left.code}\n")
    return 1


def _end() -> None:
    """Flush the program's open files, drop its objects, and end the process with its exit code."""
    if _ended is None:  # not a rank
        return
    code, namespace = _ended
    namespace.clear()
    gc.collect()  # calls the finalizers of the program's objects
    for each in gc.get_objects():  # not those from before the fork, which are frozen
        if isinstance(each, io.IOBase):
            with contextlib.suppress(Exception):  # closed, or a full disk
                each.flush()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    ctypes.CDLL(None).fflush(None)  # buffers of C stdio
    if code < 0:  # an interrupt: end by the signal, so that a shell notices it
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)
