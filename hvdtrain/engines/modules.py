"""What is in the models of a run: parameters and buffers, by unique names.

Each rank changes its own buffers in its forward passes, such as batch norm's running statistics.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

# ---- names


class Models(list[nn.Module]):
    """The models of a run. names: what the script calls them, `run.prepare(generator=...)`; "": it gave no name."""

    def __init__(self, models: Iterable[nn.Module], names: Iterable[str]):
        super().__init__(models)
        self.names = list(names)


def prefixes_of_models(models: Sequence[nn.Module]) -> list[str]:
    """Return what the names of each model's parts begin with: nothing for a single model, else its name or number."""
    if len(models) == 1:
        return [""]
    names = models.names if isinstance(models, Models) else [""] * len(models)
    return [f"{name or number}." for number, name in enumerate(names)]


def uncompiled_name(name: str) -> str:
    """Return the name of a parameter or buffer without the part that torch.compile inserts for a compiled module."""
    return name.replace("_orig_mod.", "")


def named_parameters(models: Sequence[nn.Module]) -> list[tuple[str, nn.Parameter]]:
    """Return each parameter once, with a unique name. With several models, it begins with the model's name or number."""
    named: dict[nn.Parameter, str] = {}
    for prefix, model in zip(prefixes_of_models(models), models, strict=True):
        for name, parameter in model.named_parameters():
            named.setdefault(parameter, prefix + uncompiled_name(name))
    return [(name, parameter) for parameter, name in named.items()]


def kind_of(tensor: Tensor) -> str:
    """Return a tensor's shape and type in words."""
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


# ---- buffers

COUNTER = "num_batches_tracked"  # of the batches that a batch norm's statistics are of


def floating_buffers(models: Sequence[nn.Module]) -> Iterable[Tensor]:
    """Return the floating-point buffers of all models, in order, without sparse ones."""
    floating = (buffer for model in models for buffer in model.buffers() if buffer.is_floating_point())
    return (buffer for buffer in floating if buffer.layout is torch.strided)


class NamedBuffer(NamedTuple):
    """A buffer, and the layer that has it."""

    tensor: Tensor
    layer: nn.Module
    is_statistic: bool  # a running statistic of batch norm
    saved: bool  # whether a state_dict has it


def named_buffers(modules: Iterable[tuple[str, nn.Module]]) -> dict[str, NamedBuffer]:
    """Return each buffer once, without sparse ones, by its unique name. modules: with what their names begin with."""
    named, known = dict[str, NamedBuffer](), set[int]()
    for prefix, module in modules:
        for path, layer in module.named_modules():
            statistics = statistics_of_layer(layer)
            for name, tensor in layer.named_buffers(recurse=False):
                if id(tensor) not in known and tensor.layout is torch.strided:
                    known.add(id(tensor))
                    full = prefix + uncompiled_name(f"{path}.{name}" if path else name)
                    saved = name not in layer._non_persistent_buffers_set
                    named[full] = NamedBuffer(tensor, layer, name in statistics, saved)
    return named


def buffers_of_models(models: Sequence[nn.Module]) -> dict[str, NamedBuffer]:
    """Return each buffer of the models of a run once, by its unique name."""
    return named_buffers(zip(prefixes_of_models(models), models, strict=True))


def all_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return each parameter and buffer once, with its name. Without sparse ones, which collectives do not carry."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return [(name, tensor) for name, tensor in named if tensor.layout is torch.strided]


def is_extra(name: str, value: object) -> bool:
    """Return whether an entry of a state_dict is neither parameter nor buffer: what a layer's `get_extra_state` returns."""
    return name.rpartition(".")[2] == "_extra_state" or not isinstance(value, Tensor)


def running_statistics(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Return batch norm's running statistics in `modules`, in order."""
    layers = (layer for module in modules for layer in module.modules())
    return list({id(buffer): buffer for layer in layers for buffer in statistics_of_layer(layer).values()}.values())


def statistics_of_layer(layer: nn.Module) -> dict[str, Tensor]:
    """Return the running statistics of a batch norm by name; {} for any other layer.

    Also of layers that are not torch's and do as batch norm does: their buffers are called running_..., and there is a
    momentum.
    """
    # FrozenBatchNorm has no momentum. A buffer of any other layer, such as a mask, is no statistic of the samples.
    if not (isinstance(layer, _NormBase) or hasattr(layer, "momentum") or hasattr(layer, "num_batches_tracked")):
        return {}
    buffers = dict(layer.named_buffers(recurse=False))
    return {name: one for name, one in buffers.items() if name.startswith("running_") and one.is_floating_point()}


def flatten(buffers: Iterable[Tensor]) -> Tensor:
    """Return this rank's floating-point `buffers` as one tensor [n]: float32, or float64 if one of them is."""
    parts = [buffer.detach().reshape(-1) for buffer in buffers]
    dtype = torch.float64 if any(part.dtype == torch.float64 for part in parts) else torch.float32
    return torch.cat([part.to(dtype) for part in parts]) if parts else torch.zeros(0, dtype=dtype)


def unflatten(flat: Tensor, buffers: Iterable[Tensor]) -> None:
    """Copy `flat`, as returned by `flatten`, into `buffers`."""
    buffers = list(buffers)
    for buffer, part in zip(buffers, flat.split([buffer.numel() for buffer in buffers]), strict=True):
        buffer.copy_(part.view_as(buffer))
