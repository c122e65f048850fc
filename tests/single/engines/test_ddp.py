"""The ddp engine alone in its engine."""

import contextlib
import time
from pathlib import Path

import torch

from hvdtrain.engines.start import start


def threads() -> list[str]:
    names = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it ended meanwhile
            names.append((task / "comm").read_text().strip())
    return names


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
    until = time.monotonic() + 30  # a thread that was joined may stand in /proc a moment longer
    while any("gloo" in name for name in threads()):
        assert time.monotonic() < until, threads()
        time.sleep(0.01)
