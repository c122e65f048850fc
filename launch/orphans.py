"""Ends what a killed set-up has left running. Its uv, pip or `python -m venv` would write into the .venv of the next one."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

from stages import stage
from steps import Refusal

MARK = "HVDTRAIN_SETUP"  # in the environment of all that a set-up starts: its checkout
SECONDS = {signal.SIGTERM: 5.0, signal.SIGKILL: 60.0}  # for the processes to end, after each of these signals


def end_orphans(root: Path) -> None:
    """End the processes of earlier set-ups of checkout `root`, and mark those of this one. The caller holds the lock.

    Raises Refusal if one does not end.
    """
    if orphans(root):
        with stage("end what an interrupted set-up has left running"):
            for number, seconds in SECONDS.items():
                _end(root, number, seconds)
        if left := orphans(root):
            raise Refusal(
                f"process {left[0]} of an interrupted set-up does not end, not even by SIGKILL: does its file system hang?"
            )
    os.environ[MARK] = str(root)


def orphans(root: Path) -> list[int]:
    """Return the pids of this user's other processes that a set-up of checkout `root` has started."""
    mark, found = f"{MARK}={root}\0".encode(), []
    for path in Path("/proc").glob("[0-9]*/environ"):
        pid = int(path.parent.name)
        with contextlib.suppress(OSError):  # another user's, or it has ended
            if pid != os.getpid() and mark in path.read_bytes():
                found.append(pid)
    return found


def _end(root: Path, number: signal.Signals, seconds: float) -> None:
    until = time.monotonic() + seconds
    while (left := orphans(root)) and time.monotonic() < until:
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)
        time.sleep(0.1)
