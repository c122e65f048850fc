"""Each collective of `horovod.torch` by itself: what it returns, on each rank."""

import math

import pytest
import torch

# Types that can be summed.
TYPES = (torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64)
ALL_TYPES = (torch.uint8, torch.int8, torch.int16, *TYPES)


def mine(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return 1, 2, 3 ... times (rank + 1), at most a few hundred."""
    count = torch.arange(1, math.prod(shape) + 1).remainder(7) + 1
    return (count * (rank + 1)).reshape(shape).to(dtype)


def all_of(hvd, *shape: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [mine(rank, *shape, dtype=dtype) for rank in range(hvd.size())]


def same(got: torch.Tensor, expected: torch.Tensor) -> bool:
    return got.dtype == expected.dtype and torch.equal(got, expected)


# ------------------------------------------------------------------------------------------------------------ allreduce


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(1,), (17,), (3, 5), (2, 3, 4)])
def test_allreduce_sums_every_type(hvd, dtype, shape):
    expected = sum(all_of(hvd, *shape, dtype=dtype))
    assert same(hvd.allreduce(mine(hvd.rank(), *shape, dtype=dtype), op=hvd.Sum), expected)


@pytest.mark.parametrize("dtype", [torch.int32, torch.bfloat16, torch.float32, torch.float64])
def test_allreduce_has_five_operations(hvd, dtype):
    tensors = torch.stack(all_of(hvd, 4, dtype=dtype))
    x = mine(hvd.rank(), 4, dtype=dtype)
    assert same(hvd.allreduce(x, op=hvd.Sum), tensors.sum(0).to(dtype))
    assert same(hvd.allreduce(x, op=hvd.Min), tensors.amin(0))
    assert same(hvd.allreduce(x, op=hvd.Max), tensors.amax(0))
    assert same(hvd.allreduce(x, op=hvd.Product), tensors.prod(0).to(dtype))
    if dtype.is_floating_point:
        relative = 2**-8 if dtype == torch.bfloat16 else 1e-5
        assert torch.allclose(hvd.allreduce(x, op=hvd.Average), tensors.mean(0), rtol=relative)
        assert torch.allclose(hvd.allreduce(x), tensors.mean(0), rtol=relative)  # the default


def test_adasum_of_equal_tensors_is_the_tensor(hvd):
    if not hvd.mpi_enabled() or hvd.size() != 2:
        pytest.skip("Horovod has Adasum over MPI only, on a power of two of ranks")
    assert torch.allclose(hvd.allreduce(torch.ones(5), op=hvd.Adasum), torch.ones(5))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_allreduce_scales_before_and_after(hvd, dtype):
    x, total = mine(hvd.rank(), 6, dtype=dtype), sum(all_of(hvd, 6, dtype=dtype))
    assert same(hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5, postscale_factor=8.0), 4 * total)
    assert same(hvd.grouped_allreduce([x, 2 * x], op=hvd.Sum, prescale_factor=2.0)[1], 4 * total)


def test_allreduce_in_place_changes_its_own_tensor(hvd):
    x, y = mine(hvd.rank(), 6), mine(hvd.rank(), 2, 2)
    before = x.clone()
    assert same(hvd.allreduce(x, op=hvd.Sum), sum(all_of(hvd, 6)))
    assert same(x, before)
    assert hvd.allreduce_(x, op=hvd.Sum) is x
    assert same(x, sum(all_of(hvd, 6)))
    assert hvd.synchronize(hvd.allreduce_async_(y, op=hvd.Sum)) is y
    assert same(y, sum(all_of(hvd, 2, 2)))


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


def test_a_large_tensor_and_many_small_ones_at_once(hvd):
    n = 300_000
    handles = [hvd.allreduce_async(mine(hvd.rank(), 3) * i, op=hvd.Sum, name=f"many.{i}") for i in range(200)]
    large = hvd.allreduce_async(mine(hvd.rank(), n), op=hvd.Sum, name="large")
    for i in reversed(range(200)):
        assert same(hvd.synchronize(handles[i]), i * sum(all_of(hvd, 3)))
    assert same(hvd.synchronize(large), sum(all_of(hvd, n)))


def test_grouped_allreduce(hvd):
    shapes = [(1,), (5,), (2, 3)]
    for turn in range(3):  # negotiated by name, then from the cache
        got = hvd.grouped_allreduce([mine(hvd.rank(), *shape) for shape in shapes], op=hvd.Sum, name="group")
        assert all(same(g, sum(all_of(hvd, *shape))) for g, shape in zip(got, shapes, strict=True)), turn
    tensors = [mine(hvd.rank(), *shape) for shape in shapes]
    got = hvd.grouped_allreduce_(tensors, op=hvd.Sum)
    assert all(g is t and same(t, sum(all_of(hvd, *shape))) for g, t, shape in zip(got, tensors, shapes, strict=True))
    handle = hvd.grouped_allreduce_async([mine(hvd.rank(), 2)], op=hvd.Sum)
    assert same(hvd.synchronize(handle)[0], sum(all_of(hvd, 2)))


def test_a_name_may_come_back_with_another_shape(hvd):
    for length in (4, 4, 7, 4):
        assert same(hvd.allreduce(mine(hvd.rank(), length), op=hvd.Sum, name="resized"), sum(all_of(hvd, length)))


def test_shapes_that_differ_are_an_error_on_every_rank_and_nothing_hangs(hvd):
    with pytest.raises(hvd.HorovodInternalError, match="Mismatched"):
        hvd.allreduce(torch.ones(2 + hvd.rank()), name="mismatched")
    with pytest.raises(hvd.HorovodInternalError, match="Mismatched data types"):
        hvd.allreduce(torch.ones(2, dtype=TYPES[-2:][hvd.rank() % 2]), name="mismatched")
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum, name="mismatched").tolist() == [hvd.size()] * 2


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


def test_gradients_pass_through_collectives(hvd):
    x = torch.ones(3, requires_grad=True)
    (hvd.allreduce(x, op=hvd.Sum) * (hvd.rank() + 1)).sum().backward()
    assert x.grad.tolist() == [sum(range(1, hvd.size() + 1))] * 3
    x = torch.ones(1 + hvd.rank(), requires_grad=True)
    (hvd.allgather(x) * 1.0).sum().backward()
    assert x.grad.tolist() == [1.0] * (1 + hvd.rank())  # the mean over ranks of what each has for it
    x = torch.ones(2, requires_grad=True)
    (hvd.broadcast(x, 0) * 1.0).sum().backward()
    assert x.grad.tolist() == [float(hvd.rank() == 0)] * 2


# ------------------------------------------------------------------------------------- allgather, broadcast, all-to-all


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.float16, torch.float32])
def test_allgather_of_uneven_parts(hvd, dtype):
    for first in (1, 0):  # 0: rank 0 has nothing
        parts = [mine(rank, first + rank, 2, dtype=dtype) for rank in range(hvd.size())]
        assert same(hvd.allgather(parts[hvd.rank()], name=f"uneven.{first}.{dtype}"), torch.cat(parts))


def test_grouped_allgather_of_uneven_parts(hvd):
    def part(rank, number):
        return mine(rank, (rank + number) % 3 + 1, 2)

    for _ in range(2):
        got = hvd.grouped_allgather([part(hvd.rank(), number) for number in range(3)], name="gathered")
        for number in range(3):
            assert same(got[number], torch.cat([part(rank, number) for rank in range(hvd.size())]))
    handle = hvd.grouped_allgather_async([part(hvd.rank(), 0)])
    assert len(hvd.synchronize(handle)[0]) == sum(rank % 3 + 1 for rank in range(hvd.size()))


def test_allgather_object(hvd):
    got = hvd.allgather_object({"rank": hvd.rank()} if hvd.rank() else "x" * 999, name="objects")
    assert got == [
        "x" * 999,
        *({"rank": rank} for rank in range(1, hvd.size())),
    ]


def test_broadcast_from_every_rank(hvd):
    for root in range(hvd.size()):
        for dtype in ALL_TYPES:
            x = mine(hvd.rank(), 2, 3, dtype=dtype)
            assert same(hvd.broadcast(x, root), mine(root, 2, 3, dtype=dtype))
            assert same(x, mine(hvd.rank(), 2, 3, dtype=dtype))
            assert hvd.broadcast_(x, root) is x
            assert same(x, mine(root, 2, 3, dtype=dtype))
        y = mine(hvd.rank(), 5)
        assert same(hvd.synchronize(hvd.broadcast_async(y, root)), mine(root, 5))
        assert hvd.synchronize(hvd.broadcast_async_(y, root)) is y
        assert same(y, mine(root, 5))
        assert hvd.broadcast_object({"from": hvd.rank()}, root) == {"from": root}


def test_alltoall_even_and_with_splits(hvd):
    rank, size = hvd.rank(), hvd.size()
    got = hvd.alltoall(torch.arange(size * 2) + 100 * rank)
    assert got.tolist() == [100 * sender + 2 * rank + i for sender in range(size) for i in range(2)]

    def rows(sender, receiver):
        return (sender + 2 * receiver) % 3  # some are 0

    splits = torch.tensor([rows(rank, receiver) for receiver in range(size)], dtype=torch.int32)
    sent = torch.cat([torch.full((int(n), 2), float(10 * rank + to)) for to, n in enumerate(splits)])
    for turn in range(3):
        got, received = hvd.alltoall(sent, splits=splits, name="split")
        assert received.tolist() == [rows(sender, rank) for sender in range(size)], turn
        assert same(
            got, torch.cat([torch.full((rows(sender, rank), 2), 10.0 * sender + rank) for sender in range(size)])
        )
    got, _ = hvd.synchronize(hvd.alltoall_async(sent, splits=splits))
    assert len(got) == sum(rows(sender, rank) for sender in range(size))


def shares(total: torch.Tensor, hvd) -> torch.Tensor:
    return torch.tensor_split(total, hvd.size())[hvd.rank()]  # the first ranks have a row more


def test_reducescatter_of_even_and_uneven_parts(hvd):
    for n in (2 * hvd.size(), 2 * hvd.size() + 1, 1):
        total = sum(all_of(hvd, n, 2))
        assert same(hvd.reducescatter(mine(hvd.rank(), n, 2), op=hvd.Sum), shares(total, hvd))
        assert torch.allclose(hvd.reducescatter(mine(hvd.rank(), n, 2)), shares(total / hvd.size(), hvd))
        got = hvd.reducescatter(mine(hvd.rank(), n, 2), op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.5)
        assert same(got, shares(total, hvd))
    handle = hvd.reducescatter_async(mine(hvd.rank(), 6), op=hvd.Sum)
    assert same(hvd.synchronize(handle), shares(sum(all_of(hvd, 6)), hvd))


def test_grouped_reducescatter(hvd):
    lengths = (6, 7, 4)
    for _ in range(2):
        got = hvd.grouped_reducescatter([mine(hvd.rank(), n) for n in lengths], op=hvd.Sum, name="scattered")
        assert all(same(g, shares(sum(all_of(hvd, n)), hvd)) for g, n in zip(got, lengths, strict=True))
    handle = hvd.grouped_reducescatter_async([mine(hvd.rank(), 6)], op=hvd.Sum)
    assert same(hvd.synchronize(handle)[0], shares(sum(all_of(hvd, 6)), hvd))


def test_sparse_allreduce(hvd):
    rows = [torch.tensor([[0, rank + 1]]) for rank in range(hvd.size())]  # row 0 is every rank's
    sparse = [torch.sparse_coo_tensor(at, mine(rank, 2, 3), (5, 3)) for rank, at in enumerate(rows)]
    total = sum(tensor.to_dense() for tensor in sparse)
    for _ in range(2):
        wait = hvd.sparse_allreduce_async(sparse[hvd.rank()], name="sparse", op=hvd.Sum)
        assert same(wait().to_dense(), total)
    wait = hvd.sparse_allreduce_async(sparse[hvd.rank()], name="sparse", op=hvd.Average)
    assert torch.allclose(wait().to_dense(), total / hvd.size())


def test_barrier_holds_everyone_until_the_last_has_come(hvd):
    import time

    for late in range(hvd.size()):
        if hvd.rank() == late:
            time.sleep(0.1)
        came = time.monotonic()  # of this host
        hvd.barrier()
        left = time.monotonic()
        times = hvd.allgather_object((came, left))
        assert min(left for _, left in times) >= max(came for came, _ in times)
