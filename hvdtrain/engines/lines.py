"""Lines on standard output and standard error: written whole, and never waited for by what ends a process."""

import contextlib
import os
import sys
import threading
from collections.abc import Callable

WRITE_SECONDS = 2.0  # for the reader of a last message to take it


def write_whole_lines() -> None:
    r"""Make stdout and stderr write each line with one system call, and no character fail. Idempotent.

    What the encoding of the terminal lacks, and a part of a file name that is not UTF-8, is written as an escape sequence.

    Trap: with PYTHONUNBUFFERED=1, which is common in container images, `print` writes a line and its line break separately.
    Open MPI tags both, and another rank's line may come between them. The same holds for the end of a text of several lines:
    print them with `sep="\n"`.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError):  # the stream was replaced (hence the `ignore`) or closed
            stream.reconfigure(line_buffering=True, write_through=False, errors="backslashreplace")  # type: ignore[union-attr]


def within(seconds: float, action: Callable[[], object]) -> bool:
    """Call `action` in a thread of its own, and return after at most `seconds`; whether it has ended by then.

    For everything that a process writes before it ends because of a fault: a full pipe (a paused pager, Ctrl-S) and a file
    system that hangs block a write for ever. Exceptions of `action` are ignored.
    """

    def call() -> None:
        with contextlib.suppress(Exception):
            action()

    thread = threading.Thread(target=call, name="last words", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # this user may have no more threads
        return False
    thread.join(seconds)
    return not thread.is_alive()


def say_within(text: str, seconds: float = WRITE_SECONDS) -> bool:
    """Write `text` to standard error, and return after at most `seconds`; whether all of it was written.

    Trap: not through `sys.stderr`, whose lock a thread that never returns would hold when the interpreter flushes it.
    """

    def write() -> None:
        try:
            number = sys.stderr.fileno()
        except (AttributeError, OSError, ValueError):  # closed, or replaced by an object without a file
            sys.stderr.write(text)
            return
        left = text.encode(errors="backslashreplace")
        while left:
            left = left[os.write(number, left) :]

    return within(seconds, write)
