"""Finds out where this rank's output goes: a terminal that can show a progress bar, one for whole lines, or elsewhere.

A rank's own streams do not show this: with Open MPI, stdout is a pseudo-terminal even if mpirun writes to a file; with
horovodrun, it is a pipe even on a terminal. Therefore the stdout of the launcher is examined.
"""

import contextlib
import os
import sys
from typing import NamedTuple, TextIO

from hvdtrain.launching import processes

OPEN_MPI = ("mpirun", "mpiexec", "orterun", "prterun")
LAUNCHERS = (*OPEN_MPI, "mpiexec.hydra", "horovodrun")
WIDTH = 80  # if the terminal does not report its width


class Screen(NamedTuple):
    """A terminal that shows this rank's output."""

    stream: TextIO  # the stream to write to
    draws: bool  # a bar can be drawn: the launcher passes output on unchanged, without a tag before each line
    device: int  # file descriptor of the terminal, to query its width

    def width(self) -> int:
        """Return the number of columns."""
        with contextlib.suppress(OSError):
            return os.get_terminal_size(self.device).columns or WIDTH
        return WIDTH


def find() -> Screen | None:
    """Return the terminal that shows the output of this process; None if it goes to a file or a pipe."""
    launcher = next((each for each in processes.launchers() if each.name in LAUNCHERS), None)
    if launcher is None:  # no launcher, or torchrun, which passes its streams on
        with contextlib.suppress(OSError, ValueError):  # the stream is missing or has no file descriptor
            if sys.stderr.isatty():
                return Screen(sys.stderr, True, sys.stderr.fileno())
        return None
    options = [word for word in processes.command_line(launcher.pid) if word.startswith("-")]
    try:
        # O_NONBLOCK: opening a named pipe waits for a reader.
        device = os.open(processes.PROC / f"{launcher.pid}/fd/1", os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK)
    except OSError:
        return None
    os.set_blocking(device, True)
    if not os.isatty(device):
        os.close(device)
        return None
    tagged = any("output" in option or "timestamp" in option for option in options)
    return Screen(sys.stdout, launcher.name in OPEN_MPI and not tagged, device)
