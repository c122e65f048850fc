"""Shards are disjoint, cover the data, and weight their gradients so that the mean over ranks is the mean over samples."""

import pytest
import torch
from torch.utils.data.distributed import DistributedSampler

from hvdtrain.inputs.sharding import epoch_order, shard, steps, steps_per_epoch

CASES = [
    (n, size, batch, accumulate)
    for n in (1, 7, 10, 64, 101)
    for size in (1, 2, 3, 8)
    if n >= size
    for batch in (1, 4, 50)
    for accumulate in (1, 3)
]


def test_every_sample_counts_once_and_every_rank_takes_every_pass():
    for n, size, batch_size, accumulate in CASES:
        order = epoch_order(n, seed=3, epoch=2)
        values = torch.randn(n, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        per_rank = [list(steps(order, rank, size, batch_size, accumulate)) for rank in range(size)]
        assert {len(mine) for mine in per_rank} == {steps_per_epoch(n, size, batch_size, accumulate)}
        first = 0
        for parts in zip(*per_rank, strict=True):
            assert len({len(part.batches) for part in parts}) == 1
            (count,) = {part.count for part in parts}
            weighted = [values[b.indices].mean() * b.weight for part in parts for b in part.batches]
            torch.testing.assert_close(sum(weighted) / size, values[order[first : first + count]].mean())
            for batches in zip(*(part.batches for part in parts), strict=True):
                assert all(1 <= len(batch.indices) <= batch_size for batch in batches)
                seen = sorted(i for batch in batches for i in batch.indices[: batch.local_count].tolist())
                assert seen == sorted(order[first : first + len(seen)].tolist())
                first += len(seen)
        assert first == n


@pytest.mark.parametrize("epoch", [0, 1, 5])
def test_order_is_that_of_torch_distributed_sampler(epoch):
    n, size = 12, 3
    for rank in range(size):
        sampler = DistributedSampler(range(n), num_replicas=size, rank=rank, shuffle=True, seed=7)
        sampler.set_epoch(epoch)
        assert epoch_order(n, 7, epoch)[shard(n, rank, size)].tolist() == list(sampler)
