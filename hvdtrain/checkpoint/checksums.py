"""Sums by which ranks compare tensors, without sending them."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from hvdtrain.engines.base import Engine
from hvdtrain.engines.errors import UserError
from hvdtrain.engines.modules import is_extra

# Elements that are computed at a time. Positions and products are of int64, four times the memory of float32 values: on CPUs
# they stay in the cache, and a GPU is given enough to do for each kernel.
CHUNK, CHUNK_ON_GPU = 2**18, 2**22


def tensor_checksum(tensor: Tensor) -> Tensor:
    """Return an int64 scalar: the sum over all values of their bits times their position (from 1), modulo 2^64.

    It changes if a single bit flips, or if two different values are swapped. Computed on the tensor's device.
    """
    return checksums([tensor])[0]


def checksums(tensors: Sequence[Tensor]) -> Tensor:
    """Return the checksum of each tensor, int64 [n]. All are on one device, where each takes two kernels if it is small."""
    sums, device = [], tensors[0].device
    limit = CHUNK if device.type == "cpu" else CHUNK_ON_GPU
    longest = max(tensor.numel() * (2 if tensor.is_complex() else 1) for tensor in tensors)
    positions = torch.arange(1, min(limit, longest) + 1, device=device)
    for tensor in tensors:
        values = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
        kind = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()]
        done, of_chunks = 0, []
        for chunk in chunks(values, limit):
            bits = chunk.view(kind)
            places = positions[: len(bits)] if done == 0 else positions[: len(bits)] + done
            of_chunks.append((bits * places).sum())
            done += len(bits)
        sums.append(of_chunks[0] if len(of_chunks) == 1 else torch.stack(of_chunks).sum())
    return torch.stack(sums)


def chunks(tensor: Tensor, limit: int) -> Iterator[Tensor]:
    """Yield the elements in order, as flat tensors of at most `limit` elements. Only the current one may be copied."""
    if tensor.is_contiguous():
        yield from tensor.reshape(-1).split(limit)
        return
    rows = limit // tensor[0].numel()
    for part in tensor.split(max(1, rows)):  # channels_last, for instance
        yield from [part.reshape(-1)] if rows else chunks(part[0], limit)


def require_same_on_all(engine: Engine, registered: Mapping[str, object]) -> None:
    """Raise UserError on every rank if a registered module has other values on another rank: of these, a checkpoint holds
    those of rank 0. Or if a scheduler has other rates there: the weights would differ after a step. A collective."""
    for name, what in registered.items():
        if not isinstance(what, (nn.Module, LRScheduler)) or engine.size == 1:
            continue
        if isinstance(what, LRScheduler):
            sums = [repr(getattr(what, key, None)) for key in ("last_epoch", "base_lrs", "_last_lr")]
        else:
            sums = [
                str(int(tensor_checksum(value))) for key, value in what.state_dict().items() if not is_extra(key, value)
            ]
        rows = engine.all_gather_object(sums, f"register.{name}")
        for rank, row in enumerate(rows):
            if row != rows[0]:
                message = f"{type(what).__name__} has other values on rank {rank} than on rank 0"
                remedy = "create it alike on all ranks, or load the same state_dict"
                raise UserError(f"run.register({name}=...): the {message}: {remedy}", everywhere=True)
