"""What the main thread tells the watchdog's: the phase of the run, and that it makes progress.

Written by the main thread, read by the watchdog's: plain attributes, no lock.
"""

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

LEAST_SECONDS, TIMES_LONGEST = 30.0, 20.0  # a step's automatic limit follows the longest time between two steps so far
TIMES_LONGEST_ASKED = 3.0  # and so does one that was asked for, where steps turn out to take about so long
TIMES_STEP = 10.0  # phases known to be long may take this many times a step's limit,
# or this many seconds, if that is more:
PHASE_SECONDS = {
    "start-up": 600.0,
    "first step": 600.0,
    "compilation": 600.0,
    "reading data": 600.0,
    "checkpoint": 600.0,
}


class Phase(NamedTuple):
    """What the main thread does. seconds: how long that may take without progress; None: what its name is given."""

    name: str
    seconds: float | None = None


START, FIRST_STEP, STEP, COMPILATION = Phase("start-up"), Phase("first step"), Phase("step"), Phase("compilation")


class Progress:
    def __init__(self) -> None:
        self.step = 0  # finished, since the beginning of training
        self.finished = 0  # steps, by this process
        self.moves = 0  # any progress at all
        self._compiling = 0  # compilations under way
        self._base = START
        self._inside: list[Phase] = []

    @property
    def phase(self) -> Phase:
        if self._compiling:
            return COMPILATION
        inside = self._inside[-1:]  # a copy: the main thread may leave it meanwhile
        return inside[0] if inside else self._base

    def heartbeat(self) -> None:
        """Progress within a phase, for instance one batch of an evaluation: its time limit restarts."""
        self.moves += 1

    def begin_step(self, step: int) -> None:
        """`step`: how many are finished. The first one has a limit of its own, which lasts until it is finished."""
        self.step = step
        if self._base is START:
            self._base = FIRST_STEP
        self.moves += 1

    def finish_step(self, step: int) -> None:
        self.step = step
        self.finished += 1
        self._base = STEP
        self.moves += 1

    def begin_compilation(self) -> None:
        self._compiling += 1
        self.moves += 1

    def end_compilation(self) -> None:
        self._compiling = max(0, self._compiling - 1)  # it may have begun before anyone asked to be told
        self.moves += 1

    @contextlib.contextmanager
    def during(self, name: str, seconds: float | None = None) -> Iterator[None]:
        """Enclose what is known to take long. seconds: without progress; None: by its name, ten step limits at least."""
        self._inside.append(Phase(name, seconds))
        self.moves += 1
        try:
            yield
        finally:
            self._inside.pop()
            self.moves += 1


def step_limit(step_timeout: float | None, longest: float) -> float:
    """Return how many seconds a step may take. step_timeout: as given; None: not given. longest: step so far."""
    least, times = (step_timeout, TIMES_LONGEST_ASKED) if step_timeout else (LEAST_SECONDS, TIMES_LONGEST)
    return max(least, times * longest)


def phase_limit(phase: Phase, limit: float) -> float:
    """Return how many seconds `phase` may take without progress, where a step may take `limit`."""
    if phase.name == STEP.name:
        return limit
    if phase.seconds is not None:
        return max(phase.seconds, limit)
    return max(PHASE_SECONDS.get(phase.name, 0.0), TIMES_STEP * limit)
