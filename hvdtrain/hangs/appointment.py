"""A step after which all ranks do the same: save a checkpoint, or stop. Rank 0 makes it, and tells the others."""

import threading
from collections.abc import Callable

from hvdtrain.hangs.activity import Activity


class Appointment:
    """The next step after which all ranks do `what`, if there is one: `step`, which whoever has done it resets to None.

    tell(what, step): tells the other ranks, and returns how many there are.
    """

    def __init__(self, what: str, activity: Activity, tell: Callable[[str, int], int]):
        self.what = what
        self.step: int | None = None
        self._activity, self._tell = activity, tell
        self._wanted = 0.0
        self._known_by: set[int] = set()
        self._all = threading.Event()

    def make(self, step: int) -> None:
        """On rank 0, before it takes part in `step`: tell all ranks. `wait` before the end of that step.

        No rank can finish a step without rank 0, so no rank can miss it.
        """
        self._known_by.clear()
        self._all.clear()
        self.step = step
        self._wanted = float("inf")  # until it is known how many
        self._wanted = self._tell(self.what, step)
        self._look()

    def wait(self) -> None:
        """On rank 0: wait until all ranks know of it. If one does not answer, the monitor ends the job."""
        if not self._all.is_set():
            with self._activity.waiting(f"the other ranks to agree on the step to {self.what} at"):
                self._all.wait()

    def confirm(self, rank: int) -> None:
        """In the monitor's thread: `rank` knows of it."""
        self._known_by.add(rank)
        self._look()

    def _look(self) -> None:
        if len(self._known_by) >= self._wanted:
            self._all.set()
