"""Pure index arithmetic: which samples a rank takes, at which step of which epoch.

The order is that of `torch.utils.data.DistributedSampler`, without its padding: in epoch e (from 0) a permutation of all n
samples drawn from a generator seeded with `seed + e`; rank r of s takes positions r, r + s, r + 2s, ... Seen over all ranks,
step k covers positions k*B*s to (k+1)*B*s (A times as many where A passes accumulate), so the order depends on the global
batch, never on the number of ranks.

Nothing is padded and nothing is dropped: shards are disjoint and cover the data, and where a step has fewer samples than
B*s, each rank's gradient is weighted so that the mean over ranks is still the mean over samples.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """What one rank takes in one forward and backward pass."""

    indices: Tensor  #: int64 [b], 1 <= b <= batch_size
    weight: (
        float  #: factor for the mean loss of these: summed over passes and averaged over ranks, the step's mean loss
    )
    local_count: int  #: how many of them count: b, or 0 where the data left this rank without a sample


@dataclass(frozen=True, slots=True)
class Step:
    """What one rank takes between two updates of the weights: one batch, or several whose gradients accumulate."""

    batches: list[Batch]
    count: int  #: samples over all batches and all ranks


def epoch_order(n: int, seed: int, epoch: int) -> Tensor:
    """Return the permutation of 0..n-1 (int64 [n]) in which `epoch` (from 0) visits the samples, on every rank."""
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed + epoch))


def steps_per_epoch(n: int, size: int, batch_size: int, accumulate: int = 1) -> int:
    """Return the number of steps, the last of which may be smaller, in which `size` ranks visit n samples once."""
    return -(-n // (batch_size * size * accumulate))


def passes_per_step(global_batch: int, size: int, batch_size: int) -> int:
    """Return how many passes of at most `batch_size` samples on each of `size` ranks make up the global batch."""
    return -(-global_batch // (batch_size * size))


def shard(n: int, rank: int, size: int) -> slice:
    """Return the positions that `rank` takes of n, unpadded; over all ranks they are disjoint and cover 0..n-1."""
    return slice(rank, n, size)


def steps(
    order: Tensor, rank: int, size: int, batch_size: int, accumulate: int = 1, global_batch: int | None = None
) -> Iterator[Step]:
    """Yield this rank's part of each step through `order` (int64 [n]); every rank sees the same number of steps and passes.

    A step takes `global_batch` samples (default: batch_size * size * accumulate), in as many passes as that needs: a run
    that goes on with other ranks keeps it, also where it does not divide. To go on inside an epoch, give the rest of its
    order.

    A rank that the last pass leaves without a sample repeats that pass's first one at weight 0: it still takes part in every
    collective, and adds nothing (batch norm has no answer to an empty batch).
    """
    n = len(order)
    per_pass = batch_size * size
    per_step = global_batch or per_pass * accumulate
    for first in range(0, n, per_step):
        count = min(per_step, n - first)
        passes = []
        for start in range(first, first + count, per_pass):
            together = order[start : min(start + per_pass, first + count)]  # what all ranks take in this pass
            indices = together[shard(len(together), rank, size)]
            local_count = len(indices)
            if local_count == 0:
                indices = order[start : start + 1]
            passes.append(Batch(indices, local_count * size / count, local_count))
        yield Step(passes, count)
