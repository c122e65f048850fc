"""Checkpoint files. They are written atomically, verified when read (reading.py), and contain no code.

Each checkpoint is one file in the safetensors format:

    tensors               parameters and other state, by name: see contents.py
    metadata "facts"      JSON: position in training, flags, all state that is not a tensor
    metadata "sha256"     checksum of all of the above

Learning rates that a program derives from the position need no state, and neither do the seeds of each step and sample.
"""

import contextlib
import errno
import hashlib
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hvdtrain.engines import atomic
from hvdtrain.output.best import best_of, goodness

if TYPE_CHECKING:
    from hvdtrain.engines.lock import Lock

Facts = dict[str, Any]  # JSON: all of a checkpoint that is not a tensor

NAME = re.compile(r"step-(\d{8,})\.safetensors")
FORMAT = 4
OTHER_VERSION = "another version of hvdtrain wrote this checkpoint: use that one, or train anew with --resume never"
PATIENCE_SECONDS = 600.0  # how long `Writer.flush` waits for a file system that hangs
MOST_BYTES = 2**25
MOST_VALUES = 2**21  # each takes up to 64 bytes of memory: 60 MB of brackets took 3.6 GB
SPARE = 2  # newest checkpoints to keep in any case: if one is damaged, the previous one is nearly as recent


def name_of(step: int) -> str:
    """Return the file name of the checkpoint after `step` steps."""
    return f"step-{step:08d}.safetensors"


def digest(facts: str, tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of the facts and of each tensor's name, dtype, shape and bytes."""
    total = hashlib.sha256(facts.encode())
    for name, tensor in sorted(tensors.items()):
        total.update(f"\0{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        total.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


def write(path: Path, facts: Facts, tensors: Mapping[str, Tensor], lock: "Lock | None" = None) -> None:
    """Write a checkpoint atomically: after a failure, `path` is either complete or absent. Raises OSError or ValueError.

    The data are synced to the disk before the file is renamed to `path`, and the directory before this returns, so this also
    holds after a power failure. lock: on the directory above. If that has been moved, nothing is written under its old name,
    where another run may be.
    """
    import safetensors.torch

    text = json.dumps(facts)
    require_small(text)  # else it could not be read
    data = safetensors.torch.save(dict(tensors), {"facts": text, "sha256": digest(text, tensors)})
    if lock is not None:
        lock.require_in_place()
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic.replacing(path, "wb", sync=True) as file:
        file.write(data)
        if lock is not None:
            lock.require_in_place()  # also while it was written, which may take long


def parsed(content: str) -> Any:
    """Return the JSON. Raises ValueError if it would take too much memory."""
    require_small(content)
    return json.loads(content)


def require_small(content: str) -> None:
    """Raise ValueError if the JSON would take too much memory to be read."""
    if len(content) > MOST_BYTES or sum(map(content.count, "[{,")) > MOST_VALUES:
        raise ValueError(f"its facts are more than {MOST_BYTES:,} bytes or {MOST_VALUES:,} values")


def lacks_memory(error: Exception) -> bool:
    """Return whether an error says that there is not enough memory: MemoryError, and torch's RuntimeError of many texts."""
    message = str(error).lower()
    return isinstance(error, MemoryError) or "allocate memory" in message or "not enough memory" in message


def read_facts(path: Path) -> Facts:
    """Return the facts alone, unverified; {} where they are damaged. Raises OSError if they cannot be read."""
    import safetensors

    from hvdtrain.models.weight_files import refuse_large_header

    try:
        refuse_large_header(path)
        with safetensors.safe_open(path, framework="pt") as file:
            facts = parsed((file.metadata() or {})["facts"])
    except OSError:
        raise
    except Exception as error:
        if lacks_memory(error):
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)) from error
        return {}
    return facts if isinstance(facts, dict) else {}


def listed(directory: Path) -> list[Path]:
    """Return the checkpoints in `directory`, newest first, without temporary files. Raises OSError if it cannot be read."""
    try:
        numbered = [(int(match[1]), path) for path in directory.iterdir() if (match := NAME.fullmatch(path.name))]
    except FileNotFoundError:
        return []
    return [path for _, path in sorted(numbered, reverse=True)]


def prune(directory: Path, keep: int, known: Mapping[Path, Facts] | None = None) -> dict[Path, Facts]:
    """Remove old checkpoints. Keeps the `keep` newest requested ones, the SPARE newest of all, and the best one. Raises
    OSError, and removes none, if one cannot be read for now.

    keep: if it is less than SPARE, only `keep` newest ones are kept. The best one: see `best_of`. known: facts of files that
    need not be read. Return these, and those that were read, of the files that are left.
    """
    paths, known = listed(directory), known or {}
    if len(paths) <= min(keep, SPARE):
        return dict(known)
    facts = {path: known[path] if path in known else read_facts(path) for path in paths}
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
        """lock: see `write`."""
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
        path = self.directory / name_of(facts["state"]["step"])
        self.failed = None
        began, processor = time.monotonic(), time.thread_time()
        try:
            write(path, facts, tensors, self.lock)
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
