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


def open_lock(file: Path) -> int:
    """Open a file to lock, only for those who may write beside it: whoever can open a file can lock it, and stop others.

    Returns its descriptor. Raises OSError.
    """
    handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)  # NFS locks only what is open for writing
    above, found = file.parent.stat(), os.fstat(handle)
    group = 0o060 if above.st_mode & 0o020 and found.st_gid == above.st_gid else 0
    if found.st_uid == os.geteuid():
        os.fchmod(handle, 0o600 | group)  # whatever the umask
    return handle


@contextmanager
def only_one(file: Path, what: str) -> Iterator[None]:
    """Hold a lock on a file, for which other processes wait here. The kernel releases it with its holder."""
    try:
        handle = open_lock(file)
    except OSError:  # it can only be read, and so can what it protects
        yield
        return
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
