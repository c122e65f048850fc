"""The ddp engine alone in its engine."""

from pathlib import Path

import torch

from hvdtrain.engines.start import start


def threads() -> list[str]:
    return [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]


def test_shutdown_ends_gloos_threads():
    """One that outlives Python's own end may abort the process, after a run that was good."""
    with start("ddp", device="cpu", tuning=False) as engine:
        model = torch.nn.Linear(3, 2)
        replica, optimizer = engine.distribute(model, torch.optim.SGD(model.parameters(), 0.1))
        engine.broadcast(model, optimizer)
        with engine.micro_batch([replica], [optimizer], 0, 1):
            replica(torch.ones(1, 3)).sum().backward()
        del replica
        assert any("gloo" in name for name in threads())
    assert not any("gloo" in name for name in threads())
