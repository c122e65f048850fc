"""How long a rank may make no progress, in each phase."""

from typing import NamedTuple

from hvdtrain.guards.activity import STEP, Phase

LEAST_SECONDS, TIMES_LONGEST = 30.0, 20.0  # automatic limit of a step: at least 30 s, 20 times the longest step so far
TIMES_LONGEST_ASKED = 3.0  # a limit that was asked for is raised to 3 times the longest step so far
TIMES_STEP = 10.0  # limit of long phases, and of a rank at work: 10 times the limit of a step,
# or this number of seconds, if that is more:
PHASE_SECONDS = {
    "start-up": 600.0,
    "first step": 600.0,
    "compilation": 600.0,
    "reading data": 600.0,
    "output that nobody reads": 600.0,
    "work of one rank": 600.0,
}
WORKING_SECONDS = 3600.0  # or this, for a rank at work in a script that cannot say what it is doing


class HangTimeouts(NamedTuple):
    """Time limits in seconds. asked: of a step, as given by --step-timeout; None: derived from the longest step; 0: none.

    patient: a rank at work has WORKING_SECONDS in any phase.
    """

    asked: float | None = None
    patient: bool = False

    @property
    def off(self) -> bool:
        """Whether there is no limit."""
        return self.asked == 0

    def start_up(self) -> float:
        """Return the limit of start-up, before the ranks are connected."""
        return float("inf") if self.off else max(PHASE_SECONDS["start-up"], TIMES_STEP * (self.asked or 0.0))

    def step(self, longest: float) -> float:
        """Return the limit of a step. longest: the longest step so far."""
        least, times = (self.asked, TIMES_LONGEST_ASKED) if self.asked else (LEAST_SECONDS, TIMES_LONGEST)
        return max(least, times * longest)

    def phase(self, phase: Phase, longest: float) -> float:
        """Return the limit of `phase` without progress."""
        step = self.step(longest)
        if phase.name == STEP.name:
            return step
        if phase.seconds is not None:
            return max(phase.seconds, step)
        return max(PHASE_SECONDS.get(phase.name, 0.0), TIMES_STEP * step)

    def working(self, longest: float) -> float:
        """Return the limit without progress of a rank that is seen at work."""
        return max(TIMES_STEP * self.step(longest), WORKING_SECONDS if self.patient else 0.0)

    def leaving(self, longest: float) -> float:
        """Return the limit of a rank's end, after training."""
        return float("inf") if self.off else TIMES_STEP * self.step(longest)
