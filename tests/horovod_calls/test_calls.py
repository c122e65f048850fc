"""Each kind of collective of `horovod.torch`: it is queued, waited for and returned as without our patches; and bfloat16."""

import math

import pytest
import torch

# bfloat16 is ours (launch/patches/25); float16 has the same code beside it.
TYPES = (torch.int64, torch.float16, torch.bfloat16, torch.float32)


def mine(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return 1, 2, 3 ... times (rank + 1), at most a few hundred."""
    count = torch.arange(1, math.prod(shape) + 1).remainder(7) + 1
    return (count * (rank + 1)).reshape(shape).to(dtype)


def all_of(hvd, *shape: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [mine(rank, *shape, dtype=dtype) for rank in range(hvd.size())]


def same(got: torch.Tensor, expected: torch.Tensor) -> bool:
    return got.dtype == expected.dtype and torch.equal(got, expected)


@pytest.mark.parametrize("dtype", TYPES)
def test_every_type_and_operation(hvd, dtype):
    tensors = torch.stack(all_of(hvd, 17, dtype=dtype))
    x = mine(hvd.rank(), 17, dtype=dtype)
    assert same(hvd.allreduce(x, op=hvd.Sum), tensors.sum(0).to(dtype))
    assert same(hvd.allreduce(x, op=hvd.Sum, prescale_factor=2.0, postscale_factor=2.0), 4 * tensors.sum(0).to(dtype))
    assert same(hvd.broadcast(x, hvd.size() - 1), tensors[-1])
    assert same(hvd.allgather(x), tensors.flatten())
    if dtype != torch.float16:  # which Horovod has no minimum of
        assert same(hvd.allreduce(x, op=hvd.Min), tensors.amin(0))
        assert same(hvd.allreduce(x, op=hvd.Max), tensors.amax(0))
        assert same(hvd.allreduce(x, op=hvd.Product), tensors.prod(0).to(dtype))
    if dtype.is_floating_point:
        relative = 2**-8 if dtype == torch.bfloat16 else 1e-3
        assert torch.allclose(hvd.allreduce(x), tensors.mean(0), rtol=relative)


def test_bfloat16_rounds_to_nearest_even_and_keeps_what_is_not_a_number(hvd):
    if hvd.size() != 2:
        pytest.skip("the sum of more than two is rounded more than once")
    one, other = (torch.randn(4099, generator=torch.Generator().manual_seed(seed)).bfloat16() for seed in (1, 2))
    one[:6] = torch.tensor([1.0, 1.0, float("nan"), float("inf"), -0.0, 3e38])
    other[:6] = torch.tensor([2**-8, 3 * 2**-8, 1.0, float("-inf"), -0.0, 3e38])
    got = hvd.allreduce([one, other][hvd.rank()], op=hvd.Sum)
    assert torch.equal(got.nan_to_num(7.0), (one + other).nan_to_num(7.0))
    assert got[:2].tolist() == [1.0, 1.015625]  # ties: to even, down and up
    assert got.signbit()[4]


def test_every_collective_negotiated_by_name_then_from_the_cache(hvd):
    rank, size = hvd.rank(), hvd.size()
    x, total = mine(rank, 2 * size, 2), sum(all_of(hvd, 2 * size, 2))
    rows = [mine(other, other, 2) for other in range(size)]  # rank 0 has none
    splits = torch.tensor([(rank + 2 * to) % 3 for to in range(size)], dtype=torch.int32)  # some are 0
    sent = torch.cat([torch.full((int(n), 2), float(10 * rank + to)) for to, n in enumerate(splits)])
    received = torch.cat([torch.full(((sender + 2 * rank) % 3, 2), 10.0 * sender + rank) for sender in range(size)])
    at = torch.sparse_coo_tensor(torch.tensor([[0, rank + 1]]), mine(rank, 2, 3), (5, 3))
    for turn in range(3):
        assert same(hvd.allreduce(x, op=hvd.Sum, name="sum"), total), turn
        group = hvd.grouped_allreduce([x, 2 * x], op=hvd.Sum, name="group")
        assert all(map(same, group, (total, 2 * total))), turn
        assert same(hvd.allgather(rows[rank], name="rows"), torch.cat(rows)), turn
        gathered = hvd.grouped_allgather([rows[rank], x], name="gathered")
        assert all(map(same, gathered, (torch.cat(rows), torch.cat(all_of(hvd, 2 * size, 2))))), turn
        assert same(hvd.alltoall(sent, splits=splits, name="split")[0], received), turn
        part = torch.tensor_split(total, size)[rank]
        assert same(hvd.reducescatter(x, op=hvd.Sum, name="part"), part), turn
        assert same(hvd.grouped_reducescatter([x], op=hvd.Sum, name="parts")[0], part), turn
        summed = hvd.sparse_allreduce_async(at, name="sparse", op=hvd.Sum)().to_dense()
        assert summed[0].tolist() == sum(all_of(hvd, 2, 3))[0].tolist(), turn
        assert hvd.broadcast_object({"from": rank}, turn % size, name="object") == {"from": turn % size}
        assert hvd.allgather_object(rank, name="objects") == list(range(size))


def test_a_large_tensor_and_many_small_ones_at_once(hvd):
    n = 300_000
    handles = [hvd.allreduce_async(mine(hvd.rank(), 3) * i, op=hvd.Sum, name=f"many.{i}") for i in range(200)]
    large = hvd.allreduce_async(mine(hvd.rank(), n), op=hvd.Sum, name="large")
    for i in reversed(range(200)):
        assert same(hvd.synchronize(handles[i]), i * sum(all_of(hvd, 3)))
    assert same(hvd.synchronize(large), sum(all_of(hvd, n)))


def test_shapes_that_differ_are_an_error_on_every_rank_and_nothing_hangs(hvd):
    with pytest.raises(hvd.HorovodInternalError, match="Mismatched"):
        hvd.allreduce(torch.ones(2 + hvd.rank()), name="mismatched")
    with pytest.raises(hvd.HorovodInternalError, match="Mismatched data types"):
        hvd.allreduce(torch.ones(2, dtype=TYPES[-2:][hvd.rank() % 2]), name="mismatched")
    for length in (2, 7, 2):
        assert hvd.allreduce(torch.ones(length), op=hvd.Sum, name="mismatched").tolist() == [hvd.size()] * length


def test_a_name_in_use_is_refused(hvd):
    """Each rank has a name that no other has queued yet: its tensor cannot be over before the name comes again.

    Trap: a refused call counts too, in the numbers by which Horovod names unnamed tensors. All ranks have one here. Where
    one rank has more, the next unnamed tensor has another name there, and all wait for ever.
    """
    names = [f"in use.{rank}" for rank in range(hvd.size())]
    x, own = torch.ones(3), names[hvd.rank()]
    handles = {own: hvd.allreduce_async(x, op=hvd.Sum, name=own)}
    with pytest.raises(ValueError, match="same name"):
        hvd.allreduce_async(x, op=hvd.Sum, name=own)
    hvd.barrier()
    handles |= {name: hvd.allreduce_async(x, op=hvd.Sum, name=name) for name in names if name != own}
    for name in names:
        assert hvd.synchronize(handles[name]).tolist() == [hvd.size()] * 3
