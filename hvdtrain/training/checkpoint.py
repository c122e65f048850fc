"""Checkpoint files. They are written atomically, verified when read, and contain no code.

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
from typing import Any

import torch
from torch import Tensor

from hvdtrain.engines import files
from hvdtrain.engines.errors import Failure, UserError
from hvdtrain.models.weights import refuse_large_header
from hvdtrain.output.best import best_of, goodness
from hvdtrain.training.facts import parsed, require_small, require_sound

Facts = dict[str, Any]  # JSON: all of a checkpoint that is not a tensor

NAME = re.compile(r"step-(\d{8,})\.safetensors")
FORMAT = 4
OTHER_VERSION = "another version of hvdtrain wrote this checkpoint: use that one, or train anew with --resume never"
PATIENCE_SECONDS = 600.0  # how long `Writer.flush` waits for a file system that hangs
# Its errors; the others are of the one who has named a file.
OF_THE_FILE_SYSTEM = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOMEM, errno.EMFILE, errno.ENFILE)
SPARE = 2  # newest checkpoints to keep in any case: if one is damaged, the previous one is nearly as recent


class Damaged(Exception):
    """The file is not a complete, unmodified checkpoint. The message is one clause without the name of the file."""


def lacks_memory(error: Exception) -> bool:
    """Return whether an error says that there is not enough memory: MemoryError, and torch's RuntimeError of many texts."""
    said = str(error).lower()
    return isinstance(error, MemoryError) or "allocate memory" in said or "not enough memory" in said


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


def write(path: Path, facts: Facts, tensors: Mapping[str, Tensor], lock: files.Lock | None = None) -> None:
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
    with files.replacing(path, "wb", sync=True) as file:
        file.write(data)
        if lock is not None:
            lock.require_in_place()  # also while it was written, which may take long


def read(path: Path) -> tuple[Facts, dict[str, Tensor]]:
    """Return the facts and the tensors (on the CPU). Raises Damaged, OSError if the file cannot be read, Failure if there is
    not enough memory to, and UserError if another version has written it.

    Memory use is about the size of the file, even for malicious files: safetensors rejects tensors that do not match the
    size of the file, and this function rejects files with too many tensors.
    """
    import safetensors

    try:
        refuse_large_header(path)
        with safetensors.safe_open(path, framework="pt", device="cpu") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        text = metadata["facts"]
        if digest(text, tensors) != metadata["sha256"]:
            raise Damaged("its checksum does not match its content")
        facts = parsed(text)
        if not isinstance(facts, dict) or facts.get("format") != FORMAT:
            raise UserError(f"{path}: {OTHER_VERSION}")
        require_sound(facts, tensors)
    except (Damaged, OSError, UserError):
        raise
    except KeyError as error:
        raise Damaged(f"it has no {error} in its header") from error
    except Exception as error:  # SafetensorError, or several of torch's exceptions for unknown dtypes
        if lacks_memory(error):
            how = "free some, or use a host with more; nothing was changed"
            raise Failure(f"checkpoint {path} cannot be read: not enough memory: {how}") from error
        raise Damaged(str(error).splitlines()[0] if str(error) else type(error).__name__) from error
    return facts, tensors


def read_facts(path: Path) -> Facts:
    """Return the facts alone, unverified; {} where they are damaged. Raises OSError if they cannot be read."""
    import safetensors

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
        found = [(int(match[1]), path) for path in directory.iterdir() if (match := NAME.fullmatch(path.name))]
    except FileNotFoundError:
        return []
    return [path for _, path in sorted(found, reverse=True)]


def newest(
    directory: Path, warn: Callable[[str], None], *, keep_names: bool = False
) -> tuple[Facts, dict[str, Tensor]] | None:
    """Return facts and tensors of the newest valid checkpoint, or None. Damaged files are renamed, unless `keep_names`, and
    reported to `warn`. Raises Failure if there are some, and none can be read for now."""
    unread: OSError | None = None
    try:
        for path in listed(directory):
            try:
                facts, tensors = read(path)
                own = path.with_name(own_name(facts, path.name))
                if own == path or (keep_names and not own.exists()):
                    return facts, tensors
                if own.exists():
                    raise Damaged(f"it is a copy of {own.name}")
                path.rename(own)
                warn(f"checkpoint {path} is of another step: renamed to {own.name}")
                return newest(directory, warn)
            except OSError as error:  # may be temporary: do not rename the file
                unread = unread or error
                warn(f"checkpoint {path} cannot be read ({error.strerror}); trying the previous one")
            except Damaged as error:
                where = "" if keep_names else f": {put_aside(path)}"
                warn(f"checkpoint {path} is damaged ({error}){where}; trying the previous one")
    except OSError as error:
        unread = error
    if unread is not None:
        how = "nothing was changed; start again once it can be read, or use another --output-dir"
        raise Failure(f"no checkpoint in {directory} can be read ({unread.strerror or unread}): {how}") from unread
    return None


def own_name(facts: Facts, name: str) -> str:
    """Return the name of the checkpoint with these facts. name: that of its file, if they have no step.

    One that was copied under the name of a later step would be the newest for ever.
    """
    try:
        return name_of(facts["state"]["step"])
    except (KeyError, TypeError, ValueError):
        return name


def put_aside(path: Path) -> str:
    """Rename a damaged checkpoint. Return what has become of it."""
    aside = path.with_name(path.name + ".damaged")
    try:
        path.rename(aside)
    except OSError:
        return "left where it is"
    return f"kept as {aside.name}"


def find(
    path: Path, label: str, warn: Callable[[str], None], *, keep_names: bool = False
) -> tuple[Facts, dict[str, Tensor]]:
    """Return facts and tensors of the checkpoint `path`, or of the newest valid one if `path` is a directory or a run.

    label: the user's input, for messages. keep_names: see `newest`. Raises UserError if there is no valid checkpoint.
    """
    if os.path.isdir(path):  # noqa: PTH112 (Path's own raises where the name is too long)
        inner = path / "checkpoints"
        found = newest(inner if os.path.isdir(inner) else path, warn, keep_names=keep_names)  # noqa: PTH112
        if found is None:
            raise UserError(f"{label}: it has no valid checkpoint: name a step-*.safetensors, auto or never")
        return found
    try:
        return read(path)
    except (Damaged, OSError) as error:
        if isinstance(error, OSError) and error.errno in OF_THE_FILE_SYSTEM:
            raise Failure(f"{label} cannot be read ({error.strerror}): start again once it can") from error
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise UserError(f"{label}: {reason}: name a valid checkpoint, auto or never") from error


def prune(directory: Path, keep: int) -> None:
    """Remove old checkpoints. Keeps the `keep` newest requested ones, the SPARE newest of all, and the best one. Raises
    OSError, and removes none, if one cannot be read for now.

    keep: if it is less than SPARE, only `keep` newest ones are kept. The best one: see `best_of`.
    """
    found = listed(directory)
    if len(found) <= min(keep, SPARE):
        return
    facts = {path: read_facts(path) for path in found}
    asked_for = [path for path in found if not facts[path].get("automatic")]
    kept = {*found[: min(keep, SPARE)], *asked_for[:keep], *best_of(facts)[:1]}
    for path in found:
        if path not in kept:
            with contextlib.suppress(OSError):
                path.unlink()


def best(directory: Path, label: str, warn: Callable[[str], None]) -> tuple[Facts, dict[str, Tensor]]:
    """Return facts and tensors of the best checkpoint of a run that can be read. label: the user's input.

    directory: that of the run, or of its checkpoints. Raises UserError if there is none.
    """
    inner = directory / "checkpoints"
    found = listed(inner if inner.is_dir() else directory)
    for path in best_of({path: read_facts(path) for path in found}):
        try:
            return read(path)
        except (Damaged, OSError) as error:
            warn(f"checkpoint {path} cannot be read ({error}); trying the next best")
    how = "evaluate in every epoch, with run.evaluating and run.record, or export the newest without --best"
    raise UserError(f"{label}: no checkpoint of an epoch that was evaluated: {how}")


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
        lock: files.Lock | None = None,
    ):
        """lock: see `write`."""
        self.directory, self.keep, self.done, self.lock = directory, keep, done, lock
        self.failed: OSError | None = None  # error of the last attempt
        self.processor = self.seconds = 0.0
        self._waiting: list[tuple[Facts, dict[str, Tensor]]] = []  # the best one, and the newest
        self._condition = threading.Condition()
        self._busy = False
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
            with contextlib.suppress(OSError):  # what cannot be read or removed now, may be after the next one
                prune(self.directory, self.keep)
        except OSError as error:
            self.failed = error
        except Exception as error:  # any error of the library: the thread must not end silently
            self.failed = OSError(repr(error))
        self.seconds, self.processor = time.monotonic() - began, time.thread_time() - processor
        with contextlib.suppress(Exception):  # `flush` would wait for a thread that has ended
            self.done(path, self.failed)
