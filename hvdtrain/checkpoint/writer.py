"""Writes checkpoints in the background, while training continues, and removes old ones."""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Mapping
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


def prune(directory: Path, keep: int, known: Mapping[Path, Facts] | None = None) -> dict[Path, Facts]:
    """Remove old checkpoints. Keeps the `keep` newest requested ones, the SPARE newest of all, and the best one. Raises
    OSError, and removes none, if one cannot be read for now.

    keep: if it is less than SPARE, only `keep` newest ones are kept. The best one: see `best_of`. known: facts of files that
    need not be read. Return these, and those that were read, of the files that are left.
    """
    paths, known = checkpoint.listed(directory), known or {}
    if len(paths) <= min(keep, SPARE):
        return dict(known)
    facts = {path: known[path] if path in known else checkpoint.read_facts(path) for path in paths}
    asked_for = [path for path in paths if not facts[path].get("automatic")]
    kept = {*paths[: min(keep, SPARE)], *asked_for[:keep], *best_of(facts)[:1]}
    for path in paths:
        if path not in kept:
            with contextlib.suppress(OSError):
                path.unlink()
    return {path: facts[path] for path in kept}


class Writer:
    """Writes snapshots in a background thread, one at a time. A newer snapshot replaces one that is still waiting, unless
    the evaluation of that one was better.

    After each attempt, `done(path, error)` is called in the writer's thread; error is None or an OSError. `processor` and
    `seconds` are then the CPU seconds and the wall seconds of this attempt.
    """

    def __init__(
        self,
        directory: Path,
        keep: int,
        done: Callable[[Path, OSError | None], None],
        lock: "Lock | None" = None,
    ):
        """lock: see `checkpoint.write`."""
        self.directory, self.keep, self.done, self.lock = directory, keep, done, lock
        self.failed: OSError | None = None  # error of the last attempt
        self.processor = self.seconds = 0.0
        self._waiting: list[tuple[Facts, dict[str, Tensor]]] = []  # the best one, and the newest
        self._condition = threading.Condition()
        self._busy = False
        self._facts: dict[Path, Facts] = {}  # of files in the directory: `prune` need not read them again
        threading.Thread(target=self._run, name="checkpoint", daemon=True).start()

    def put(self, facts: Facts, tensors: dict[str, Tensor]) -> None:
        """Queue a snapshot for writing. The caller must not modify it afterwards."""
        with self._condition:
            best = max(goodness(facts), -sys.float_info.max)  # one without a value may be replaced
            self._waiting = [one for one in self._waiting if goodness(one[0]) >= best][:1]
            self._waiting.append((facts, tensors))
            self._condition.notify_all()

    def flush(self, heartbeat: Callable[[], None] = lambda: None) -> None:
        """Wait until all snapshots are written. `heartbeat` is called about once a second.

        If that takes more than PATIENCE_SECONDS, return and set `failed`.
        """
        until = time.monotonic() + PATIENCE_SECONDS
        with self._condition:
            while self._waiting or self._busy:
                self._condition.wait(1.0)
                heartbeat()
                if time.monotonic() > until:
                    self.failed = OSError(f"not written within {PATIENCE_SECONDS:.0f} s")
                    return

    def _run(self) -> None:
        while True:
            with self._condition:
                self._busy = False
                self._condition.notify_all()
                while not self._waiting:
                    self._condition.wait()
                facts, tensors = self._waiting.pop(0)
                self._busy = True
            self._write(facts, tensors)
            del facts, tensors

    def _write(self, facts: Facts, tensors: dict[str, Tensor]) -> None:
        path = self.directory / checkpoint.name_of(facts["state"]["step"])
        self.failed = None
        began, processor = time.monotonic(), time.thread_time()
        try:
            checkpoint.write(path, facts, tensors, self.lock)
            self._facts[path] = {name: facts.get(name) for name in ("automatic", "best")}
            with contextlib.suppress(OSError):  # what cannot be read or removed now, may be after the next one
                self._facts = prune(self.directory, self.keep, self._facts)
        except OSError as error:
            self.failed = error
        except Exception as error:  # any error of the library: the thread must not end silently
            self.failed = OSError(repr(error))
        self.seconds, self.processor = time.monotonic() - began, time.thread_time() - processor
        with contextlib.suppress(Exception):  # `flush` would wait for a thread that has ended
            self.done(path, self.failed)
