"""Pure index arithmetic: which samples a rank takes, at which step of which epoch.

The order is that of `torch.utils.data.DistributedSampler`, without its padding: in epoch e (from 0) a permutation of all n
samples drawn from a generator seeded with `seed + e`; rank r of s takes positions r, r + s, r + 2s, ... Seen over all ranks,
step k covers positions k*B*s to (k+1)*B*s, so the order depends on the global batch, never on the number of ranks.

Nothing is padded and nothing is dropped: shards are disjoint and cover the data, and where a step has fewer samples than
B*s, each rank's gradient is weighted so that the mean over ranks is still the mean over samples.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor


class Batch(NamedTuple):
    """What one rank takes at one step."""

    indices: Tensor  # int64 [b], b <= batch_size
    weight: float  # factor for this rank's mean loss; the mean over ranks is then the mean over all samples of the step
    count: int  # samples of the step over all ranks
    local_count: int  # samples of the step that count on this rank: b, or 0 where the step left this rank without one


def epoch_order(n: int, seed: int, epoch: int) -> Tensor:
    """Return the permutation of 0..n-1 (int64 [n]) in which `epoch` (from 0) visits the samples, on every rank alike."""
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed + epoch))


def steps_per_epoch(n: int, size: int, batch_size: int) -> int:
    """Return the number of steps, the last of which may be smaller, in which `size` ranks visit n samples once."""
    return -(-n // (batch_size * size))


def shard(n: int, rank: int, size: int) -> slice:
    """Return the positions that `rank` takes of n, unpadded; over all ranks they are disjoint and cover 0..n-1."""
    return slice(rank, n, size)


def batches(order: Tensor, rank: int, size: int, batch_size: int) -> Iterator[Batch]:
    """Yield this rank's part of each step through `order` (int64 [n]); every rank yields the same number of times.

    A rank that the last step leaves without a sample repeats that step's first one at weight 0: it still takes part in every
    collective, and adds nothing (batch norm has no answer to an empty batch).
    """
    n = len(order)
    local = order[shard(n, rank, size)]
    for step in range(steps_per_epoch(n, size, batch_size)):
        first = step * batch_size * size
        count = min(batch_size * size, n - first)
        indices = local[step * batch_size : (step + 1) * batch_size]
        local_count = len(indices)
        if local_count == 0:
            indices = order[first : first + 1]
        yield Batch(indices, local_count * size / count, count, local_count)
