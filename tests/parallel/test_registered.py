"""Registered objects of which each rank has its own state: a resumed run goes on with it."""

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


def train(engine, directory, stop_at=0):
    """Return what is registered after so many steps (0: all), and when it was restored; and the last weights."""
    parser = training.parser("test", None, epochs=2, batch_size=2)
    where = ["--output-dir", str(directory), "--checkpoint-steps", "1"]
    flags = parser.parse(["--engine", engine.name, "--no-progress", *where])
    with started(engine, flags, {"loss": Metric("min")}) as run:
        net = nn.Linear(3, 1)
        model, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        pool, queue = Pool(), nn.Module()
        queue.register_buffer("keys", torch.zeros(4, 3))
        run.register(pool=pool, queue=queue, scheduler=scheduler)
        restored = [[row.tolist() for row in pool.rows], queue.keys.tolist()]
        for _ in run.epochs(2):
            for step in run.steps(X):
                for (x,) in step.batches():
                    if step.batch.count:
                        pool.rows = [*pool.rows, *x][-3:]
                        queue.keys = torch.cat([x, queue.keys])[:4]
                    step.backward(
                        F.mse_loss(model(torch.stack(pool.rows) + queue.keys.mean(0)), torch.ones(len(pool.rows), 1))
                    )
                step.update()
                scheduler.step()
                if step.number == stop_at:
                    return [[row.tolist() for row in pool.rows], queue.keys.tolist()], restored, net.weight.tolist()
    return None, restored, net.weight.tolist()


def test_each_rank_goes_on_with_its_own_state_of_a_registered_object(engine, shared_directory):
    _, _, uninterrupted = train(engine, f"{shared_directory}/whole")
    left, _, _ = train(engine, f"{shared_directory}/stopped", stop_at=3)
    _, restored, weights = train(engine, f"{shared_directory}/stopped")
    assert restored == left
    assert weights == uninterrupted
    ranks = engine.all_gather_object(restored, "restored")
    assert engine.size == 1 or ranks[0] != ranks[1]
