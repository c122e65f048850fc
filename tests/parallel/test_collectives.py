"""Each collective that we use, against arithmetic."""

import pytest
import torch

from hvdtrain.engines import collectives
from hvdtrain.engines.collectives import FIRST_BYTES
from hvdtrain.engines.errors import Failure, UserError
from hvdtrain.engines.modules import running_statistics
from hvdtrain.features import evaluate_only
from hvdtrain.guards.activity import LAST_CALLED
from hvdtrain.loop.gather import gather_rows

SUMMED = [torch.float32, torch.float64, torch.float16, torch.int32, torch.int64]
SENT = [*SUMMED, torch.uint8]  # Horovod refuses to sum bytes


def data(rank: int, dtype: torch.dtype, shape: tuple[int, ...] = (5, 3)) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 + rank)
    return (torch.rand(shape, generator=generator, dtype=torch.float64) * 50).to(dtype)


@pytest.mark.parametrize("dtype", SUMMED, ids=str)
def test_sum(engine, dtype):
    expected = sum(data(rank, torch.float64).to(dtype).double() for rank in range(engine.size)).to(dtype)
    torch.testing.assert_close(engine.sum(data(engine.rank, dtype), "sum"), expected)


def test_sum_leaves_its_input_alone(engine):
    tensor = data(engine.rank, torch.float32)
    engine.sum(tensor, "sum.input")
    assert torch.equal(tensor, data(engine.rank, torch.float32))


@pytest.mark.parametrize("shape", [(), (1,), (4, 2)], ids=str)
def test_all_gather(engine, shape):
    gathered = engine.all_gather(data(engine.rank, torch.float32, shape), "gather")
    assert torch.equal(gathered, torch.stack([data(rank, torch.float32, shape) for rank in range(engine.size)]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint16])
def test_all_gather_of_nothing(engine, dtype):
    for count in (0, 1):  # of every second value: a single one has a stride, with which torch views no bytes
        gathered = engine.all_gather(torch.ones(2 * count, dtype=dtype)[::2], "nothing")
        assert gathered.shape == (engine.size, count)
        assert gathered.dtype is dtype


@pytest.mark.parametrize("dtype", [*SENT, torch.bfloat16], ids=str)
def test_parts_for_each_rank(engine, dtype):
    """Rank r gives each rank a part of 4 (r + 1) numbers."""

    def part(sender: int, receiver: int) -> torch.Tensor:
        return data(10 * sender + receiver, dtype, (4 * (sender + 1),))

    sent = torch.cat([part(engine.rank, rank) for rank in range(engine.size)])
    begun = engine.begin("parts", sent, [4 * (rank + 1) for rank in range(engine.size)], "parts")
    received = engine.end(begun, "parts")
    assert torch.equal(received, torch.cat([part(rank, engine.rank) for rank in range(engine.size)]))


@pytest.mark.parametrize("kind", ["all", "sum"])
def test_collectives_that_overlap(engine, kind):
    sent = [data(engine.rank + number, torch.float64, (5,)) for number in range(3)]
    begun = [engine.begin(kind, one, [], f"{kind} {number}") for number, one in enumerate(sent)]
    for number, one in enumerate(begun):
        everyone = torch.stack([data(rank + number, torch.float64, (5,)) for rank in range(engine.size)])
        expected = everyone.sum(0) if kind == "sum" else everyone.view(-1)
        torch.testing.assert_close(engine.end(one, "overlapping"), expected)


@pytest.mark.parametrize("dtype", SENT, ids=str)
@pytest.mark.parametrize("shape", [(), (3, 2)], ids=str)
def test_broadcast(engine, shape, dtype):
    tensor = data(engine.rank, dtype, shape)
    engine.broadcast_(tensor, "broadcast")
    assert torch.equal(tensor, data(0, dtype, shape))


@pytest.fixture(params=[collectives.MANY, 1], ids=["few", "many"])
def few_and_many(request, monkeypatch):
    """Two ranks stand for many, too, which compare objects before they send them."""
    monkeypatch.setattr(collectives, "MANY", request.param)


@pytest.mark.usefixtures("few_and_many")
@pytest.mark.parametrize("length", [0, 10, 2000])
def test_gather_takes_values_of_any_length(engine, length):
    def of(rank):
        return {"rank": rank, "text": "é" * length * rank, "none": None}

    assert engine.all_gather_object(of(engine.rank), "values") == [of(rank) for rank in range(engine.size)]


@pytest.mark.parametrize("having", [0, -1])
def test_a_list_of_rows_may_be_empty_on_some_ranks(engine, having):
    rows = [torch.ones(1, 2, dtype=torch.float64), torch.zeros(2, 2, dtype=torch.float64)]
    gathered = gather_rows(engine, rows if engine.rank == having % engine.size else [], None)
    assert gathered.dtype is torch.float64
    assert gathered.tolist() == [[1, 1], [0, 0], [0, 0]]
    assert not len(gather_rows(engine, [], None))


@pytest.mark.usefixtures("few_and_many")
def test_gather_takes_values_that_just_have_room(engine):
    """The length of the JSON at the limit of what one collective takes; rank 0's is two bytes shorter."""
    for length in (FIRST_BYTES - 1, FIRST_BYTES, FIRST_BYTES + 1, FIRST_BYTES + 2):
        texts = ["x" * (length - 2 - 2 * (rank == 0)) for rank in range(engine.size)]
        assert engine.all_gather_object(texts[engine.rank], "values") == texts


@pytest.mark.parametrize("length", [3, 2000])
def test_many_ranks_do_not_send_what_is_alike_on_all(engine, length, monkeypatch):
    monkeypatch.setattr(collectives, "MANY", 0)
    sent = []
    for name in ("all_gather", "all_gather_first"):
        gather = getattr(engine, name)
        monkeypatch.setattr(engine, name, lambda tensor, name, gather=gather: sent.append(name) or gather(tensor, name))
    assert engine.all_gather_object(["x" * length], "values") == [["x" * length]] * engine.size
    row = torch.tensor([3, -(2**63)])
    assert torch.equal(engine.all_gather_if_unlike(row, "row"), row.expand(engine.size, 2))
    with engine.raising_together("fine"):
        pass
    engine.require_equal("colour", "red", remedy="paint it")
    assert not sent
    if engine.size > 1:
        row = torch.tensor([engine.rank, 2])
        assert engine.all_gather_if_unlike(row, "row").tolist() == [[rank, 2] for rank in range(engine.size)]
        assert engine.all_gather_object(engine.rank, "values") == [*range(engine.size)]
        assert set(sent) == {"row", "values"}


@pytest.mark.usefixtures("few_and_many")
def test_ranks_that_exchange_different_objects_are_told_where(engine):
    """Under Horovod they would wait, because it compares names, until the watch ends the job."""
    if engine.size == 1 or engine.name != "ddp":
        pytest.skip("needs two ranks of ddp: Horovod compares the names itself")
    last = engine.size - 1
    line = f"rank 0 on .* in one at test_collectives.py:.*, rank {last} on .* in another at test_collectives.py:"
    with pytest.raises(
        Failure, match=rf"^ranks wait in different collectives \({line}.*: all must call the same ones$"
    ):
        engine.all_gather_object("x" * 2000, "another" if engine.rank == last else "one")
    for _ in range(LAST_CALLED):
        assert engine.all_gather_object(engine.rank, "values") == list(range(engine.size))


@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-6), (torch.float64, 1e-14)], ids=str)
def test_the_average_of_statistics_is_the_mean_of_each_and_spares_counters(engine, dtype, near):
    norm = torch.nn.BatchNorm1d(4).to(dtype)
    norm.running_mean.fill_(engine.rank + 1 / 3)
    norm.running_var.fill_(2.0 * engine.rank)
    norm.num_batches_tracked.fill_(7)
    engine.average_(running_statistics([norm]))
    mean = sum(range(engine.size)) / engine.size
    torch.testing.assert_close(norm.running_mean, torch.full((4,), mean + 1 / 3, dtype=dtype), rtol=near, atol=near)
    torch.testing.assert_close(norm.running_var, torch.full((4,), 2 * mean, dtype=dtype))
    assert norm.num_batches_tracked == 7


@pytest.mark.usefixtures("few_and_many")
def test_ranks_that_disagree_are_told_who_differs(engine):
    engine.require_equal("colour", "red", remedy="paint it")
    if engine.size > 1:
        with pytest.raises(UserError, match=r"rank 0 has red, rank 1 has blue: paint it"):
            engine.require_equal("colour", "red" if engine.rank == 0 else "blue", remedy="paint it")


@pytest.mark.usefixtures("few_and_many")
def test_error_on_one_rank_is_raised_on_all_and_named(engine):
    last = engine.size - 1
    with pytest.raises(UserError) as caught, engine.raising_together("one"):
        if engine.rank == last:
            raise UserError("no such directory: make it")
    message = str(caught.value)
    assert message.endswith("no such directory: make it")
    assert message.startswith(f"rank {last} on ") == (engine.size > 1)


@pytest.mark.usefixtures("few_and_many")
def test_error_on_all_ranks_is_said_once_without_a_rank(engine):
    with pytest.raises(UserError) as caught, engine.raising_together("all"):
        raise UserError("bad")
    assert str(caught.value) == "bad"


class NoErrors(Exception):
    """As a validator's, which is a collection: this one counts as false."""

    def __len__(self) -> int:
        return 0


@pytest.mark.usefixtures("few_and_many")
def test_a_bug_on_one_rank_ends_the_others_too(engine):
    last = engine.size - 1
    with pytest.raises(Failure) as failed, engine.raising_together("failure"):
        if engine.rank == last:
            raise Failure("the disk does not answer")
    assert str(failed.value).endswith("the disk does not answer")
    assert failed.value.everywhere
    for bug in (ZeroDivisionError(), NoErrors()):
        with pytest.raises(type(bug) if engine.rank == last else RuntimeError), engine.raising_together("bug"):
            if engine.rank == last:
                raise bug


def test_predictions_come_to_rank_0_in_the_order_of_the_data_in_small_rounds(engine, monkeypatch):
    sent, gather = [], type(engine).all_gather_rows
    noted = lambda engine, rows, *rest: sent.append(rows.nbytes) or gather(engine, rows, *rest)  # noqa: E731
    monkeypatch.setattr(type(engine), "all_gather_rows", noted)
    monkeypatch.setattr(evaluate_only, "ROUND_BYTES", 64)
    predictions = evaluate_only.Predictions(whole=False)
    whole = torch.arange(47).flip(0)
    for indices in whole[engine.rank :: engine.size].split(5):
        predictions.add(indices, {"wide": indices[:, None] * torch.ones(1, 3), "odd": indices % 2 == 1})
    index, values = predictions.of_all(engine)
    expected = torch.arange(47) if engine.rank == 0 else whole[:0]
    assert torch.equal(index, expected)
    assert torch.equal(values["wide"], expected[:, None] * torch.ones(1, 3))
    assert torch.equal(values["odd"], (expected % 2).byte())
    assert max(sent) <= 64 // engine.size
