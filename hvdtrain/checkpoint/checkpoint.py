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
from hvdtrain.engines.errors import UserError
from hvdtrain.models.weight_files import MOST_HEADER_BYTES, MOST_TENSORS, refuse_large_header

if TYPE_CHECKING:
    from hvdtrain.engines.lock import Lock

Facts = dict[str, Any]  # JSON: all of a checkpoint that is not a tensor

NAME = re.compile(r"step-(\d{8,})\.safetensors")
FORMAT = 6
OTHER_VERSION = "another version of hvdtrain wrote this checkpoint: use that one, or train anew with --resume never"


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
    data = dumped(facts, tensors)
    if lock is not None:
        lock.require_in_place()
    files.make_directory(path.parent)
    with atomic.replacing(path, "wb", sync=True) as file:
        file.write(data)
        if lock is not None:
            lock.require_in_place()  # also while it was written, which may take long


def require_readable(facts: Facts, tensors: Mapping[str, Tensor]) -> None:
    """Raise UserError for what `reading.read` would refuse."""
    if len(tensors) > MOST_TENSORS:
        message = (
            f"a checkpoint would hold {len(tensors):,} tensors, and one of more than {MOST_TENSORS:,} cannot be read"
        )
        raise UserError(f"{message}: let state_dict() stack small ones, torch.stack(tensors)")
    size = len(json.dumps(facts)) + 200 * len(tensors)
    if size > MOST_HEADER_BYTES:
        message = f"flags and data would take {size:,} bytes in a checkpoint"
        raise UserError(
            f"{message}, and more than {MOST_HEADER_BYTES:,} cannot be read: give run.describe_data() a checksum instead"
        )


def dumped(facts: Facts, tensors: Mapping[str, Tensor]) -> bytes:
    """Return the content of a file."""
    import safetensors.torch

    text = json.dumps(facts)
    return safetensors.torch.save(dict(tensors), {"facts": text, "sha256": digest(text, tensors)})


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


def listed(directory: Path) -> list[Path]:
    """Return the checkpoints in `directory`, newest first, without temporary files. Raises OSError if it cannot be read."""
    try:
        numbered = [(int(match[1]), path) for path in directory.iterdir() if (match := NAME.fullmatch(path.name))]
    except FileNotFoundError:
        return []
    return [path for _, path in sorted(numbered, reverse=True)]
