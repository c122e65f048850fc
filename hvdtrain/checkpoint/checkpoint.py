"""Checkpoint files. They are written atomically (writer.py says when), verified when read (reading.py), and contain no code.

Each checkpoint is one file in the safetensors format:

    tensors               parameters and other state, by name: see contents.py
    metadata "facts"      JSON: position in training, flags, all state that is not a tensor
    metadata "sha256"     checksum of all of the above

Learning rates that a program derives from the position need no state, and neither do the seeds of each step and sample.
"""

import errno
import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hvdtrain.engines import atomic, files

if TYPE_CHECKING:
    from hvdtrain.engines.lock import Lock

Facts = dict[str, Any]  # JSON: all of a checkpoint that is not a tensor

NAME = re.compile(r"step-(\d{8,})\.safetensors")
FORMAT = 4
OTHER_VERSION = "another version of hvdtrain wrote this checkpoint: use that one, or train anew with --resume never"
MOST_BYTES = 2**25
MOST_VALUES = 2**21  # each takes up to 64 bytes of memory: 60 MB of brackets took 3.6 GB


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
    files.make_directory(path.parent)
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
