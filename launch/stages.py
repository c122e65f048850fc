"""Progress output of the set-up programs: one stage after another, with its current step, progress and seconds.

On a terminal, each stage is one line with a progress bar. In a log, it is one line, and another every 15 seconds.
"""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

TERMINAL_SECONDS, LOG_SECONDS = 0.5, 15.0  # between two updates
BAR = 20  # characters


class Stage:
    """Shows one stage, updated by a thread, so that the time advances even without output from the command."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.started = time.monotonic()
        self.terminal = sys.stdout.isatty()
        self.poll: Callable[[], None] = lambda: None  # called before each update, to set the progress
        self._fraction: float | None = None
        self._note = ""
        self._broken = False  # in a log: whether lines were written since the text
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._keep_showing, daemon=True)
        if self.terminal:
            self._draw()
        else:
            _write(f"{text} ...")
        self._thread.start()

    def seconds(self) -> float:
        """Return the seconds since the start of the stage."""
        return time.monotonic() - self.started

    def progress(self, fraction: float, note: str = "") -> None:
        """Set the progress, 0 to 1."""
        self._fraction, self._note = fraction, note

    def note(self, text: str) -> None:
        """Set the current step."""
        self._note = text or self._note

    def finish(self, result: str) -> None:
        """End the stage and show its result."""
        self._over.set()
        self._thread.join()
        if self.terminal:
            _write(f"\r\x1b[K{self.text} ... {result}\n")
        else:
            _write(f"    {result}\n" if self._broken else f" {result}\n")

    def _keep_showing(self) -> None:
        while not self._over.wait(TERMINAL_SECONDS if self.terminal else LOG_SECONDS):
            self.poll()
            if self.terminal:
                self._draw()
            else:
                percent = "" if self._fraction is None else f"{self._fraction:.0%}"
                facts = ", ".join(filter(None, (percent, self._note, f"{self.seconds():.0f} s")))
                _write(f"{'' if self._broken else chr(10)}    {facts}\n")
                self._broken = True

    def _draw(self) -> None:
        width = max(20, shutil.get_terminal_size().columns - 1)
        bar = ""
        if self._fraction is not None:
            full = min(BAR, int(self._fraction * BAR))
            bar = f"[{'#' * full}{'.' * (BAR - full)}] {self._fraction:.0%} "
        line = f"{self.text} ... {bar}{self.seconds():.0f} s  {self._note}"
        _write("\r" + line[:width] + "\x1b[K")


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


@contextmanager
def stage(text: str) -> Iterator[Stage]:
    """Show a stage during the block, and then its seconds."""
    current = Stage(text)
    try:
        yield current
    except BaseException:
        current.finish(f"failed after {current.seconds():.1f} s")
        raise
    current.finish(f"{current.seconds():.1f} s")
