"""The progress display of rank 0: tqdm's bar on a terminal, or a line now and then.

A rank's own streams do not show whether its output goes to a terminal: with Open MPI, stdout is a pseudo-terminal even if
mpirun writes to a file. So the stdout of mpirun is examined. Other launchers pass their own terminal on, or a pipe.
"""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, TextIO

from hvdtrain.engines import lines
from hvdtrain.launching import processes
from hvdtrain.output.clock import Window, shares
from hvdtrain.output.metric_names import PHASES

PLAIN_LINE_SECONDS = 10.0  # without a terminal: minimum number of seconds between two lines
KNOWN_SECONDS = 2.0  # measured time before the time left is estimated
OPEN_MPI_COMMANDS = ("mpirun", "mpiexec", "orterun", "prterun")
# Options with which it writes before each line, or to files, too.
TAGS = ("tag-output", "timestamp-output", "output", "output-filename")
WIDTH = 80  # if the terminal does not report its width
BAR = "{desc} {percentage:3.0f}% |{bar:10}| {n_fmt}/{total_fmt}  {remaining} left{postfix}"


class Screen(NamedTuple):
    """A terminal that shows this rank's output unchanged, as a file for tqdm."""

    stream: TextIO  # the stream to write to
    device: int  # file descriptor of the terminal, to query its width

    def width(self) -> int:
        """Return the number of columns."""
        with contextlib.suppress(OSError):
            return os.get_terminal_size(self.device).columns or WIDTH
        return WIDTH

    def write(self, text: str) -> None:
        lines.put_line(self.stream, text)

    def flush(self) -> None:
        """Nothing is left to write."""


def find_screen() -> Screen | None:
    """Return the terminal that shows the output of this process; None if there is none, or lines have tags there."""
    launcher = next((each for each in processes.launchers() if each.name in OPEN_MPI_COMMANDS), None)
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
        # With Open MPI, a rank's stdout is a pseudo-terminal even if mpirun writes to a file: mpirun's own is examined.
        device = os.open(processes.PROC / f"{launcher.pid}/fd/1", os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK)
    except OSError:
        return None
    os.set_blocking(device, True)
    if os.isatty(device):
        return Screen(sys.stdout, device)
    os.close(device)
    return None


def figures_of(window: Window) -> list[str]:
    """Return what was measured, most important figures first, because a narrow terminal shows only those."""
    share = shares(window.ranks)
    parts = [f"{window.rates['samples_per_second']:,.0f} samples/s"]
    parts += [f"{phase} {share[f'{phase}_share']:.0%}" for phase in PHASES]
    parts.append(f"{max(rank.resident_bytes for rank in window.ranks) / 1e9:.1f} GB/rank")
    if cuda_bytes := max(rank.cuda_bytes for rank in window.ranks):
        parts.append(f"GPU {cuda_bytes / 1e9:.1f} GB")
    return parts


class Display:
    """Shows the progress: a bar on a terminal, otherwise a line every 10 s. say: prints a line."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say, self._screen = say, find_screen()
        self._bar: Any = None  # tqdm's
        self._since: tuple[float, int] | None = None  # time and step of the first report: the start-up ends there
        self._last_line = time.monotonic()

    def show(self, epoch: str, step: int, steps: int, figures: Sequence[str], window: Window) -> None:
        """Show the progress. steps: total number of steps. figures: training metrics, such as "loss 0.3136"."""
        now = time.monotonic()
        if self._screen is not None:
            self._bar = self._bar or bar(self._screen, step)
            self._bar.desc, self._bar.total, self._bar.n = epoch, steps, step
            self._bar.set_postfix_str("  ".join([*figures, *figures_of(window)]), refresh=False)
            self.draw()
            return
        began, first_step = self._since = self._since or (now, step)
        if now - self._last_line >= PLAIN_LINE_SECONDS:
            self._last_line = now
            seconds = (now - began) / max(step - first_step, 1) * (steps - step)
            left = [f"{timedelta(seconds=round(seconds))} left"] if now - began >= KNOWN_SECONDS else []
            words = [f"step {step}/{steps}", *figures[:1], *left, *figures[1:], *figures_of(window)]
            self._say("  ".join([epoch, *words]))

    def draw(self) -> None:
        """Draw the bar, if there is one, on the current line."""
        if self._bar is not None and self._screen is not None:
            self._bar.ncols = self._screen.width() - 1  # in the last column, the terminal may wrap the line
            self._bar.refresh()

    def clear(self) -> None:
        """Clear the bar, to print a line."""
        if self._bar is not None:
            self._bar.clear()

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def bar(screen: Screen, step: int) -> Any:
    """Return a bar of tqdm's that begins at `step`."""
    from tqdm import tqdm  # only for a terminal

    class Bar(tqdm):  # type: ignore[misc] # it has no types
        monitor_interval = 0  # no thread

    Bar.set_lock(threading.RLock())  # its own would be of multiprocessing, which may start a process
    return Bar(file=screen, initial=step, leave=False, position=0, ascii=".#", bar_format=BAR)
