"""When a checkpoint is due that nobody asked for: as often as checkpoints take at most a hundredth of the time.

Young's optimum for failures every M seconds is a checkpoint every sqrt(2 C M), where one costs C seconds (Daly, 2006). M is
not known, and C is measured: at an interval of 100 C checkpoints take 1 %, and less is lost at a failure than at the optimum
for all M above 5,000 C. Only rank 0 asks; what it decides reaches the others by `Guard.should_save`.
"""

import contextlib
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator

TIMES_COST = 100.0
TIMES_WRITING = 10.0  # the file system is busy with us for at most a tenth of the time
LEAST_SECONDS = 1.0
MOST_BACKOFF = 600.0  # seconds between two attempts while none can be written
# A guess until one was written: snapshot, checksum and copies on one core.
SECONDS_EACH, BYTES_PER_SECOND = 0.005, 200e6


class Cadence:
    """enabled: whether checkpoints are to be saved automatically at all."""

    def __init__(self, enabled: bool, clock: Callable[[], float] = time.monotonic):
        self.enabled, self._clock = enabled, clock
        self._stalls: deque[float] = deque(maxlen=3)  # seconds for which training stood still
        self._guess = SECONDS_EACH
        self._processor = self._writing = 0.0  # of the last one, in the background: CPU seconds, and in all
        self._failures = 0  # in a row
        self._saved_at: float | None = None  # or when training began

    def expect(self, size: int) -> None:
        """Guess the cost of a checkpoint of `size` bytes, until one was measured."""
        self._guess = SECONDS_EACH + size / BYTES_PER_SECOND

    @property
    def cost(self) -> float:
        """Seconds that a checkpoint takes from training."""
        if not self._stalls or not self._writing:
            return self._guess
        return statistics.median(self._stalls) + self._processor

    @property
    def interval(self) -> float:
        """Seconds between two."""
        seconds = max(LEAST_SECONDS, TIMES_COST * self.cost, TIMES_WRITING * self._writing)
        return min(seconds * 2**self._failures, max(seconds, MOST_BACKOFF))

    def due(self) -> bool:
        """Tell whether it is time. The first call is when training begins."""
        if self._saved_at is None:
            self._saved_at = self._clock()
        return self.enabled and self._clock() - self._saved_at >= self.interval

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Enclose what training waits for: comparison, snapshot."""
        began = self._clock()
        yield
        self._saved_at = self._clock()
        self._stalls.append(self._saved_at - began)

    def written(self, processor: float, seconds: float, *, failed: bool) -> None:
        """Take what the background thread needed for one; any thread. processor: CPU seconds of that thread."""
        self._processor, self._writing = processor, max(seconds, 1e-9)
        self._failures = min(self._failures + 1, 10) if failed else 0
