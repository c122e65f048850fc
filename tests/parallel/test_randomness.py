"""What each rank draws outside of `step.batches`, in a run that is interrupted and resumed: as in an uninterrupted one."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hvdtrain import training
from hvdtrain.output.metric_names import Metric
from hvdtrain.training.start import started

X = torch.randn(22, 3, generator=torch.Generator().manual_seed(1))


class Interrupted(Exception):
    """What ends a training on every rank, in place of SIGKILL."""


def train(engine, directory, stop_at=0):
    """Return what this rank has drawn, by place, and its last weights."""
    parser = training.parser("test", None, epochs=2, batch_size=2)
    where = ["--output-dir", str(directory), "--checkpoint-steps", "1"]
    flags = parser.parse(["--engine", engine.name, "--no-progress", *where])
    seen = {}
    with started(engine, flags, {"loss": Metric("min")}) as run:
        net = nn.Linear(3, 1)
        model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        own, alike = np.random.default_rng(run.rank), random.Random(3)
        run.register(own=own, alike=alike)
        for epoch in run.epochs(2):
            seen["head", epoch] = [
                torch.rand(()).item(),
                random.random(),
                np.random.rand(),
                own.random(),
                alike.random(),
            ]
            for step in run.steps(X):
                scale = torch.rand(()) + alike.random()
                for (x,) in step.batches():
                    step.backward(F.mse_loss(model(scale * x), x.sum(1, keepdim=True)))
                step.update()
                if step.number == stop_at:
                    raise Interrupted
                seen["step", step.number] = [scale.item(), random.random(), np.random.rand(), own.random()]
    return seen, net.weight.tolist()


@pytest.mark.parametrize("in_epoch", [1, 2])
def test_a_resumed_run_draws_the_same_on_each_rank(in_epoch, engine, shared_directory):
    whole, weights = train(engine, Path(shared_directory, "whole"))
    steps = max(number for place, number in whole if place == "step") // 2
    stop_at = 2 if in_epoch == 1 else steps + 2
    with pytest.raises(Interrupted):
        train(engine, Path(shared_directory, "apart"), stop_at)
    apart, resumed = train(engine, Path(shared_directory, "apart"))
    assert resumed == weights
    assert ("step", 1) not in apart
    assert {place: whole[place] for place in apart} == apart
    assert {place for place in whole if place not in apart} == {
        *(("step", number) for number in range(1, stop_at)),
        *((("head", 0),) if in_epoch == 2 else ()),
    }
