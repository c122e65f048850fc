"""Lines on standard output and standard error: written whole, never the end of a training, and never waited for by what
ends a process.
"""

import contextlib
import functools
import io
import os
import select
import sys
import threading
from collections.abc import Callable
from typing import TextIO

from hvdtrain.engines.errors import Failure

WRITE_SECONDS = 2.0  # for the reader of a last message to take it


def write_whole_lines() -> None:
    r"""Make stdout and stderr write each line with one system call, and no character fail. Idempotent.

    What the encoding of the terminal lacks, and a part of a file name that is not UTF-8, is written as an escape sequence.

    Print a text of several lines with `sep="\n"`: its end is written apart, too.
    """
    for stream in (sys.stdout, sys.stderr):
        # Replaced (hence the `ignore`), closed, or on a full disk.
        with contextlib.suppress(AttributeError, ValueError, OSError):
            # Trap: with PYTHONUNBUFFERED=1, `print` writes a line and its end apart.
            # Open MPI tags both, and other ranks' lines come between.
            stream.reconfigure(line_buffering=True, write_through=False, errors="backslashreplace")  # type: ignore[union-attr]


def put_line(stream: TextIO, text: str) -> Exception | None:
    """Write `text` to a standard stream at once. Return the error if it could not be written: then it is lost.

    For all that is said while a run goes on: a full disk, a reader that is gone or a closed stream must not end it.
    """
    try:
        if not is_file(stream):
            stream.write(text)
            stream.flush()
            return None
        number = stream.fileno()
        with contextlib.suppress(OSError):
            stream.flush()  # what the program has printed comes first
        # Past the stream's buffer. Trap: a stream that failed fails
        # again with each later line, and makes 120 of the exit code.
        left = text.encode(stream.encoding, errors="backslashreplace")
        while left:
            try:
                left = left[os.write(number, left) :]
            except BlockingIOError:  # a terminal or a pipe that another process has set to O_NONBLOCK
                select.select([], [number], [])
    except Exception as error:  # of any kind, from the program's own stream
        return error
    return None


def is_file(stream: TextIO) -> bool:
    """Return whether a stream is as the interpreter has made it, and not one of the program, a notebook or pytest."""
    return type(stream) is io.TextIOWrapper and isinstance(getattr(stream.buffer, "raw", stream.buffer), io.FileIO)


def say(line: str) -> Exception | None:
    """Write a line to standard output, as `put_line` does."""
    return put_line(sys.stdout, line + "\n")


def warn(line: str) -> None:
    """Write a warning to standard error, as `put_line` does."""
    put_line(sys.stderr, f"warning: {line}\n")


@functools.cache
def warn_once(line: str) -> None:
    """Write a warning once in this process."""
    warn(line)


def result(text: str) -> None:
    """Write what a command was started for to standard output. Raises Failure if it cannot be written."""
    if error := say(text):
        raise Failure(f"standard output cannot be written ({getattr(error, 'strerror', None) or error})")


def within(seconds: float, action: Callable[[], object]) -> bool:
    """Call `action` in a thread of its own, and return after at most `seconds`; whether it has ended by then.

    For everything that a process writes before it ends because of a fault. Exceptions of `action` are ignored.
    """

    def call() -> None:
        with contextlib.suppress(Exception):
            action()

    # A full pipe, as of a paused pager, and a file system that hangs block a write for ever.
    thread = threading.Thread(target=call, name="last words", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # this user may have no more threads
        with contextlib.suppress(OSError):  # it is closed
            if select.select([], [2], [], seconds)[1]:  # standard error takes a line
                call()
                return True
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
