"""Attributes of objects and of layers, and marks that show whether they change."""

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from hvdtrain.checkpoint.own import persistent_buffers
from hvdtrain.engines.modules import uncompiled_name
from hvdtrain.engines.portable import PLAIN_TYPES, bytes_of, has_memory

MOST_COMPARED = 2**16  # values
MOST_HELD = 1_000  # parts of a list


def mark_of(tensors: Sequence[Tensor]) -> object:
    """Return what changes with tensors: few values themselves; of many, where they are, and how often they were written."""
    if all(map(has_memory, tensors)) and sum(one.numel() for one in tensors) <= MOST_COMPARED:
        return [(one.dtype, one.shape, bytes_of(one).numpy().tobytes()) for one in tensors]
    return [(one.data_ptr(), one._version) for one in tensors]


def attributes_held(what: object) -> Iterator[tuple[str, Any]]:
    """Yield the public attributes of an object, and others where the program itself has the class: private ones of a
    library's object are often caches, such as those of torchmetrics."""
    own = type(what).__module__ == "__main__"
    yield from (pair for pair in getattr(what, "__dict__", {}).items() if own or not pair[0].startswith("_"))


def numbers_of(what: object, apart: Collection[object] = ()) -> dict[str, Any]:
    """Return the numbers among an object's attributes, but for the mode of a module; also those of attributes with a state,
    such as `after.last_epoch` of a warm-up before another scheduler. apart: what is saved itself."""
    held = [pair for pair in attributes_held(what) if type(pair[1]) not in (str, NoneType)]
    pairs = [pair for pair in held if type(pair[1]) in (bool, int, float)]
    for name, value in held if len(held) > len(pairs) else ():
        has_state = callable(getattr(value, "load_state_dict", None)) and not any(value is one for one in apart)
        if has_state and not isinstance(value, nn.Module | torch.optim.Optimizer):
            inner = [(f"{name}.{key}", one) for key, one in attributes_held(value)]
            pairs += [pair for pair in inner if type(pair[1]) in (bool, int, float)]
    return {name: number for name, number in pairs if name.rpartition(".")[2] != "training"}


def tensors_held(what: object) -> dict[str, list[Tensor]]:
    """Return the tensors among an object's attributes, also those in a list, and arrays of numpy with the same memory."""
    held = dict[str, list[Tensor]]()
    for name, value in attributes_held(what):
        if type(value) in PLAIN_TYPES:
            continue
        some = value if isinstance(value, list | tuple) and len(value) <= MOST_HELD else [value]
        if tensors := [one for one in map(as_tensor, some) if one is not None]:
            held[name] = tensors
    return held


def as_tensor(value: Any) -> Tensor | None:
    """Return a tensor, or one with the memory of an array; None for another object."""
    if isinstance(value, Tensor):
        return value
    # An array that nobody can write into does not change.
    if hasattr(value, "__array_interface__") and getattr(value, "shape", None) and value.flags.writeable:
        with contextlib.suppress(TypeError, ValueError):  # of texts or objects; a view that torch has not
            return torch.as_tensor(value)
    return None


def are_in(known: Sequence[object], value: object) -> bool:
    """Return whether a value is made of numbers, texts and tensors, and others have the values of all of them."""
    texts = {repr(one) for one in known if not isinstance(one, Tensor)}
    tensors = [one for one in known if isinstance(one, Tensor)]
    return all(
        any(one.shape == x.shape and torch.equal(one.detach(), x) for x in tensors)
        if isinstance(one, Tensor) else repr(one) in texts
        for one in tree_leaves(value)
    )  # fmt: skip


def names_changed(began: Mapping[str, object], now: Mapping[str, object]) -> list[str]:
    """Return the names of which the marks are others now; of one that is gone, nothing is known."""
    return [name for name, mark in began.items() if now.get(name, mark) != mark]


def named_layers(models: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yield each layer, with what the names of its attributes begin with."""
    for path, layer in (pair for model in models for pair in model.named_modules()):
        yield uncompiled_name(f"{path}." if path else ""), layer


def held_by(models: Sequence[nn.Module]) -> dict[str, object]:
    """Return what shows whether the numbers and tensors change that layers hold beside parameters and saved buffers, by
    name. Of a layer with an extra state, nothing: that may have them."""
    held, beside = dict[str, object](), list[tuple[str, list[Tensor]]]()
    for prefix, layer in named_layers(models):
        if type(layer).get_extra_state is nn.Module.get_extra_state:
            unsaved = {name: layer._buffers.get(name) for name in layer._non_persistent_buffers_set}
            tensors = tensors_held(layer) | {k: [one] for k, one in unsaved.items() if one is not None}
            beside += [(prefix + name, some) for name, some in tensors.items()]
            # By its name, the length of a table that is computed again, as of a rotary embedding, is no state.
            held |= {prefix + name: repr(one) for name, one in numbers_of(layer).items() if "cached" not in name}
    # Not another name of a weight, nor an output. Most models have nothing beside.
    saved = [one for model in models if beside for one in (*model.parameters(), *model.state_dict().values())]
    kept = {one.data_ptr() for one in saved if has_memory(one)}
    return held | {
        name: mark_of(some)
        for name, some in beside
        if not any(one.data_ptr() in kept or one.grad_fn is not None for one in some)
    }


def buffers_by_name(models: Sequence[nn.Module]) -> dict[str, object]:
    """Return what shows whether the buffers of modules change that checkpoints have."""
    buffers = [pair for model in models for pair in persistent_buffers(model)]
    return {name: mark_of([buffer]) for name, buffer in buffers if buffer is not None}


def empty_in(models: Sequence[nn.Module]) -> dict[str, object]:
    """Return the attributes of layers that are None, by name, as a state is before the first step."""
    return {prefix + name: None for prefix, x in named_layers(models) for name, one in vars(x).items() if one is None}
