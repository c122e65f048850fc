"""Registered objects of which each rank has its own state: a resumed run goes on with it."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hvdtrain import training
from hvdtrain.output.metric_names import Metric
from hvdtrain.training.start import started

X = torch.randn(22, 3, generator=torch.Generator().manual_seed(1))


class Pool:
    """The last rows that this rank has read, whatever their number."""

    def __init__(self):
        self.rows: list[torch.Tensor] = []

    def state_dict(self):
        return {"rows": list(self.rows), "length": len(self.rows)}

    def load_state_dict(self, state):
        self.rows = state["rows"]
        assert len(self.rows) == state["length"]


class Interrupted(Exception):
    """What ends a training on every rank, in place of SIGKILL."""


def train(engine, directory, stop_at=0):
    """Return what this rank has registered at the end, the weights, and the number of the first step."""
    parser = training.parser("test", None, epochs=2, batch_size=2)
    where = ["--output-dir", str(directory), "--checkpoint-steps", "1"]
    flags = parser.parse(["--engine", engine.name, "--no-progress", *where])
    first = 0
    with started(engine, flags, {"loss": Metric("min")}) as run:
        net = nn.Linear(3, 1)
        model, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        pool, queue = Pool(), nn.Module()
        queue.register_buffer("keys", torch.zeros(4, 3))
        run.register(pool=pool, queue=queue, scheduler=scheduler)
        for _ in run.epochs(2):
            for step in run.steps(X):
                first = first or step.number
                for (x,) in step.batches():
                    if step.batch.count:
                        pool.rows = [*pool.rows, *x][-3:]
                        queue.keys = torch.cat([x, queue.keys])[:4]
                    y = model(torch.stack(pool.rows) + queue.keys.mean(0))
                    step.backward(F.mse_loss(y, torch.ones_like(y)))
                step.update()
                scheduler.step()
                if step.number == stop_at:
                    raise Interrupted
    return [[row.tolist() for row in pool.rows], queue.keys.tolist()], net.weight.tolist(), first


def test_each_rank_goes_on_with_its_own_state_of_a_registered_object(engine, shared_directory):
    held, weights, _ = train(engine, f"{shared_directory}/whole")
    with pytest.raises(Interrupted):
        train(engine, f"{shared_directory}/stopped", stop_at=3)
    again = train(engine, f"{shared_directory}/stopped")
    assert again[0] == held
    assert again[1] == weights
    assert again[2] > 1
    ranks = engine.all_gather_object(held, "held")
    assert engine.size == 1 or ranks[0] != ranks[1]
