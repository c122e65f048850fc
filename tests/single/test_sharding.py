"""Shards are disjoint, cover the data, and weight their gradients so that the mean over ranks is the mean over samples."""

import pytest
import torch
from torch.utils.data.distributed import DistributedSampler

from hvdtrain.sharding import batches, epoch_order, shard, steps_per_epoch

CASES = [(n, size, batch) for n in (1, 7, 10, 64, 101) for size in (1, 2, 3, 8) if n >= size for batch in (1, 4, 50)]


@pytest.mark.parametrize(("n", "size", "batch_size"), CASES)
def test_every_sample_counts_once_and_every_rank_takes_every_step(n, size, batch_size):
    order = epoch_order(n, seed=3, epoch=2)
    per_rank = [list(batches(order, rank, size, batch_size)) for rank in range(size)]
    assert {len(steps) for steps in per_rank} == {steps_per_epoch(n, size, batch_size)}

    visited = [i for steps in per_rank for batch in steps for i in batch.indices[: batch.local_count].tolist()]
    assert sorted(visited) == list(range(n))

    for step, parts in enumerate(zip(*per_rank, strict=True)):
        assert sum(part.local_count for part in parts) == parts[0].count
        first = step * batch_size * size
        seen = sorted(i for part in parts for i in part.indices[: part.local_count].tolist())
        assert seen == sorted(order[first : first + batch_size * size].tolist())


@pytest.mark.parametrize(("n", "size", "batch_size"), CASES)
def test_mean_over_ranks_of_weighted_means_is_the_mean_over_samples(n, size, batch_size):
    order = epoch_order(n, seed=0, epoch=0)
    values = torch.randn(n, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for step, parts in enumerate(zip(*(batches(order, r, size, batch_size) for r in range(size)), strict=True)):
        over_ranks = sum(values[part.indices].mean() * part.weight for part in parts) / size
        first = step * batch_size * size
        torch.testing.assert_close(over_ranks, values[order[first : first + batch_size * size]].mean())


def test_rank_without_a_sample_still_has_one_to_compute_on():
    parts = [list(batches(epoch_order(10, 0, 0), rank, 3, 3))[-1] for rank in range(3)]
    assert [part.local_count for part in parts] == [1, 0, 0]
    assert [len(part.indices) for part in parts] == [1, 1, 1]
    assert [part.weight for part in parts] == [3.0, 0.0, 0.0]


@pytest.mark.parametrize("epoch", [0, 1, 5])
def test_order_is_that_of_torch_distributed_sampler(epoch):
    n, size = 12, 3
    for rank in range(size):
        sampler = DistributedSampler(range(n), num_replicas=size, rank=rank, shuffle=True, seed=7)
        sampler.set_epoch(epoch)
        assert epoch_order(n, 7, epoch)[shard(n, rank, size)].tolist() == list(sampler)


def test_order_depends_on_the_global_batch_only():
    order = epoch_order(64, 1, 0)
    steps = {}
    for size, batch_size in ((1, 8), (2, 4), (4, 2), (8, 1)):
        ranks = [list(batches(order, rank, size, batch_size)) for rank in range(size)]
        steps[size] = [sorted(i for part in parts for i in part.indices.tolist()) for parts in zip(*ranks, strict=True)]
    assert steps[1] == steps[2] == steps[4] == steps[8]
