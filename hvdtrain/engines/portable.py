"""Nested values as JSON and back, such as the state of a data set. What JSON does not have is an object with a key of OWN.

Not pickle: a checkpoint holds no code.
"""

import base64
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

TENSOR, ITEMS, TUPLE, BYTES, ARRAY = OWN = ("__tensor__", "__items__", "__tuple__", "__bytes__", "__array__")
Held = dict[str, Any]  # JSON: what stands for a tensor: its place, shape and dtype


def described(tensor: Tensor, place: object) -> Held:
    """Return the JSON object that stands for a tensor. place: its bytes, or where they are, as JSON."""
    return {TENSOR: place, "shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}


def embedded(tensor: Tensor) -> str:
    """Return the tensor's bytes as text."""
    flat = tensor.detach().cpu().contiguous().view(-1)
    return base64.b64encode(flat.view(torch.uint8).numpy().data).decode() if flat.numel() else ""


def extracted(value: Held) -> Tensor:
    """Return the tensor that `embedded` has made text of."""
    dtype, data = getattr(torch, value["dtype"]), bytearray(base64.b64decode(value[TENSOR]))
    return (torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)).reshape(value["shape"])


def to_json(value: Any, put: Callable[[Tensor], object] = embedded) -> Any:
    """Return `value` as JSON. Raises TypeError, with the name of its type, for an object that is no number, text, bytes,
    tensor, array, or list, tuple or dictionary of these.

    put: called for each tensor, and for the bytes of others; returns its place, as JSON.
    """
    numpy = sys.modules.get("numpy")
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if type(value) is list:
        return [to_json(item, put) for item in value]
    if isinstance(value, dict):
        if all(type(key) is str and key not in OWN for key in value):
            return {key: to_json(item, put) for key, item in value.items()}
        return {ITEMS: [[to_json(key, put), to_json(item, put)] for key, item in value.items()]}
    if isinstance(value, (list, tuple)):
        return {TUPLE: [to_json(item, put) for item in value]}
    if isinstance(value, Tensor):
        return described(value, put(value))
    if isinstance(value, (bytes, bytearray)):
        content = torch.frombuffer(bytearray(value), dtype=torch.uint8) if value else torch.empty(0, dtype=torch.uint8)
        return {BYTES: described(content, put(content))}
    if numpy is not None and isinstance(value, numpy.ndarray) and value.dtype.kind in "biufc":
        return {ARRAY: [value.dtype.str, list(value.shape), to_json(value.tobytes(), put)]}
    if numpy is not None and isinstance(value, numpy.generic):
        return to_json(value.item(), put)
    raise TypeError(type(value).__name__)


def from_json(value: Any, get: Callable[[Held], Tensor] = extracted) -> Any:
    """Return what was given to `to_json`. get: called for each tensor, in the same order; returns it."""
    if isinstance(value, list):
        return [from_json(item, get) for item in value]
    if not isinstance(value, dict):
        return value
    if TENSOR in value:
        return get(value)
    if ITEMS in value:
        return {from_json(key, get): from_json(item, get) for key, item in value[ITEMS]}
    if TUPLE in value:
        return tuple(from_json(item, get) for item in value[TUPLE])
    if BYTES in value:
        return get(value[BYTES]).numpy().tobytes()
    if ARRAY in value:
        import numpy

        dtype, shape, data = value[ARRAY]
        return numpy.frombuffer(from_json(data, get), dtype=dtype).reshape(shape).copy()
    return {key: from_json(item, get) for key, item in value.items()}


def plain(value: Any) -> Any:
    """Return `value` as what JSON gives back, to be compared with it: numbers, text, lists and dictionaries of these.

    Raises ValueError, with what it is, for anything else.
    """
    if isinstance(value, float) and value != value:
        raise ValueError("nan, which is not equal to itself")
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, dict) and all(isinstance(key, (str, int)) for key in value):
        return {str(key): plain(item) for key, item in value.items()}
    if getattr(value, "shape", None) == () and hasattr(value, "item") and not isinstance(value.item(), complex):
        return plain(value.item())  # a scalar of torch or numpy
    raise ValueError(f"a {type(value).__name__}")


def flattened(value: Any) -> tuple[Any, Tensor]:
    """Return nested values as JSON, and the bytes of their tensors, one after the other, as int64 [n] on the CPU."""
    parts = [torch.empty(0, dtype=torch.uint8)]

    def put(tensor: Tensor) -> None:
        parts.append(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8))

    packed = to_json(value, put)
    content = torch.cat(parts)
    return packed, F.pad(content, (0, -len(content) % 8)).view(torch.int64)  # 8 bytes each: MPI counts up to 2^31


def unflattened(packed: Any, row: Tensor) -> Any:
    """Return what was given to `flattened`. row: may be longer."""
    content, end = row.view(torch.uint8), 0

    def get(held: Held) -> Tensor:
        nonlocal end
        dtype: torch.dtype = getattr(torch, held["dtype"])
        begin, end = end, end + math.prod(held["shape"]) * dtype.itemsize
        return content[begin:end].clone().view(dtype).reshape(held["shape"])

    return from_json(packed, get)
