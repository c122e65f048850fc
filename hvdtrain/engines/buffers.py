"""The floating-point buffers of models, such as batch norm's running statistics: each rank has its own."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase


def floating_buffers(models: Sequence[nn.Module]) -> Iterable[Tensor]:
    """Return the floating-point buffers of all models, in order."""
    return (buffer for model in models for buffer in model.buffers() if buffer.is_floating_point())


def running_statistics(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Return batch norm's running statistics in `modules`, in order."""
    layers = (layer for module in modules for layer in module.modules() if isinstance(layer, _NormBase))
    return [tensor for layer in layers for tensor in (layer.running_mean, layer.running_var) if tensor is not None]


def flatten(buffers: Iterable[Tensor]) -> Tensor:
    """Return this rank's floating-point `buffers` as one tensor [n]: float32, or float64 if one of them is."""
    parts = [buffer.detach().reshape(-1) for buffer in buffers]
    dtype = torch.float64 if any(part.dtype == torch.float64 for part in parts) else torch.float32
    return torch.cat([part.to(dtype) for part in parts]) if parts else torch.zeros(0)


def unflatten(flat: Tensor, buffers: Iterable[Tensor]) -> None:
    """Copy `flat`, as returned by `flatten`, into `buffers`."""
    buffers = list(buffers)
    for buffer, part in zip(buffers, flat.split([buffer.numel() for buffer in buffers]), strict=True):
        buffer.copy_(part.view_as(buffer))
