"""Writes checkpoints in the background, while training continues, removes old ones, and decides when the next one is due."""

import contextlib
import math
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from hvdtrain.checkpoint import checkpoint
from hvdtrain.checkpoint.checkpoint import Facts
from hvdtrain.output.metric_names import best_of, goodness

if TYPE_CHECKING:
    from hvdtrain.engines.lock import Lock

PATIENCE_SECONDS = 600.0  # how long `Writer.flush` waits for a file system that hangs
SPARE = 2  # newest checkpoints to keep in any case: if one is damaged, the previous one is nearly as recent


def prune(directory: Path, keep: int, known: Mapping[str, Facts] | None = None) -> dict[str, Facts]:
    """Remove old checkpoints. Keeps the `keep` newest requested ones, the SPARE newest of all, the best one, and those that
    the newest one needs. Raises OSError, and removes none, if one cannot be read for now.

    keep: if it is less than SPARE, only `keep` newest ones are kept. The best one: see `best_of`. known: facts of files that
    need not be read, by name. Return these, and those that were read, of the files that are left.
    """
    names, known = checkpoint.names_in(directory), known or {}
    if len(names) <= min(keep, SPARE):
        return dict(known)
    # Each file is read once: --output-dir may be on a network, and there may be many.
    facts = {name: known[name] if name in known else checkpoint.read_facts(directory / name) for name in names}
    asked_for = [name for name, one in facts.items() if not one.get("automatic")]
    kept = {*names[: min(keep, SPARE)], *asked_for[:keep], *best_of(facts)[:1]}
    kept |= {checkpoint.name_of(step) for step in facts[names[0]].get("loops") or ()}  # ended_loops.py
    for name in facts.keys() - kept:
        with contextlib.suppress(OSError):
            (directory / name).unlink()
    return {name: facts[name] for name in kept & facts.keys()}


class Writer:
    """Writes snapshots in a background thread, one at a time. A file system that is slower than `patience` does not stop
    training: a newer snapshot replaces one that is still waiting, unless the evaluation of that one was better.

    After each attempt, `done(path, error)` is called in the writer's thread; error is None or an OSError. `processor` and
    `seconds` are then the CPU seconds and the wall seconds of this attempt.
    """

    def __init__(
        self,
        directory: Path,
        keep: int,
        done: Callable[[Path, OSError | None], None],
        lock: "Lock | None" = None,
        patience: float = 0.0,
    ):
        """lock: see `checkpoint.write_checkpoint`. patience: seconds for which a snapshot waits for the one before."""
        self.directory, self.keep, self.done, self.lock, self.patience = directory, keep, done, lock, patience
        self.failed: OSError | None = None  # error of the last attempt
        self.processor = self.seconds = 0.0
        self._waiting: list[tuple[Facts, dict[str, Tensor]]] = []  # the best one, and the newest
        self._condition = threading.Condition()
        self._busy = self._closed = False
        self._begun_at = 0.0  # when the current write began, or will at once
        self._facts: dict[str, Facts] = {}  # of files in the directory: `prune` need not read them again
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    def wait(self, heartbeat: Callable[[], None] = lambda: None) -> None:
        """Wait until the snapshot before is on the disk, within `patience`: a new one beside it takes as much memory again.
        heartbeat: see `flush`."""
        with self._condition:
            # Where the last write took longer than that, each save would wait as long, and training with it.
            if self.seconds < self.patience:
                self._wait_until_idle(self._begun_at + self.patience, heartbeat)

    def put(self, facts: Facts, tensors: dict[str, Tensor], heartbeat: Callable[[], None] = lambda: None) -> None:
        """Queue a snapshot for writing. The caller must not modify it afterwards. heartbeat: see `flush`.

        Returns once the one before is on the disk, so that a run that is killed loses one at most: that is, if it and the
        one before it are written within `patience` each.
        """
        with self._condition:
            self.wait(heartbeat)
            if not self._waiting and not self._busy:
                self._begun_at = time.monotonic()
            best = max(goodness(facts), -sys.float_info.max)  # one without a value may be replaced
            self._waiting = [one for one in self._waiting if goodness(one[0]) >= best][:1]
            self._waiting.append((facts, tensors))
            self._condition.notify_all()

    def flush(self, heartbeat: Callable[[], None] = lambda: None) -> None:
        """Wait until all snapshots are written. `heartbeat` is called about once a second.

        If that takes more than PATIENCE_SECONDS, return and set `failed`.
        """
        with self._condition:
            if not self._wait_until_idle(time.monotonic() + PATIENCE_SECONDS, heartbeat):
                self.failed = OSError(f"not written within {PATIENCE_SECONDS:.0f} s")

    def close(self) -> None:
        """End the thread, once it has written what waits: else a process keeps one for each of its trainings, with all
        that the thread reaches."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()
        self._thread.join(1.0)  # a file system that hangs does not end it

    def _wait_until_idle(self, until: float, heartbeat: Callable[[], None]) -> bool:
        """Wait until all snapshots are written, or until this time by time.monotonic. Return whether they are."""
        while self._waiting or self._busy:
            if (left := until - time.monotonic()) <= 0.0:
                return False
            self._condition.wait(min(left, 1.0))
            heartbeat()
        return True

    def _run(self) -> None:
        while True:
            with self._condition:
                self._busy = False
                self._condition.notify_all()
                while not self._waiting:
                    if self._closed:
                        return
                    self._condition.wait()
                facts, tensors = self._waiting.pop(0)
                self._busy, self._begun_at = True, time.monotonic()
            self._write(facts, tensors)
            # Else a snapshot, as large as model and optimizer, is kept until the next one comes.
            del facts, tensors

    def _write(self, facts: Facts, tensors: dict[str, Tensor]) -> None:
        path = self.directory / checkpoint.name_of(facts["state"]["step"])
        self.failed = None
        # The processor time of this thread alone: it is what training on the same cores loses.
        began, processor = time.monotonic(), time.thread_time()
        try:
            checkpoint.write_checkpoint(path, facts, tensors, self.lock)
            self._facts[path.name] = {name: facts.get(name) for name in ("automatic", "best", "loops")}
            with contextlib.suppress(OSError):  # what cannot be read or removed now, may be after the next one
                self._facts = prune(self.directory, self.keep, self._facts)
        except OSError as error:
            self.failed = error
        except Exception as error:  # any error of the library: the thread must not end silently
            self.failed = OSError(repr(error))
        self.seconds, self.processor = time.monotonic() - began, time.thread_time() - processor
        with contextlib.suppress(Exception):  # `flush` would wait for a thread that has ended
            self.done(path, self.failed)


# ---- when an automatic checkpoint is due: as often as possible while checkpoints take at most 1 % of the time
#
# For failures every M seconds and a cost of C seconds per checkpoint, Young's optimal interval is sqrt(2 C M) seconds
# (Daly, 2006). C is measured, M is unknown. At an interval of 100 C, checkpoints take 1 % of the time, and for all M above
# 5,000 C a failure loses less than at the optimum. Only rank 0 decides; the others learn of it by an `Appointment`
# (guards/watch.py).

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
