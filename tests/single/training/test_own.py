"""What each rank has of its own in a checkpoint: a dictionary for each rank, however many of them a process has."""

import contextlib
import decimal
from collections import Counter, OrderedDict

import pytest
import torch
from torch import nn

from hvdtrain.checkpoint import contents
from hvdtrain.checkpoint.own import OWN, Buffers, ExtraState, Moment, Own, Provider, Saved, Unlike, mean
from hvdtrain.engines.errors import UserError
from hvdtrain.engines.portable import difference_of_values
from hvdtrain.engines.single import SerialEngine

ENGINE = SerialEngine(tuning=False, rank=0, size=1, launcher="")


class Kept(Provider):
    """Has a value for each rank of this process, and keeps what it gets."""

    def __init__(self, *values, only_if_unlike=False):
        self.values, self.only_if_unlike, self.loaded, self.rank = values, only_if_unlike, [], 0

    def state(self, moment):
        return self.values[self.rank]

    def load(self, saved):
        self.loaded.append(saved)


def own_of(count, provider, *, same=False):
    """Return an `Own` of a process that has all of `count` ranks."""
    own = Own(ENGINE, same=same)
    own.ranks, own.count = list(range(count)), count

    @contextlib.contextmanager
    def as_rank(rank):
        provider.rank = rank
        yield

    own.as_rank = as_rank
    return own


def carried(saved, into, count=1, *, same=False):
    """Save what one provider has, load it into another, and return the tensors between."""
    own = own_of(len(saved.values), saved)
    own.add("kept", saved)
    tensors = own.save(Moment())
    other = own_of(count, into, same=same)
    other.restore(tensors)
    other.add("kept", into)
    return tensors


VALUES = [
    {"numbers": [1, 2.5, float("nan")], "text": "a", "none": None},
    OrderedDict(count=Counter("abb"), pair=(torch.arange(3), torch.ones(2, dtype=torch.float16)), raw=b"bytes"),
    [torch.zeros(0), torch.tensor(True), torch.full((2, 2), 1.5, dtype=torch.bfloat16)],
]


def test_each_rank_gets_what_it_had_of_any_type_and_length():
    into = Kept()
    carried(Kept(*VALUES), into, 3)
    assert [one.rank for one in into.loaded] == [0, 1, 2]
    for value, saved in zip(VALUES, into.loaded, strict=True):
        assert saved.goes_on
        assert not difference_of_values(value, saved.state)


@pytest.mark.parametrize(("count", "same"), [(2, False), (4, False), (3, True)])
def test_on_other_ranks_all_are_there_and_each_gets_that_of_rank_0(count, same):
    into = Kept()
    carried(Kept(*VALUES), into, count, same=same)
    for saved in into.loaded:
        assert not saved.goes_on
        assert not difference_of_values(VALUES, saved.states)
        assert not difference_of_values(VALUES[0], saved.state)


class ForAll(Kept):
    """Has one state for all ranks, such as the order of an epoch."""

    def is_common(self, *, many):
        return True

    def common(self, engine, moment):
        return self.values[0]


def test_a_state_for_all_ranks_is_saved_once_and_each_of_them_gets_it():
    """A long order was sent by rank 0 to every rank, in as many rows of its length as there were ranks."""
    tensors = carried(ForAll([1, 2], None, None), into := ForAll(), 2)
    assert [list(one) for one in contents.decoded(tensors[OWN])] == [["common kept"], [], []]
    assert [(saved.state, saved.common, saved.goes_on) for saved in into.loaded] == [([1, 2], True, False)] * 2


@pytest.mark.parametrize(("values", "count"), [((VALUES[2],) * 3, 0), ((VALUES[2], VALUES[2], VALUES[1]), 3)])
def test_what_should_be_alike_is_saved_if_it_is_not(values, count):
    into = Kept()
    carried(Kept(*values, only_if_unlike=True), into, 3)
    assert sum(state is not None for state in into.loaded[0].states) == count
    if count:
        assert not difference_of_values(values[2], into.loaded[2].state)


def test_a_provider_that_the_checkpoint_lacks_gets_none_and_the_read_is_freed():
    into, late = Kept(), Kept(1)
    own = own_of(1, into)
    own.restore(carried(Kept(*VALUES), Kept()))
    own.add("another", into)
    assert into.loaded == [Saved([None] * 3, 0, 1, same=False)]
    own.forget()
    own.add("kept", late)
    assert late.loaded == []


@pytest.mark.parametrize("only_if_unlike", [False, True])
def test_what_cannot_be_saved_is_refused_with_its_place(only_if_unlike):
    own = own_of(2, kept := Kept(1, {"a": [decimal.Decimal(1)]}, only_if_unlike=only_if_unlike))
    own.add("kept", kept)
    with pytest.raises(UserError, match=r"^what a rank has of its own holds a Decimal at \['a'\]\[0\], which a check"):
        own.save(Moment())


def test_the_first_checkpoint_is_read_back(monkeypatch):
    own = own_of(1, kept := Kept([1.5]))
    own.add("kept", kept)
    with monkeypatch.context() as patch:
        patch.setattr("hvdtrain.checkpoint.own.unflattened", lambda packed, row: [1])
        with pytest.raises(UserError, match=r"^what a rank has of its own cannot be restored: \[0\] is a float and"):
            own.save(Moment())
    own.save(Moment())


def test_equal_statistics_keep_their_bits_and_others_are_averaged():
    value = next(one for one in torch.rand(1000) if one.repeat(3).mean() != one)
    assert torch.equal(mean([value] * 3), value)
    assert mean([torch.tensor(1.0, dtype=torch.float16), torch.tensor(2.0, dtype=torch.float16)]) == 1.5
    nets = [nn.Sequential(nn.BatchNorm1d(1)) for _ in range(2)]
    for net in nets:
        net.register_buffer("mask", torch.rand(2))
    states = [dict(Buffers([net]).state(Moment())) for net in nets]
    states[1]["0.running_mean"] = torch.tensor([3.0])
    masks, net = [state["mask"].clone() for state in states], nn.Sequential(nn.BatchNorm1d(1))
    net.register_buffer("mask", torch.zeros(2))
    for rank, ranks, running, mask in ((0, 3, 1.5, 0), (1, 2, 3.0, 1), (0, 2, 0.0, 0)):
        Buffers([net]).load(Saved(states, rank, ranks, same=False))
        assert net[0].running_mean == running
        assert torch.equal(net.mask, masks[mask])
    with pytest.raises(UserError, match=r"^the checkpoint does not match the model: mask is not the same buffer in"):
        Buffers([net[0]]).load(Saved(states, 0, 2, same=False))


class Told(nn.Module):
    def get_extra_state(self):
        return self.told

    def set_extra_state(self, state):
        self.told = state


def test_a_layer_takes_its_own_and_says_what_does_not_match():
    layer, lines, given = Told(), [], []
    layer.told = 1
    saved = [ExtraState(layer).state(Moment()), {"_extra_state": 2}]
    ExtraState(layer).load(Saved(saved, 1, 2, same=False))
    assert layer.told == 2
    ExtraState(layer).load(Saved(saved, 1, 3, same=False))
    assert layer.told == 1
    for state, module, whose in ((saved, nn.Linear(1, 1), "the model"), ([None], layer, "the checkpoint")):
        with pytest.raises(UserError, match=rf"^the checkpoint does not match the model: _extra_state: {whose} lacks"):
            ExtraState(module).load(Saved(state, 0, 1, same=False))
    unlike = Unlike("queue", dict, given.append, lines.append)
    for ranks in (2, 3):
        unlike.load(Saved([1, 2], 1, ranks, same=False))
    unlike.load(Saved([None, None], 1, 2, same=False))
    assert given == [2]
    assert lines == ["each rank had its own queue: on another number of ranks, all begin with rank 0's"]
