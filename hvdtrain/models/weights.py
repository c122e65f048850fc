"""Initial weights from a file; checks of such files, before they are opened, and whether they match a model; writing them.

Nothing in a file is executed.
"""

import contextlib
import functools
import itertools
import json
import re
import stat
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor, nn

from hvdtrain.engines.errors import UserError
from hvdtrain.engines.modules import is_extra
from hvdtrain.engines.portable import bytes_of

MOST_HEADER_BYTES = 2**26
MOST_TENSORS = 100_000
# By how they begin, where that is no length of a header.
OTHER_FORMATS = {
    b"PK\x03\x04": "a file of torch.save, or another zip",
    b"\x1f\x8b": "compressed by gzip",
    b'{"': "JSON",
}
STRING_OR_OBJECT = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|\{', re.DOTALL)


@functools.cache
def type_in_file(dtype: torch.dtype) -> str:
    """Return the name that safetensors has for a type. Raises KeyError or ValueError if it has none."""
    from safetensors.torch import save

    name: str = json.loads(save({"it": torch.empty(0, dtype=dtype)})[8:])["it"]["dtype"]
    return name


def write_tensors(file: IO[bytes], tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write a file of safetensors. Raises OSError, and KeyError or ValueError for what such a file cannot hold.

    The library's `save` copies all tensors twice, and holds the lock of the interpreter meanwhile: in a background thread,
    it stops training. Source of the format: the README of safetensors, "Format".
    """
    # Those with the largest elements come first, so that each is aligned.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    place = 0
    for name, tensor in ordered:
        end = place + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": type_in_file(tensor.dtype), "shape": [*tensor.shape], "data_offsets": [place, end]}
        place = end
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for _, tensor in ordered:
        file.write(bytes_of(tensor).numpy().data)


def require_file(path: Path) -> None:
    """Raise ValueError if `path` is not a regular file. Raises OSError."""
    # To open a pipe or a device might wait for ever.
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError("it is not a regular file")


def refuse_large_header(path: Path) -> None:
    """Raise ValueError if a safetensors file has an excessive number of tensors. Raises OSError if it cannot be read."""
    require_file(path)
    with path.open("rb") as file:
        first = file.read(8)
        length = int.from_bytes(first, "little")
        if length > MOST_HEADER_BYTES:
            other = next((what for begins, what in OTHER_FORMATS.items() if first.startswith(begins)), None)
            large = f"its header of {length:,} bytes is larger than {MOST_HEADER_BYTES:,}"
            raise ValueError(f"it is {other}, and not safetensors" if other else large)
        header = file.read(length)
    # safetensors makes an object for each tensor: a file of 67 MB with a million empty ones took 33 s and 2 GB.
    if header.count(b"{") > MOST_TENSORS + 1:  # each tensor is an object inside of one; look without the strings
        objects = (match for match in STRING_OR_OBJECT.finditer(header) if header[match.start()] == ord("{"))
        if next(itertools.islice(objects, MOST_TENSORS + 1, None), None) is not None:
            raise ValueError(f"it names more than {MOST_TENSORS:,} tensors")


def refuse_compressed(path: Path) -> None:
    """Raise ValueError if a file of torch.save unpacks to more bytes than it has. Raises OSError if it cannot be read."""
    with contextlib.suppress(zipfile.BadZipFile), zipfile.ZipFile(path) as archive:
        # torch.save compresses nothing, and 2.7 MB of zeros became 3.5 GB.
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


def require_values(state: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Raise ValueError if a tensor of a file has no values that the model's can take."""
    for name, tensor in state.items():
        if is_extra(name, tensor):
            continue
        of = "sparse" if tensor.layout != torch.strided else "quantized" if tensor.is_quantized else ""
        # load_state_dict keeps the real part of complex values, and ends in a traceback for other layouts.
        if tensor.is_complex() and not (name in expected and expected[name].is_complex()):
            of = "complex"
        if of or tensor.is_meta:
            raise ValueError(f"{name} is {of or 'without values (on the meta device)'}")


def read_state(path: Path) -> Any:
    """Return what a file of `torch.save(model.state_dict())`, or a .safetensors file, holds. Raises UserError."""
    try:
        require_file(path)
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            refuse_large_header(path)
            return load_file(path)
        refuse_compressed(path)
        # weights_only: a pickle could run code (CVE-2025-32434 is fixed in torch 2.6).
        return torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise UserError(f"--weights {path}: {error.strerror or error}: name a file that can be read") from error
    except Exception as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        if "weights_only" in str(error):  # a long text of torch, with escape codes, about how to run what is in it
            first = "it holds a whole model, or other objects"
        remedy = "save it with torch.save(model.state_dict())"
        raise UserError(f"--weights {path}: not a file of weights ({first}): {remedy}") from error


def load_weights(model: nn.Module, path: Path) -> None:
    """Load weights into `model` from `path` (`read_state`).

    Raises UserError if the file cannot be read, contains anything but tensors, or does not match the model.
    """
    state = read_state(path)
    extra = {name for name, value in model.state_dict().items() if is_extra(name, value)}
    if not isinstance(state, dict) or not all(isinstance(one, Tensor) or name in extra for name, one in state.items()):
        remedy = "torch.save(model.state_dict())"
        raise UserError(f"--weights {path}: holds {type(state).__name__}, not a state_dict: {remedy}")
    try:
        require_match(state, model.state_dict())
    except ValueError as error:
        remedy = "make the model, with as many classes, that it was saved from"
        prefix = next(iter(state), "").split(".")[0] + "."
        if {name.removeprefix(prefix) for name in state} == set(model.state_dict()):
            remedy = f"its names begin with {prefix}: save the state_dict of that part"
        if all(name.startswith(("module.", "_orig_mod.")) for name in state) and state:
            remedy = "save model.module.state_dict(), of a compiled one model._orig_mod"
            remedy = f"its names are those of a wrapped model: {remedy}"
        raise UserError(f"--weights {path}: does not match the model: {error}: {remedy}") from error
    try:
        require_values(state, model.state_dict())
    except ValueError as error:
        raise UserError(f"--weights {path}: {error}: save dense tensors of the model's types") from error
    try:
        model.load_state_dict(state)
    except Exception as error:  # any: set_extra_state is the author's own
        last = (str(error) or type(error).__name__).splitlines()[-1].strip()
        remedy = "let set_extra_state take what get_extra_state returns"
        raise UserError(f"--weights {path}: the model does not take its state ({last}): {remedy}") from error
