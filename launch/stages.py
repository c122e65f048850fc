"""Stages of the set-up programs: each is one line of output, with its current step and its seconds; some wait for a lock."""

from __future__ import annotations

import fcntl
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

UPDATE_SECONDS = 15.0


class Stage:
    """What a stage shows: its current step, and at its end another result than its seconds."""

    note = ""
    result = ""


@contextmanager
def stage(text: str) -> Iterator[Stage]:
    """Show a stage during the block: its name, now and then its current step, and its seconds at the end."""
    current, started, over = Stage(), time.monotonic(), threading.Event()

    def show() -> None:
        while not over.wait(UPDATE_SECONDS):
            _write(f"\n    {f'{time.monotonic() - started:.0f} s  {current.note}'.strip()} ...")

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
        _write(f" {result}{time.monotonic() - started:.1f} s\n")


@contextmanager
def only_one(file: Path, what: str) -> Iterator[None]:
    """Hold a lock on a file, for which other processes wait here. The kernel releases it with its holder."""
    try:
        handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)  # NFS locks only what is open for writing
    except OSError:  # it is only to be read
        handle = os.open(file if file.exists() else file.parent, os.O_RDONLY)
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
