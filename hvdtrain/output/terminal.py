"""Finds out whether this rank's output goes to a terminal on which a line can be drawn again and again.

A rank's own streams do not show this: with Open MPI, stdout is a pseudo-terminal even if mpirun writes to a file. Therefore
the stdout of mpirun is examined. Other launchers pass their own terminal on, or a pipe.
"""

import contextlib
import os
import sys
from typing import NamedTuple, TextIO

from hvdtrain.launching import processes

OPEN_MPI = ("mpirun", "mpiexec", "orterun", "prterun")
# Options with which it writes before each line, or to files, too.
TAGS = ("tag-output", "timestamp-output", "output", "output-filename")
WIDTH = 80  # if the terminal does not report its width


class Screen(NamedTuple):
    """A terminal that shows this rank's output unchanged."""

    stream: TextIO  # the stream to write to
    device: int  # file descriptor of the terminal, to query its width

    def width(self) -> int:
        """Return the number of columns."""
        with contextlib.suppress(OSError):
            return os.get_terminal_size(self.device).columns or WIDTH
        return WIDTH


def find() -> Screen | None:
    """Return the terminal that shows the output of this process; None if there is none, or lines have tags there."""
    launcher = next((each for each in processes.launchers() if each.name in OPEN_MPI), None)
    if launcher is None:
        with contextlib.suppress(AttributeError, OSError, ValueError):  # missing, closed, or no file
            if sys.stderr.isatty():
                return Screen(sys.stderr, sys.stderr.fileno())
        return None
    options = [word for word in processes.command_line(launcher.pid) if word.startswith("-")]
    if any(option.lstrip("-").partition("=")[0] in TAGS for option in options):
        return None
    try:
        # O_NONBLOCK: opening a named pipe waits for a reader.
        device = os.open(processes.PROC / f"{launcher.pid}/fd/1", os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK)
    except OSError:
        return None
    os.set_blocking(device, True)
    if os.isatty(device):
        return Screen(sys.stdout, device)
    os.close(device)
    return None
