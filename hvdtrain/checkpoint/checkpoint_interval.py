"""Decides when an automatic checkpoint is due: as often as possible while checkpoints take at most 1 % of the time.

For failures every M seconds and a cost of C seconds per checkpoint, Young's optimal interval is sqrt(2 C M) seconds (Daly,
2006). C is measured, M is unknown. At an interval of 100 C, checkpoints take 1 % of the time, and for all M above 5,000 C a
failure loses less than at the optimum. Only rank 0 decides; the others learn of it by an `Appointment` (guards/watch.py).
"""

import contextlib
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator

TIMES_COST = 100.0
TIMES_WRITING = 10.0  # checkpoints are being written for at most a tenth of the time
LEAST_SECONDS = 1.0
MOST_BACKOFF = 600.0  # maximum number of seconds between two attempts while writing fails
# Estimated cost until a checkpoint was written: snapshot, checksum and copies on one core.
SECONDS_EACH, BYTES_PER_SECOND = 0.005, 200e6


class CheckpointInterval:
    """Measures the cost of checkpoints and schedules the next one. enabled: whether automatic checkpoints are saved."""

    def __init__(self, enabled: bool, clock: Callable[[], float] = time.perf_counter):
        self.due_at = math.inf  # when the next checkpoint is due, by `clock`
        self._enabled, self._clock = enabled, clock
        self._stalls: deque[float] = deque(maxlen=3)  # seconds for which training was blocked
        self._guess = SECONDS_EACH
        self._processor = self._writing = 0.0  # CPU seconds and wall seconds of the last background write
        self._failures = 0  # consecutive failures
        self._saved_at: float | None = None  # time of the last checkpoint, or of the beginning of training

    def expect(self, size: int) -> None:
        """Estimate the cost from the checkpoint's `size` in bytes. Used until a checkpoint was measured."""
        self._guess = SECONDS_EACH + size / BYTES_PER_SECOND

    @property
    def cost(self) -> float:
        """Cost of a checkpoint in seconds: time for which training is blocked, plus CPU time in the background."""
        if not self._stalls or not self._writing:
            return self._guess
        return statistics.median(self._stalls) + self._processor

    @property
    def seconds(self) -> float:
        """Seconds between two automatic checkpoints."""
        seconds = max(LEAST_SECONDS, TIMES_COST * self.cost, TIMES_WRITING * self._writing)
        return min(seconds * 2.0**self._failures, max(seconds, MOST_BACKOFF))

    def begin(self) -> None:
        """Mark the beginning of training."""
        self._saved_at = self._clock()
        self._schedule()

    def _schedule(self) -> None:
        if self._enabled and self._saved_at is not None:
            self.due_at = self._saved_at + self.seconds

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Context manager that measures the time for which training is blocked: comparison of replicas, snapshot."""
        began = self._clock()
        yield
        self._saved_at = self._clock()
        self._stalls.append(self._saved_at - began)
        self._schedule()

    def written(self, processor: float, seconds: float, *, failed: bool) -> None:
        """Record the time that the background thread took. Thread-safe. processor: CPU seconds; seconds: wall time."""
        self._processor, self._writing = processor, max(seconds, 1e-9)
        self._failures = min(self._failures + 1, 10) if failed else 0
        self._schedule()
