"""The order in which an epoch visits the samples of tar shards: a pure function of their sizes, seed and epoch.

Samples are numbered through all shards, in the shards' own order. An epoch takes the shards in random order, `window` of
them at a time, and shuffles the samples of each window, so that a reader needs no more files than a window has. Which
rank takes which position of the order is decided in sharding.py, as for any other order.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from hvdtrain.data.sharding import epoch_order

WINDOW_SHARDS = 16
WINDOW_SAMPLES = 2**14  # a window of small shards has more of them, so that it has about as many samples


def shard_order(sizes: Tensor, seed: int, epoch: int, window: int) -> Tensor:
    """Return the permutation (int64 [n]) in which `epoch` (from 0) visits the n samples of shards of `sizes` (int64 [k]).

    Where one window holds all shards, it is the order that image folders have, `epoch_order`.
    """
    if window < 1:
        raise ValueError(f"a window of {window} shards")
    if window >= len(sizes):
        return epoch_order(int(sizes.sum()), seed, epoch)
    generator = torch.Generator().manual_seed(seed + epoch)
    first = sizes.cumsum(0) - sizes  # of each shard's samples
    parts = []
    for shards in torch.randperm(len(sizes), generator=generator).split(window):
        spans = zip(first[shards].tolist(), sizes[shards].tolist(), strict=True)
        samples = torch.cat([torch.arange(start, start + size) for start, size in spans])
        parts.append(samples[torch.randperm(len(samples), generator=generator)])
    return torch.cat(parts)


def window_of(sizes: Tensor) -> int:
    """Return how many of these shards (int64 [k]) to shuffle at a time."""
    mean = max(1, int(sizes.sum()) // max(1, len(sizes)))
    return max(WINDOW_SHARDS, -(-WINDOW_SAMPLES // mean))


@dataclass(frozen=True)
class ShardOrder:
    """The order of one set of shards, for a Plan."""

    sizes: Tensor  # int64 [k]
    window: int

    def __call__(self, seed: int, epoch: int) -> Tensor:
        return shard_order(self.sizes, seed, epoch, self.window)
