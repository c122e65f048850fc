"""Sums by which ranks compare tensors, without sending them."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from hvdtrain.engines.base import Engine
from hvdtrain.engines.errors import UserError
from hvdtrain.engines.modules import is_extra

CHUNK = 2**18  # elements


def checksum(parameter: Tensor) -> Tensor:
    """Return an int64 scalar: the sum over all values of their bits times their position (from 1), modulo 2^64.

    It changes if a single bit flips, or if two different values are swapped. Computed on the parameter's device, in chunks:
    positions and products are of int64, four times the memory of a large float32 parameter.
    """
    if parameter.is_complex():
        parameter = torch.view_as_real(parameter.detach())
    kind = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[parameter.element_size()]
    total, done = torch.zeros((), dtype=torch.int64, device=parameter.device), 0
    for chunk in chunks(parameter.detach()):
        bits = chunk.view(kind)
        total += (bits * torch.arange(done + 1, done + len(bits) + 1, device=bits.device)).sum()
        done += len(bits)
    return total


def chunks(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the elements in order, as flat tensors of at most CHUNK elements. Only the current one is copied, if at all."""
    if tensor.is_contiguous():
        yield from tensor.reshape(-1).split(CHUNK)
        return
    rows = CHUNK // tensor[0].numel()
    for part in tensor.split(max(1, rows)):  # channels_last, for instance
        yield from [part.reshape(-1)] if rows else chunks(part[0])


def require_same_on_all(engine: Engine, registered: Mapping[str, object]) -> None:
    """Raise UserError on every rank if a registered module has other values on another rank: of these, a checkpoint holds
    those of rank 0. A collective."""
    for name, what in registered.items():
        if not isinstance(what, nn.Module) or engine.size == 1:
            continue
        sums = [int(checksum(value)) for key, value in what.state_dict().items() if not is_extra(key, value)]
        rows = engine.all_gather_object(sums, f"register.{name}")
        for rank, row in enumerate(rows):
            if row != rows[0]:
                message = f"{type(what).__name__} has other values on rank {rank} than on rank 0"
                remedy = "create it alike on all ranks, or load the same state_dict"
                raise UserError(f"run.register({name}=...): the {message}: {remedy}", everywhere=True)
