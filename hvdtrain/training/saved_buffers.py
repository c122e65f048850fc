"""The buffers in a checkpoint: those of which each rank has its own, by name, and those that are made while training.

Only those that belong to the state_dict. A buffer that is not persistent is made again by the module.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hvdtrain.engines.buffers import running_statistics
from hvdtrain.training.names import own_name, prefixes

Shapes = dict[str, list[int] | None]  # of a module's persistent buffers, by name; None: there is no tensor yet
Late = list[Any]  # JSON: name, shape when training began, shape and dtype when the checkpoint was saved


def persistent_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor | None]]:
    """Yield each persistent buffer with its name in the state_dict."""
    for path, layer in module.named_modules():
        for name, buffer in layer._buffers.items():
            if name not in layer._non_persistent_buffers_set:
                yield own_name(f"{path}.{name}" if path else name), buffer


def of_each_rank(models: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Return the floating-point buffers of all models, by unique names: each rank has its own."""
    found, known = {}, set[int]()
    for prefix, model in zip(prefixes(models), models, strict=True):
        for name, buffer in persistent_buffers(model):
            if buffer is None or not buffer.is_floating_point() or buffer.layout is not torch.strided:
                continue
            if id(buffer) not in known:
                known.add(id(buffer))
                found[prefix + name] = buffer
    return found


def statistics_of(registered: Mapping[str, Any]) -> dict[str, dict[str, Tensor]]:
    """Return the running statistics in each registered module that has some: statistics.NAME, and their names."""
    found = {}
    for name, module in registered.items():
        if isinstance(module, nn.Module) and (statistics := {id(one) for one in running_statistics([module])}):
            named = module.named_buffers()
            found[f"statistics.{name}"] = {own_name(one): buffer for one, buffer in named if id(buffer) in statistics}
    return found


def shapes(module: nn.Module) -> Shapes:
    """Return the shape of each persistent buffer."""
    return {name: None if buffer is None else list(buffer.shape) for name, buffer in persistent_buffers(module)}


def changed(module: nn.Module, began: Shapes) -> list[Late]:
    """Return the buffers that have other shapes than when training began."""
    return [
        [name, began.get(name), list(buffer.shape), str(buffer.dtype).removeprefix("torch.")]
        for name, buffer in persistent_buffers(module)
        if buffer is not None and began.get(name) != list(buffer.shape)
    ]


def make_room(module: nn.Module, late: Sequence[Late], device: torch.device) -> None:
    """Give `module` buffers of the saved shapes, to be loaded. One that this program begins otherwise stays as it is."""
    layers: Mapping[str, nn.Module] = {own_name(path): layer for path, layer in module.named_modules()}
    now = shapes(module)
    for full, began, shape, dtype in late:
        path, _, name = full.rpartition(".")
        layer = layers.get(path)
        if layer is None or now.get(full) != began or (name not in layer._buffers and hasattr(layer, name)):
            continue
        layer.register_buffer(name, torch.zeros(shape, dtype=getattr(torch, dtype), device=device))
