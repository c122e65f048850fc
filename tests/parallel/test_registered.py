"""What each rank has of its own, in a run that is interrupted and resumed: registered objects, and numbers drawn outside of
`step.batches`."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hvdtrain.checkpoint import checkpoint, contents
from tests.parallel.test_loop import X, a_run
from tests.single.training.small import Killed, kill_at


class Pool:
    """The last rows that this rank has read, whatever their number."""

    def __init__(self):
        self.rows: list[torch.Tensor] = []

    def state_dict(self):
        return {"rows": list(self.rows), "length": len(self.rows)}

    def load_state_dict(self, state):
        self.rows = state["rows"]
        assert len(self.rows) == state["length"]


def train(engine, directory, kill=None):
    """Return what this rank has drawn, by place, what its registered objects hold at the end, and the weights."""
    seen = {}
    with a_run(engine, "--output-dir", str(directory), "--checkpoint-steps", "1", batch_size=2) as run:
        net = nn.Linear(3, 1)
        model, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        own, alike = np.random.default_rng(run.rank), random.Random(3)
        pool, queue = Pool(), nn.Module()
        queue.register_buffer("keys", torch.zeros(4, 3))
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        run.register(own=own, alike=alike, pool=pool, queue=queue, scheduler=scheduler)
        for epoch in run.epochs(2):
            seen["head", epoch] = [
                torch.rand(()).item(), random.random(), np.random.rand(), own.random(), alike.random(),
            ]  # fmt: skip
            for step in run.steps(X):
                scale = torch.rand(()) + alike.random()
                for (x,) in step.batches():
                    if step.batch.count:
                        pool.rows = [*pool.rows, *x][-3:]
                        queue.keys = torch.cat([x, queue.keys])[:4]
                    y = model(scale * torch.stack(pool.rows) + queue.keys.mean(0))
                    step.backward(F.mse_loss(y, torch.ones_like(y)))
                step.update()
                scheduler.step()
                kill_at(kill)(step)
                seen["step", step.number] = [scale.item(), random.random(), np.random.rand(), own.random()]
    return seen, [[row.tolist() for row in pool.rows], queue.keys.tolist()], net.weight.tolist()


@pytest.mark.parametrize("in_epoch", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_each_rank_goes_on_with_what_it_had(in_epoch, engine, shared_directory, capsys):
    whole, held, weights = train(engine, Path(shared_directory, "whole"))
    ranks = engine.all_gather_object(held, "held")
    assert engine.size == 1 or ranks[0] != ranks[1]
    line = "the buffer queue.keys differs between ranks, and each has seen other samples: let it follow the rows of all"
    assert capsys.readouterr().out.count(line) == (engine.size > 1 and engine.rank == 0)
    steps = max(number for place, number in whole if place == "step") // 2
    stop_at = 2 if in_epoch == 1 else steps + 2
    with pytest.raises(Killed):
        train(engine, Path(shared_directory, "apart"), stop_at)
    apart, *resumed = train(engine, Path(shared_directory, "apart"))
    assert resumed == [held, weights]
    assert ("step", 1) not in apart
    assert {place: whole[place] for place in apart} == apart
    assert {place for place in whole if place not in apart} == {
        *(("step", number) for number in range(1, stop_at)),
        *((("head", 0),) if in_epoch == 2 else ()),
    }


def killed(engine, directory, number):
    """Train, and be killed in step `number`. Return the mean at the beginning and when last saved, and what was drawn."""
    with (
        pytest.raises(Killed),
        a_run(engine, "--output-dir", directory, "--checkpoint-steps", "1", batch_size=2) as run,
    ):
        net = nn.BatchNorm1d(3)
        model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        run.register(own=(own := np.random.default_rng(run.rank)), alike=(alike := random.Random(3)))
        for _ in run.epochs(1):
            began, drawn = net.running_mean.tolist(), [torch.rand(()).item(), own.random()]
            for step in run.steps(X):
                drawn_alike = alike.random()
                for (x,) in step.batches():
                    step.backward(model(x).square().mean())
                step.update()
                kill_at(number)(step)
                ended = net.running_mean.tolist()
    return began, ended, drawn, drawn_alike


def test_many_ranks_have_one_state_of_statistics_and_generators(engine, shared_directory, monkeypatch, capsys):
    """Of more than 64 ranks, for which two stand here, so that what a checkpoint gathers does not grow with them."""
    if engine.size == 1:
        pytest.skip("one rank has everything of its own: start this file with mpirun -np 2")
    monkeypatch.setattr("hvdtrain.engines.collectives.MANY", 1)
    _, ended, _, first = killed(engine, shared_directory, 2)
    means = torch.tensor(engine.all_gather_object(ended, "ended"), dtype=torch.float64)
    assert not torch.equal(means[0], means[1])
    if engine.rank == 0:
        _, tensors = checkpoint.read_checkpoint(next(Path(shared_directory).rglob("step-*.safetensors")))
        assert [set(one) for one in contents.decoded(tensors["own"])][:2] == [
            {"common buffers", "common generators"},
            set(),
        ]
    began, _, drawn, second = killed(engine, shared_directory, 3)
    assert began == means.mean(0).float().tolist()
    draws = engine.all_gather_object([drawn, second], "drawn")
    assert len({tuple(own) for own, _ in draws}) == engine.size
    assert {alike for _, alike in draws} == {second} != {first}
    assert ("the mean of running statistics, and no random" in capsys.readouterr().out) == (engine.rank == 0)
