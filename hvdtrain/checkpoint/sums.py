"""Sums and hashes by which ranks compare what they have, without sending it."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from hvdtrain.engines.base import Engine
from hvdtrain.engines.errors import UserError
from hvdtrain.engines.modules import is_extra
from hvdtrain.engines.portable import as_row, to_json

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
    longest = max(tensor.numel() * max(1 + tensor.is_complex(), tensor.element_size() // 4) for tensor in tensors)
    positions = torch.arange(1, min(limit, longest) + 1, device=device)
    for tensor in tensors:
        values = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
        # Numbers of 8 bytes as two: times an even position, the highest bit of one, its sign, is 0 modulo 2^64.
        kind = {1: torch.int8, 2: torch.int16}.get(size := values.element_size(), torch.int32)
        total: Any = None
        done = 0
        for chunk in chunks(values, limit * 4 // max(4, size)):
            bits = chunk.view(kind)
            places = positions[: len(bits)] if done == 0 else positions[: len(bits)] + done
            # Overflows of int64 wrap around: the sum modulo 2^64 does not depend on the order of addition.
            one = (bits * places).sum()
            # Added at once: sums that are kept between the products keep their memory from being used again.
            total = one if total is None else total.add_(one)
            done += len(bits)
        sums.append(total)
    return torch.stack(sums)


def chunks(tensor: Tensor, limit: int) -> Iterator[Tensor]:
    """Yield the elements in order, as flat tensors of at most `limit` elements. Only the current one may be copied."""
    if tensor.is_contiguous():
        yield from as_row(tensor).split(limit)
        return
    rows = limit // tensor[0].numel()
    for part in tensor.split(max(1, rows)):  # channels_last, for instance
        yield from [as_row(part)] if rows else chunks(part[0], limit)


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


def digest_of_values(state: Any) -> str:
    """Return a hash of nested values."""
    return hashlib.sha256(json.dumps(to_json(state, lambda tensor: int(tensor_checksum(tensor)))).encode()).hexdigest()
