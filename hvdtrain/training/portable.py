"""Values as JSON and back, such as the state of a data set: what JSON does not have is an object with the key KIND.

Not pickle: a checkpoint holds no code.
"""

import base64
import sys
from typing import Any

import torch
from torch import Tensor

KIND = "__kind__"


def to_json(value: Any) -> Any:
    """Return `value` as JSON. Raises TypeError for an object of another kind than numbers, text, bytes, tensors, arrays,
    and lists, tuples and dictionaries of these."""
    numpy = sys.modules.get("numpy")
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if type(value) is list:
        return [to_json(item) for item in value]
    if isinstance(value, dict):
        if all(type(key) is str and key != KIND for key in value):
            return {key: to_json(item) for key, item in value.items()}
        return {KIND: "dict", "items": [[to_json(key), to_json(item)] for key, item in value.items()]}
    if isinstance(value, (list, tuple)):
        return {KIND: "tuple", "items": [to_json(item) for item in value]}
    if isinstance(value, (bytes, bytearray)):
        return {KIND: "bytes", "data": base64.b64encode(value).decode()}
    if isinstance(value, Tensor):
        flat = value.detach().cpu().contiguous()
        data = base64.b64encode(bytes(flat.view(-1).view(torch.uint8).numpy())).decode() if flat.numel() else ""
        return {KIND: "tensor", "dtype": str(value.dtype).removeprefix("torch."), "shape": [*value.shape], "data": data}
    if numpy is not None and isinstance(value, numpy.ndarray) and value.dtype.kind in "biufc":
        data = base64.b64encode(value.tobytes()).decode()
        return {KIND: "array", "dtype": value.dtype.str, "shape": list(value.shape), "data": data}
    if numpy is not None and isinstance(value, numpy.generic):
        return to_json(value.item())
    raise TypeError(f"it holds a {type(value).__name__}")


def from_json(value: Any) -> Any:
    """Return what was given to `to_json`."""
    if isinstance(value, list):
        return [from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(KIND)
    if kind is None:
        return {key: from_json(item) for key, item in value.items()}
    if kind == "dict":
        return {from_json(key): from_json(item) for key, item in value["items"]}
    if kind == "tuple":
        return tuple(from_json(item) for item in value["items"])
    data = bytearray(base64.b64decode(value["data"]))
    if kind == "bytes":
        return bytes(data)
    if kind == "tensor":
        dtype = getattr(torch, value["dtype"])
        flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
        return flat.reshape(value["shape"])
    import numpy

    return numpy.frombuffer(data, dtype=value["dtype"]).reshape(value["shape"]).copy()
