"""The order of the samples of tar shards in an epoch: a pure function of their sizes, seed and epoch.

Samples are numbered across all shards. An epoch visits the shards in random order, `window` shards at a time, and shuffles
the samples within each window, so that a reader needs only the files of one window. sharding.py determines which rank takes
which position, as for any other order.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from hvdtrain.inputs.sharding import epoch_order

WINDOW_SHARDS = 16
WINDOW_SAMPLES = 2**14  # minimum size of a window; with small shards, it has more than WINDOW_SHARDS of them


def shard_order(sizes: Tensor, seed: int, epoch: int, window: int) -> Tensor:
    """Return the order of samples in `epoch` (from 0): a permutation, int64 [n]. sizes: samples per shard, int64 [k].

    If a window contains all shards, the order is that of image folders, `epoch_order`.
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
    """Return the number of shards to shuffle at a time. sizes: samples per shard, int64 [k]."""
    mean = max(1, int(sizes.sum()) // max(1, len(sizes)))
    return max(WINDOW_SHARDS, -(-WINDOW_SAMPLES // mean))


@dataclass(frozen=True)
class ShardOrder:
    """The order of a set of shards, for `Plan.order`."""

    sizes: Tensor  # int64 [k]
    window: int

    def __call__(self, seed: int, epoch: int) -> Tensor:
        return shard_order(self.sizes, seed, epoch, self.window)
