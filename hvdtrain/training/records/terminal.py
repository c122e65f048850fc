"""Where this rank's output ends: on a terminal that a bar can be drawn on, on one that takes whole lines, or elsewhere.

A rank's own streams do not tell. Open MPI gives ranks a terminal as standard output also where mpirun writes into a file;
horovodrun gives them pipes also on a terminal. So the launcher that started this rank is asked for its standard output.
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, TextIO

OPEN_MPI = ("mpirun", "mpiexec", "orterun", "prterun")
LAUNCHERS = (*OPEN_MPI, "mpiexec.hydra", "horovodrun")
WIDTH = 80  # where the terminal does not say


class Screen(NamedTuple):
    """A terminal that shows this rank's output."""

    stream: TextIO  # what reaches it
    draws: bool  # it can be drawn on: what is written arrives as it is, with nothing before each line
    device: int  # file descriptor of the terminal itself, to ask for its width

    def width(self) -> int:
        with contextlib.suppress(OSError):
            return os.get_terminal_size(self.device).columns or WIDTH
        return WIDTH


def find() -> Screen | None:
    """Return the terminal that shows what this process writes; None where a file or a pipe gets it."""
    launcher = next(_launchers(os.getppid()), None)
    if launcher is None:  # alone, or under torchrun, which hands its own streams on
        with contextlib.suppress(OSError, ValueError):  # no such stream, or none with a file behind it
            if sys.stderr.isatty():
                return Screen(sys.stderr, True, sys.stderr.fileno())
        return None
    pid, name, arguments = launcher
    try:
        device = os.open(f"/proc/{pid}/fd/1", os.O_WRONLY | os.O_NOCTTY)
    except OSError:
        return None
    if not os.isatty(device):
        os.close(device)
        return None
    tagged = any("output" in argument or "timestamp" in argument for argument in arguments)
    return Screen(sys.stdout, name in OPEN_MPI and not tagged, device)


def _launchers(pid: int) -> Iterator[tuple[int, str, list[str]]]:
    """Yield the launchers among a process and its ancestors, the innermost first: process number, name, own options."""
    with contextlib.suppress(OSError, ValueError):
        while pid > 1:
            process = Path(f"/proc/{pid}")
            words = process.joinpath("cmdline").read_bytes().decode(errors="replace").split("\0")
            name = next((Path(word).name for word in words[:2] if Path(word).name in LAUNCHERS), "")
            if name:
                yield pid, name, [word for word in words if word.startswith("-")]
            pid = int(process.joinpath("stat").read_text().rpartition(")")[2].split()[1])
