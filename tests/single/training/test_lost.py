"""What no checkpoint has, and what an epoch began with: kept to its end after a resume, or said once in a line."""

import copy
import random

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, TensorDataset
from torch.utils.data import WeightedRandomSampler as Weighted

from tests.single.training.small import N, Trained, X, Y, resumed

NUMBERED = TensorDataset(X, Y, torch.arange(N))


class Tally:
    """Counts in tensors, as a metric of torchmetrics does. kept: which of them its state has."""

    def __init__(self, *kept, copies=False):
        self.kept, self.copies = kept, copies
        self.hits, self.rows, self.fixed = torch.zeros(N), [torch.zeros(2)], torch.ones(2)

    def state_dict(self):
        state = {name: getattr(self, name) for name in self.kept}
        return copy.deepcopy(state) if self.copies else state

    def load_state_dict(self, state):
        vars(self).update(state)

    def add(self):
        self.hits, self.rows = self.hits + 1, [*self.rows, torch.ones(2)]


@pytest.mark.parametrize("in_batches", [False, True])
def test_a_resumed_epoch_keeps_its_order_where_the_weights_have_changed_since(in_batches, tmp_path, capsys):
    """Its rest was drawn by newer weights, so that samples came twice."""

    def program(directory, stop):
        order, sampler = {}, Weighted(torch.ones(N), 24)
        batches = {"batch_sampler": BatchSampler(sampler, 8, drop_last=False)}
        loader = DataLoader(NUMBERED, **(batches if in_batches else {"batch_size": 8, "sampler": sampler}))

        def head(t, epoch):
            sampler.weights = (1 / (1 + t.seen.hits)).double()

        def loss(t, x, y, numbers):
            order.setdefault(t.run.state.epoch, []).extend(numbers.tolist())
            t.seen.hits[numbers] += 5
            return (t.model(x) - y).square().mean()

        how = {"registered": lambda t: {"seen": Tally("hits")}, "head": head, "loss": loss, "data": (loader,)}
        Trained("--checkpoint-steps", "1", out=directory, kill=stop, epochs=3, **how)
        return order

    whole, apart = resumed(program, tmp_path, 5)  # the second step of the second epoch
    assert len(apart[1]) in (8, 16)
    assert apart[1] == whole[1][-len(apart[1]) :]
    assert apart[2] == whole[2]
    assert "draws another order than when epoch 2 began: that one is kept to its end" in capsys.readouterr().out


def test_how_often_a_program_evaluates_does_not_change_what_it_draws():
    def drawn_in_steps(evaluates):
        seen = []

        def each(t):
            if t.step.number in evaluates:
                with t.run.evaluating(N):
                    t.run.record(loss=torch.rand(N, 1))

        def draw(*_):
            seen.append([torch.rand(()).item(), random.random(), float(np.random.rand())])

        Trained(at_step=draw, each=each, tail=draw)
        return seen

    assert drawn_in_steps(()) == drawn_in_steps((1, 2, 4, 5, 10))


def test_a_resumed_run_says_that_its_target_was_reached(tmp_path, capsys):
    """With more epochs, it said that training continues, and ended."""

    def tail(t, epoch):
        with t.run.evaluating(N):
            t.run.record(loss=torch.ones(N))

    for epochs in (2, 2, 3):
        capsys.readouterr()
        t = Trained(out=tmp_path, epochs=epochs, stop_at={"loss": 2.0}, metrics={"loss": "min"}, tail=tail)
        assert t.run.state.epoch == 1
    assert capsys.readouterr().out.count("this run has reached its target, and ends: another target continues it") == 1
