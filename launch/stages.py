"""Stages of the set-up programs: each is one line of output, with its current step and its seconds; some wait for a lock."""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TERMINAL_SECONDS, LOG_SECONDS = 0.5, 15.0  # between two updates


class Stage:
    """What a stage shows: its current step, and at its end another result than its seconds."""

    note = ""
    result = ""


@contextmanager
def stage(text: str) -> Iterator[Stage]:
    """Show a stage during the block. A terminal's line is drawn again every half second; a log has a line now and then."""
    current, started, over = Stage(), time.monotonic(), threading.Event()
    terminal = sys.stdout.isatty()

    def show() -> None:
        while not over.wait(TERMINAL_SECONDS if terminal else LOG_SECONDS):
            facts = f"{time.monotonic() - started:.0f} s  {current.note}".strip()
            width = max(20, shutil.get_terminal_size().columns - 1)
            _write(f"\r{f'{text} ... {facts}'[:width]}\x1b[K" if terminal else f"\n    {facts} ...")

    _write(f"{text} ...")
    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    result = "failed after "
    try:
        yield current
        result = current.result
    finally:
        over.set()
        thread.join()
        _write(f"{f'{chr(13)}{text} ...' if terminal else ''} {result}{time.monotonic() - started:.1f} s")
        _write("\x1b[K\n" if terminal else "\n")


@contextmanager
def only_one(directory: Path, what: str) -> Iterator[None]:
    """Hold a lock on a directory, for which other processes wait here. The kernel releases it with its holder."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        with stage(f"wait for the other {what}"):
            fcntl.flock(handle, fcntl.LOCK_EX)
    except OSError:
        pass  # a file system without locks: both work, and atomic renames keep cached wheels valid
    try:
        yield
    finally:
        os.close(handle)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
