"""The order of samples in tar shards: a permutation, the same everywhere, and local to a window of shards."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.datasets.shard_order import ShardOrder, shard_order, window_of
from hvdtrain.inputs.sharding import epoch_order, steps
from tests.single.examples import tried

SIZES = st.lists(st.integers(0, 30), min_size=1, max_size=12).filter(sum)
SEEDS = st.integers(0, 2**62)


def shard_of(sizes: list[int], order: torch.Tensor) -> list[int]:
    return torch.searchsorted(torch.tensor(sizes).cumsum(0), order, right=True).tolist()


@tried(60)
@given(sizes=SIZES, seed=SEEDS, epoch=st.integers(0, 100), window=st.integers(1, 14))
def test_each_sample_once_and_no_shard_outside_its_window(sizes, seed, epoch, window):
    order = shard_order(torch.tensor(sizes), seed, epoch, window)
    assert order.dtype == torch.int64
    assert sorted(order.tolist()) == list(range(sum(sizes)))
    assert torch.equal(order, shard_order(torch.tensor(sizes), seed, epoch, window))
    # Between the first and the last sample of a shard there are those of at most `window` shards.
    shards = shard_of(sizes, order)
    for shard in set(shards):
        first = shards.index(shard)
        last = len(shards) - 1 - shards[::-1].index(shard)
        assert len(set(shards[first : last + 1])) <= window


@tried(40)
@given(
    sizes=SIZES, seed=SEEDS, per_step=st.sampled_from([24, 48]), done=st.integers(0, 10), data=st.data(),
)  # fmt: skip
def test_any_ranks_take_the_same_samples_in_each_step_also_from_the_middle(sizes, seed, per_step, done, data):
    """What `done` steps of some ranks left is what other ranks go on with: nothing lost, nothing twice."""
    order = ShardOrder(torch.tensor(sizes), window=2)(seed, 3)
    before, after = (data.draw(st.tuples(st.sampled_from([1, 2, 3]), st.sampled_from([1, 2, 4]))) for _ in range(2))

    def taken(how: tuple[int, int], rest: torch.Tensor) -> list[list[int]]:
        ranks, accumulate = how
        batch_size = per_step // (ranks * accumulate)
        parts = [list(steps(rest, rank, ranks, batch_size, accumulate)) for rank in range(ranks)]
        return [
            sorted(i for step in each for batch in step.batches for i in batch.indices[: batch.local_count].tolist())
            for each in zip(*parts, strict=True)
        ]

    whole = taken(before, order)
    assert whole == [sorted(some.tolist()) for some in order.split(per_step)]
    assert whole[:done] + taken(after, order[done * per_step :]) == whole


def test_one_window_of_all_shards_is_the_order_of_a_folder():
    assert torch.equal(shard_order(torch.tensor([5, 0, 7]), 3, 2, 3), epoch_order(12, 3, 2))


def test_epochs_and_seeds_differ_in_shards_and_samples():
    sizes = [20] * 10
    orders = [shard_order(torch.tensor(sizes), seed, epoch, 1) for seed, epoch in ((1, 0), (1, 1), (2, 5))]
    by_shard = [tuple(dict.fromkeys(shard_of(sizes, order))) for order in orders]
    assert len(set(by_shard)) == 3
    inside = [tuple((order[order < 20]).tolist()) for order in orders]  # of the first shard
    assert len(set(inside)) == 3


def test_every_place_of_a_window_is_equally_likely():
    """The mean place of a sample over many epochs: in a window of two shards of two, 0 to 3."""
    places = torch.stack([shard_order(torch.tensor([2, 2, 2, 2]), 0, epoch, 2).argsort() % 4 for epoch in range(2000)])
    deviation = (5 / 4) ** 0.5 / 2000**0.5
    assert ((places.double().mean(0) - 1.5).abs() < 5 * deviation).all()


@pytest.mark.parametrize(("sizes", "window"), [([1000] * 3, 17), ([10_000] * 3, 16), ([100] * 500, 164), ([0], 2**14)])
def test_a_window_has_shards_and_samples_enough(sizes, window):
    assert window_of(torch.tensor(sizes)) == window


def test_a_window_of_nothing_is_refused():
    with pytest.raises(ValueError, match="a window of 0 shards"):
        shard_order(torch.tensor([3]), 1, 0, 0)
