"""Random numbers that a program draws outside of `step.batches`, and its position: as if it had not been stopped."""

import random
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hvdtrain.checkpoint.own import IN_STEPS, Saved
from hvdtrain.checkpoint.randomness import Generators
from hvdtrain.engines.errors import UserError
from tests.single.training.small import Killed, N, Trained, X, Y, resumed, saving

GENERATORS = {
    "torch": lambda: torch.Generator().manual_seed(4),
    "random": lambda: random.Random(4),
    "numpy": lambda: np.random.default_rng(4),
    "numpy's Philox": lambda: np.random.Generator(np.random.Philox(4)),
    "numpy's RandomState": lambda: np.random.RandomState(4),
}


def drawn(generator) -> float:
    if isinstance(generator, torch.Generator):
        return torch.rand((), generator=generator).item()
    if isinstance(generator, np.random.Generator):  # numpy counts those that are spawned beside the state
        return float(generator.random() + generator.spawn(1)[0].random())
    return float(generator.random()) if hasattr(generator, "random") else float(generator.random_sample())


def all_drawn(own) -> list[float]:
    """A number of each global generator, and of the program's own."""
    return [torch.rand(()).item(), random.random(), float(np.random.rand()), *map(drawn, own.values())]


def program(directory, stop=None, *, epochs=3, data=(X, Y)):
    """Train; return what was drawn at each place, by epoch or step. stop: the place at which it is killed."""
    seen = {}

    def at(t, *place):
        if stop == place:
            raise Killed
        seen[place] = all_drawn(t.own)

    def registered(t):
        t.own = {name.split("'")[0] + str(number): make() for number, (name, make) in enumerate(GENERATORS.items())}
        return t.own

    def tail(t, epoch):
        at(t, "after the steps", epoch)
        with t.run.evaluating(N) as mine:
            t.run.record(loss=(t.model(X[mine]) - Y[mine]).square())
        at(t, "after the evaluation", epoch)

    Trained(
        *saving(stop and stop[1]), out=directory, epochs=epochs, data=data, registered=registered, tail=tail,
        net=lambda: nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1)), before=lambda t: at(t, "before"),
        head=lambda t, epoch: at(t, "head", epoch, round(t.run.epochs_done * N), t.run.progress),
        at_step=lambda t: at(t, "step", t.step.number), each=lambda t: at(t, "updated", t.step.number),
        end=lambda t: at(t, "end"),
    )  # fmt: skip
    return seen


PLACES = [
    ("step", 4), ("updated", 7), ("step", 6), ("after the evaluation", 0), ("step", 11), ("head", 2, 80, 80 / 120),
]  # fmt: skip


@pytest.mark.parametrize(("place", "loader"), [(place, number % 2) for number, place in enumerate(PLACES)], ids=str)
def test_a_resumed_run_draws_the_numbers_of_an_uninterrupted_one(place, loader, tmp_path):
    data = (DataLoader(TensorDataset(X, Y), batch_size=8, shuffle=True),) if loader else (X, Y)
    whole, apart = resumed(partial(program, data=data), tmp_path, place)
    heads = [which for which in apart if which[0] == "head" and which not in whole]  # the one of the resumed epoch
    for head in heads:  # the numbers are those of the head of the epoch, and the position is that of the steps
        assert 0 < (done := head[2] - 40 * head[1]) <= 40, done
        assert head[3] == pytest.approx(head[2] / 120)
        apart[next(other for other in whole if other[:2] == head[:2])] = apart.pop(head)
    assert len(apart) > 5
    assert {where: apart[where] for where in apart} == {where: whole[where] for where in apart}


def test_a_finished_run_started_again_draws_the_same_at_its_end(tmp_path):
    whole = program(tmp_path)
    again = program(tmp_path)
    assert set(again) == {("before",), ("end",)}
    assert again == {where: whole[where] for where in again}


def test_a_run_stopped_in_its_evaluation_goes_on_after_the_steps(tmp_path, monkeypatch):
    whole = program(tmp_path / "whole", epochs=2)
    with monkeypatch.context() as patch:
        patch.setattr("hvdtrain.loop.stopping.Stopping.is_asked_anywhere", lambda self: True)
        program(tmp_path / "apart", epochs=2)  # ends with `Stopped`, which `start` catches
    apart = program(tmp_path / "apart", epochs=2)
    assert ("step", 1) not in apart
    assert {where: apart[where] for where in apart if where[0] != "head"} == {
        where: whole[where] for where in apart if where[0] != "head"
    }


def test_another_object_than_the_generator_is_refused(tmp_path):
    def train(**objects):
        Trained(out=tmp_path, net=nn.Linear(3, 1), epochs=1, registered=lambda t: objects)

    train(rng=np.random.default_rng(1))
    with pytest.raises(
        UserError, match=r"^run.register\(rng=...\): Generator in the checkpoint, Random now: register the"
    ):
        train(rng=random.Random(1))
    with pytest.raises(UserError, match=r"^the checkpoint has no 'other': register the same objects"):
        train(rng=np.random.default_rng(1), other=random.Random(1))
    with pytest.raises(UserError, match=r"got a SystemRandom: it has no state_dict"):
        train(rng=random.SystemRandom())


def of_rank(rank):
    return SimpleNamespace(rank=rank, device=torch.device("cpu"))


def test_on_more_ranks_a_generator_that_all_had_alike_stays_so_and_others_get_other_seeds():
    def first(rank):
        generators = Generators(of_rank(0), 1, print, keeps=True)
        generators.registered = dict(alike=random.Random(7), own=random.Random(rank))
        generators.begin(0)
        generators.begin_epoch()
        return generators

    values = []
    for rank in range(2):
        torch.manual_seed(rank)
        generators = first(rank)
        values.append(generators.state(IN_STEPS))
    numbers, lines = {}, []
    for rank in range(4):
        generators = Generators(of_rank(rank), 1, lines.append, keeps=True)
        generators.registered = dict(alike=random.Random(), own=random.Random())
        generators.load(Saved(values, rank, 4, same=False))
        generators.begin(100)
        numbers[rank] = [generators.registered[name].random() for name in ("alike", "own")] + [torch.rand(()).item()]
        states = [one.getstate() for one in generators.registered.values()]
        generators.begin(200)  # of a second loop over epochs
        assert all(one.getstate() == held for one, held in zip(generators.registered.values(), states, strict=True))
    assert (
        lines[-1]
        == "the checkpoint has own of 2 ranks, each another one: on the other ranks, they begin from new seeds"
    )
    assert len({alike for alike, _, _ in numbers.values()}) == 1
    assert [own for _, own, _ in numbers.values()][:2] == [random.Random(rank).random() for rank in range(2)]
    assert len({own for _, own, _ in numbers.values()}) == 4
    assert len({drawn for _, _, drawn in numbers.values()}) == 4
