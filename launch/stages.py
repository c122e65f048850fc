"""What the set-up programs show: one stage after another, each with what it is at, how far it is and its seconds.

A terminal has one running line with a bar; a log has one line, and where a stage takes longer one more every 15 seconds.
"""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

TERMINAL_SECONDS, LOG_SECONDS = 0.5, 15.0  # between two looks at a stage
BAR = 20  # characters


class Stage:
    """One line per stage, kept up to date by a thread of its own: also while nothing is heard from what is done."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.started = time.monotonic()
        self.terminal = sys.stdout.isatty()
        self.poll: Callable[[], None] = lambda: None  # called before each line: looks how far things are
        self._fraction: float | None = None
        self._note = ""
        self._broken = False  # in a log: lines have been written since the text
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._keep_showing, daemon=True)
        if self.terminal:
            self._draw()
        else:
            _write(f"{text} ...")
        self._thread.start()

    def seconds(self) -> float:
        return time.monotonic() - self.started

    def progress(self, fraction: float, note: str = "") -> None:
        """How far it is, 0 to 1."""
        self._fraction, self._note = fraction, note

    def note(self, text: str) -> None:
        """What it is at now."""
        self._note = text or self._note

    def finish(self, result: str) -> None:
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
    current = Stage(text)
    try:
        yield current
    except BaseException:
        current.finish(f"failed after {current.seconds():.1f} s")
        raise
    current.finish(f"{current.seconds():.1f} s")
