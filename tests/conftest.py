"""For all tests, in whatever process pytest runs."""

import gc
import os
import random
import signal
import sys

import pytest

from hvdtrain.launching import startup
from tests.hidden_gpus import HIDDEN

# Before any test imports torch; what a test starts inherits it.
os.environ.update(HIDDEN)
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # who waits leaves the cores to others: tests run side by side
# What tests import and start is compiled once, and not in each of hundreds of processes.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # under nohup, whose training is to ignore it; tests send it
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# As in a command: what is imported stays, and the collector would examine torch's objects again and again, at the exit, too.
gc.disable()


def pytest_collection_finish():
    startup.freeze()
    gc.enable()


# The files that take longest come first, so that no worker is left with one at the end: those that compute, and those that
# wait for a time limit meanwhile.
FIRST = (
    "e2e/engines/test_parallel.py", "e2e/training/test_programs.py", "single/launching/test_import_timeout.py",
    "e2e/engines/test_engines.py", "single/guards/test_watch.py", "e2e/launch/test_restarts.py",
    "single/launch/test_setup.py", "single/launching/test_local_ranks.py", "e2e/commands/test_mnist.py",
    "e2e/launch/test_hosts.py", "e2e/docs/test_documentation.py",
    "e2e/training/test_guard.py", "e2e/launch/test_start_timeout.py", "e2e/engines/test_horovod_calls.py",
    "single/data/test_input_workers.py", "single/training/test_resume.py", "single/device/test_stand_in.py",
    "single/data/test_images.py", "single/test_bad_files.py",
)  # fmt: skip


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    places = {f"tests/{name}": place for place, name in enumerate(FIRST)}
    # Of a run that may end before all files had their turn. Not of suites that its tests start: there, a file may rely on
    # those before it. tests/horovod_calls/test_calls.py comes first, while all ranks have made as many calls.
    if seed := os.environ.pop("HVDTRAIN_TEST_ORDER", None):
        names = list(dict.fromkeys(item.nodeid.partition("::")[0] for item in items))
        random.Random(seed).shuffle(names)
        places = {name: place for place, name in enumerate(names)}
    items.sort(key=lambda item: places.get(item.nodeid.partition("::")[0], len(FIRST)))
