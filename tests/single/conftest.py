"""What a test trains in this process ends with the test: its time limit for the end (guards/limits.py), and its core."""

import contextlib
import os
import sys
from multiprocessing import forkserver

import pytest

from hvdtrain.launching import processes


@pytest.fixture(autouse=True)
def this_process_works_on():
    cores = os.sched_getaffinity(0)
    yield
    if os.sched_getaffinity(0) != cores:  # a rank beside more ranks than cores stays on one (engines/cores.py)
        for thread in processes.own_threads():
            with contextlib.suppress(OSError):  # it has ended
                os.sched_setaffinity(thread, cores)
    if limits := sys.modules.get("hvdtrain.guards.limits"):
        limits.stop()


@pytest.fixture(autouse=True)
def workers_only_of_the_server(request, monkeypatch):
    """A test that starts DataLoader workers fails without `worker_server`, whichever tests came before it."""

    def refuse(*_):
        pytest.fail(f"{request.node.name} starts DataLoader workers: give it the fixture worker_server")

    if "worker_server" not in request.fixturenames:
        for name in ("ensure_running", "connect_to_new_process"):
            monkeypatch.setattr(forkserver, name, refuse)


@pytest.fixture(scope="session")
def worker_server():
    """The server that forks DataLoader workers has imported what they need, which is seconds of a processor for each.

    The first server of a process is that of all its later tests, so each file with workers asks for this one.
    """
    from hvdtrain.inputs import loading

    loading.start_workers_early(["pytest", "hvdtrain.training", "tests.single.training.small"])


@pytest.fixture
def engine():
    """The engine of one process, as `start` returns it."""
    import torch

    from hvdtrain.engines.single import SerialEngine

    made = SerialEngine(tuning=False, rank=0, size=1, launcher="none")
    made.device = torch.device("cpu")
    return made
