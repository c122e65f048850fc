"""Checks of files of weights: before they are opened, and whether they match a model. Nothing in a file is executed."""

import contextlib
import itertools
import re
import stat
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvdtrain.engines.modules import is_extra

MOST_HEADER_BYTES = 2**26
MOST_TENSORS = 100_000  # a file of 67 MB with a million empty tensors took 33 s and 2 GB
STRING_OR_OBJECT = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|\{', re.DOTALL)


def require_file(path: Path) -> None:
    """Raise ValueError if `path` is not a regular file: opening a pipe or a device might block. Raises OSError."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError("it is not a regular file")


def refuse_large_header(path: Path) -> None:
    """Raise ValueError if a safetensors file has an excessive number of tensors, because the library would create an object
    for each. Raises OSError if it cannot be read."""
    require_file(path)
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > MOST_HEADER_BYTES:
            raise ValueError(f"its header of {length:,} bytes is larger than {MOST_HEADER_BYTES:,}")
        header = file.read(length)
    if header.count(b"{") > MOST_TENSORS + 1:  # each tensor is an object inside of one; look without the strings
        objects = (match for match in STRING_OR_OBJECT.finditer(header) if header[match.start()] == ord("{"))
        if next(itertools.islice(objects, MOST_TENSORS + 1, None), None) is not None:
            raise ValueError(f"it names more than {MOST_TENSORS:,} tensors")


def refuse_compressed(path: Path) -> None:
    """Raise ValueError if a file of torch.save unpacks to more bytes than it has: torch.save compresses nothing, and 2.7 MB
    of zeros took 3.5 GB. Raises OSError if it cannot be read."""
    with contextlib.suppress(zipfile.BadZipFile), zipfile.ZipFile(path) as archive:
        unpacked, there = sum(each.file_size for each in archive.infolist()), path.stat().st_size
        if unpacked > there:
            raise ValueError(f"it is compressed: {there:,} bytes that become {unpacked:,}")


def require_match(state: Mapping[str, Any], expected: Mapping[str, Any], *, types: bool = False) -> None:
    """Raise ValueError if a state_dict from a file does not have the names and shapes of the model's. types: and types."""
    for name in [*expected, *state]:
        if name not in state or name not in expected:
            whose = "the model lacks it" if name in state else "the file lacks it"
            raise ValueError(f"{name}: {whose}")
        there, here = state[name], expected[name]
        if is_extra(name, there) or is_extra(name, here):
            continue
        if there.shape != here.shape:
            raise ValueError(f"{name} is {tuple(there.shape)} in the file, {tuple(here.shape)} in the model")
        if types and there.dtype != here.dtype:
            raise ValueError(f"{name} is {there.dtype} in the file, {here.dtype} in the model")
