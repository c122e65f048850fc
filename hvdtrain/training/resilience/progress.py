"""The state that the main thread shares with the watchdog: the phase of the run, and a progress counter.

The main thread writes, the watchdog's thread reads: plain attributes, no lock.
"""

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

LEAST_SECONDS, TIMES_LONGEST = (
    30.0,
    20.0,
)  # automatic limit of a step: at least 30 s, and 20 times the longest step so far
TIMES_LONGEST_ASKED = 3.0  # a limit given by --step-timeout is raised to 3 times the longest step so far
TIMES_STEP = 10.0  # limit of long phases: 10 times the limit of a step,
# or this number of seconds, if that is more:
PHASE_SECONDS = {
    "start-up": 600.0,
    "first step": 600.0,
    "compilation": 600.0,
    "reading data": 600.0,
    "work of one rank": 600.0,
}


class Phase(NamedTuple):
    """A phase of the main thread. seconds: time limit without progress, at least that of a step; None: the default for this
    name."""

    name: str
    seconds: float | None = None


START, FIRST_STEP, STEP, COMPILATION = Phase("start-up"), Phase("first step"), Phase("step"), Phase("compilation")
UPDATED = Phase("the end of a step")  # after the update: the limit of a step, and a longer one while it is at work
BETWEEN = Phase("between epochs")  # outside of the loop over steps


class Progress:
    """Phase and progress counter of the main thread."""

    def __init__(self) -> None:
        self.step = 0  # steps finished since the beginning of training
        self.finished = 0  # steps finished by this process
        self.moves = 0  # changes with any progress
        self._compiling = 0  # compilations in progress
        self._base = START
        self._inside: list[Phase] = []

    @property
    def phase(self) -> Phase:
        """The current phase."""
        if self._compiling:
            return COMPILATION
        inside = self._inside[-1:]  # a copy: the main thread may leave the phase at any time
        return inside[0] if inside else self._base

    def heartbeat(self) -> None:
        """Report progress within a phase, such as one batch of an evaluation. The time limit restarts."""
        self.moves += 1

    def begin_step(self, step: int) -> None:
        """Report the beginning of a step. step: number of finished steps. The first step has a longer limit."""
        self.step = step
        self._base = FIRST_STEP if self._base in (START, FIRST_STEP) else STEP
        self.moves += 1

    def compute(self) -> None:
        """Report that the step computes gradients, perhaps again after an update."""
        if self._base is UPDATED:
            self._base = STEP

    def update(self) -> None:
        """Report that the step has updated the weights. What follows in it may be work of one rank alone."""
        if self._base is STEP:
            self._base = UPDATED
            self.moves += 1

    def finish_step(self, step: int) -> None:
        """Report the end of a step. step: number of finished steps."""
        self.step = step
        self.finished += 1
        self._base = STEP
        self.moves += 1

    def leave_steps(self) -> None:
        """Report the end of the loop over steps."""
        self._base = BETWEEN
        self.moves += 1

    def begin_compilation(self) -> None:
        """Report the beginning of a compilation by torch.compile."""
        self._compiling += 1
        self.moves += 1

    def end_compilation(self) -> None:
        """Report the end of a compilation by torch.compile."""
        self._compiling = max(0, self._compiling - 1)  # it may have begun before the callback was registered
        self.moves += 1

    @contextlib.contextmanager
    def during(self, name: str, seconds: float | None = None) -> Iterator[None]:
        """Context manager for a phase. seconds: time limit without progress, at least that of a step; None: the default for
        this name, at least 10 times the limit of a step."""
        self._inside.append(Phase(name, seconds))
        self.moves += 1
        try:
            yield
        finally:
            self._inside.pop()
            self.moves += 1


def step_limit(step_timeout: float | None, longest: float) -> float:
    """Return the time limit of a step in seconds. step_timeout: value of the flag, or None. longest: longest step so far."""
    least, times = (step_timeout, TIMES_LONGEST_ASKED) if step_timeout else (LEAST_SECONDS, TIMES_LONGEST)
    return max(least, times * longest)


def phase_limit(phase: Phase, limit: float) -> float:
    """Return the time limit of `phase` without progress, in seconds. limit: the time limit of a step."""
    if phase.name == STEP.name:
        return limit
    if phase.seconds is not None:
        return max(phase.seconds, limit)
    return max(PHASE_SECONDS.get(phase.name, 0.0), TIMES_STEP * limit)
