"""Checkpoint files. They are written atomically (writer.py says when), verified when read, and contain no code.

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
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hvdtrain.engines import atomic, files
from hvdtrain.engines.errors import Failure, UserError
from hvdtrain.engines.portable import bytes_of
from hvdtrain.models.weights import MOST_HEADER_BYTES, MOST_TENSORS, refuse_large_header, write_tensors
from hvdtrain.output.metric_names import best_of

if TYPE_CHECKING:
    from hvdtrain.engines.lock import Lock

Facts = dict[str, Any]  # JSON: all of a checkpoint that is not a tensor

CHECKPOINT_NAME = re.compile(r"step-(\d{8,})\.safetensors")
CHECKPOINT_FORMAT = 6
OTHER_VERSION = "another version of hvdtrain wrote this checkpoint: use that one, or train anew with --resume never"


def name_of(step: int) -> str:
    """Return the file name of the checkpoint after `step` steps."""
    return f"step-{step:08d}.safetensors"


def checkpoint_digest(facts: str, tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of the facts and of each tensor's name, dtype, shape and bytes."""
    total = hashlib.sha256(facts.encode())
    # Sorted, because a file of safetensors does not keep the order of its tensors.
    for name, tensor in sorted(tensors.items()):
        total.update(f"\0{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        total.update(bytes_of(tensor).numpy().data)
    return total.hexdigest()


def write_checkpoint(path: Path, facts: Facts, tensors: Mapping[str, Tensor], lock: "Lock | None" = None) -> None:
    """Write a checkpoint atomically: after a failure, `path` is either complete or absent. Raises OSError or ValueError.

    The data are synced to the disk before the file is renamed to `path`, and the directory before this returns, so this also
    holds after a power failure. lock: on the directory above. If that has been moved, nothing is written.
    """
    text = json.dumps(facts)
    metadata = {"facts": text, "sha256": checkpoint_digest(text, tensors)}
    # A directory that was moved may have another run under its old name.
    if lock is not None:
        lock.require_in_place()
    files.make_directory(path.parent)
    with atomic.replacing(path, "wb", sync=True) as file:
        write_tensors(file, tensors, metadata)
        if lock is not None:
            lock.require_in_place()  # also while it was written, which may take long


def require_readable(facts: Facts, tensors: Mapping[str, Tensor]) -> None:
    """Raise UserError for what `reading.read` would refuse."""
    if len(tensors) > MOST_TENSORS:
        message = (
            f"a checkpoint would hold {len(tensors):,} tensors, and one of more than {MOST_TENSORS:,} cannot be read"
        )
        raise UserError(f"{message}: let state_dict() stack small ones, torch.stack(tensors)")
    # In the header, a tensor takes up to some 200 bytes: its name, type, shape and place.
    size = len(json.dumps(facts)) + 200 * len(tensors)
    if size > MOST_HEADER_BYTES:
        message = f"flags and data would take {size:,} bytes in a checkpoint"
        raise UserError(
            f"{message}, and more than {MOST_HEADER_BYTES:,} cannot be read: give run.describe_data() a checksum instead"
        )


def lacks_memory(error: Exception) -> bool:
    """Return whether an error says that there is not enough memory: MemoryError, and torch's RuntimeError of many texts."""
    message = str(error).lower()
    return isinstance(error, MemoryError) or "allocate memory" in message or "not enough memory" in message


def read_facts(path: Path) -> Facts:
    """Return the facts alone, unverified; {} where they are damaged. Raises OSError if they cannot be read."""
    import safetensors

    try:
        refuse_large_header(path)
        with safetensors.safe_open(path, framework="pt") as file:
            facts = json.loads((file.metadata() or {})["facts"])
    except OSError:
        raise
    except Exception as error:
        if lacks_memory(error):
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)) from error
        return {}
    return facts if isinstance(facts, dict) else {}


def checkpoints_in(directory: Path) -> list[Path]:
    """Return the checkpoints in `directory`, newest first, without temporary files. Raises OSError if it cannot be read."""
    return [directory / name for name in names_in(directory)]


def names_in(directory: Path) -> list[str]:
    """Return their names. Of many, a path for each takes longer than to write a small one."""
    try:
        matches = [match for name in os.listdir(directory) if (match := CHECKPOINT_NAME.fullmatch(name))]  # noqa: PTH208
    except FileNotFoundError:
        return []
    return [name for _, name in sorted(((int(match[1]), match[0]) for match in matches), reverse=True)]


# ---- reading, and finding the newest and the best one that is valid


# Of these, starting again may help. Others, such as ENOENT, say that the user has named a wrong file.
OF_THE_FILE_SYSTEM = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOMEM, errno.EMFILE, errno.ENFILE)


class Damaged(Exception):
    """The file is not a complete, unmodified checkpoint. The message is one clause without the name of the file."""


def read_checkpoint(path: Path) -> tuple[Facts, dict[str, Tensor]]:
    """Return the facts and the tensors (on the CPU). Raises Damaged, OSError if the file cannot be read, Failure if there is
    not enough memory to, and UserError if another version has written it.

    Memory use is about the size of the file, even for malicious files.
    """
    import safetensors

    try:
        # safetensors rejects tensors that do not match the file's size,
        # and makes an object for each: a header could fill the memory.
        refuse_large_header(path)
        with safetensors.safe_open(path, framework="pt", device="cpu") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        text = metadata["facts"]
        if checkpoint_digest(text, tensors) != metadata["sha256"]:
            raise Damaged("its checksum does not match its content")
    except (Damaged, OSError):
        raise
    except KeyError as error:
        raise Damaged(f"it has no {error} in its header") from error
    except Exception as error:  # SafetensorError, or several of torch's exceptions for unknown dtypes
        # A sound file must not count as damaged: it would be renamed, and training would begin from an older one.
        if lacks_memory(error):
            remedy = "free some, or use a host with more; nothing was changed"
            raise Failure(f"checkpoint {path} cannot be read: not enough memory: {remedy}") from error
        raise Damaged(str(error).splitlines()[0] if str(error) else type(error).__name__) from error
    # Its bytes are those that were written: what follows is no damage, and an older one would not do instead.
    with understood(f"{path}: "):
        facts = json.loads(text)
        if facts["format"] != CHECKPOINT_FORMAT:
            raise ValueError(facts["format"])
    return facts, tensors


@contextlib.contextmanager
def understood(label: str = "") -> Iterator[None]:
    """Turn what is raised by a checkpoint that has not what this version writes into a UserError. label: before its text."""
    try:
        yield
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise UserError(f"{label}{OTHER_VERSION}", everywhere=not label) from error


def newest(
    directory: Path, warn: Callable[[str], None], *, keep_names: bool = False
) -> tuple[Facts, dict[str, Tensor]] | None:
    """Return facts and tensors of the newest valid checkpoint; None if there is no checkpoint.

    Damaged files that are newer are renamed, unless `keep_names`, and reported to `warn`. Raises UserError if all are
    damaged, and Failure if some cannot be read for now: nothing is changed, and training does not begin anew.
    """
    unread: list[OSError] = []
    damaged: dict[Path, Damaged] = {}
    content = None
    try:
        paths = checkpoints_in(directory)
    except OSError as error:
        paths, unread = [], [error]
    for path in paths:
        try:
            content = read_checkpoint(path)
            own = path.with_name(name_of_checkpoint(content[0], path.name))
            if own == path or (keep_names and not own.exists()):
                break
            if own.exists():
                raise Damaged(f"it is a copy of {own.name}")
            # A copy under the name of a later step would be the newest for ever.
            path.rename(own)
            warn(f"checkpoint {path} is of another step: renamed to {own.name}")
            return newest(directory, warn)
        except OSError as error:  # may be temporary: do not rename the file
            if not os.path.lexists(path):  # a run that trains has removed it: a newer one is there
                return newest(directory, warn, keep_names=keep_names)
            unread.append(error)
            warn(f"checkpoint {path} cannot be read ({error.strerror}); trying the previous one")
        except Damaged as error:
            damaged[path] = error
        content = None
    if content is None and unread:
        remedy = "nothing was changed; start again once it can be read, or use another --output-dir"
        reason = unread[0].strerror or unread[0]
        raise Failure(f"no checkpoint in {directory} can be read ({reason}): {remedy}") from unread[0]
    if content is None and damaged:
        path, why = next(iter(damaged.items()))
        remedy = "put one back from a copy, or begin anew with --resume never"
        raise UserError(f"all checkpoints in {directory} are damaged ({path.name}: {why}): {remedy}") from why
    for path, why in damaged.items():
        where, aside = "", path.with_name(path.name + ".damaged")
        if not keep_names:
            try:
                path.rename(aside)
                where = f": kept as {aside.name}"
            except OSError:
                where = ": left where it is"
        warn(f"checkpoint {path} is damaged ({why}){where}; trying the previous one")
    return content


def name_of_checkpoint(facts: Facts, name: str) -> str:
    """Return the name of the checkpoint with these facts. name: that of its file, if they have no step."""
    try:
        return name_of(facts["state"]["step"])
    except (KeyError, TypeError, ValueError):
        return name


def find_checkpoint(
    path: Path, label: str, warn: Callable[[str], None], *, keep_names: bool = False
) -> tuple[Facts, dict[str, Tensor]]:
    """Return facts and tensors of the checkpoint `path`, or of the newest valid one if `path` is a directory or a run.

    label: the user's input, for messages. keep_names: see `newest`. Raises UserError if there is no valid checkpoint.
    """
    others = ", auto or never" if label.startswith("--resume ") else ", or the --output-dir of a run that has one"
    if os.path.isdir(path):  # noqa: PTH112 (Path's own raises where the name is too long)
        inner = path / "checkpoints"
        content = newest(inner if os.path.isdir(inner) else path, warn, keep_names=keep_names)  # noqa: PTH112
        if content is None:
            raise UserError(f"{label}: it has no valid checkpoint: name a step-*.safetensors{others}")
        return content
    try:
        return read_checkpoint(path)
    except (Damaged, OSError) as error:
        if isinstance(error, OSError) and error.errno in OF_THE_FILE_SYSTEM:
            raise Failure(f"{label} cannot be read ({error.strerror}): start again once it can") from error
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise UserError(f"{label}: {reason}: name a valid checkpoint{others}") from error


def best(directory: Path, label: str, warn: Callable[[str], None]) -> tuple[Facts, dict[str, Tensor]]:
    """Return facts and tensors of the best checkpoint of a run that can be read. label: the user's input.

    directory: that of the run, or of its checkpoints. Raises UserError if there is none.
    """
    if not os.path.lexists(directory):  # of what is a file, the next line finds none
        raise UserError(f"{label}: {os.strerror(errno.ENOENT)}: name the --output-dir of a run")
    if not directory.is_dir():
        raise UserError(f"{label}: a file: --best needs the directory of the run, which has several checkpoints")
    inner = directory / "checkpoints"
    facts = dict[Path, Facts]()
    for path in checkpoints_in(inner if inner.is_dir() else directory):
        try:
            facts[path] = read_facts(path)
        except OSError as error:
            if not os.path.lexists(path):  # a run that trains has removed it: it may have a better one
                return best(directory, label, warn)
            warn(f"checkpoint {path} cannot be read ({error.strerror}): left out")
    for path in best_of(facts):
        try:
            return read_checkpoint(path)
        except (Damaged, OSError) as error:
            if not os.path.lexists(path):  # as above
                return best(directory, label, warn)
            warn(f"checkpoint {path} cannot be read ({error}); trying the next best")
    remedy = "evaluate in every epoch, with run.evaluating and run.record, or export the newest without --best"
    raise UserError(f"{label}: no checkpoint of an epoch that was evaluated: {remedy}")
