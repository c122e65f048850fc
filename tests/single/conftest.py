"""What a test trains in this process ends with the test: its time limit for the end (hangs/leaving.py), too."""

import sys

import pytest


@pytest.fixture(autouse=True)
def this_process_works_on():
    yield
    if leaving := sys.modules.get("hvdtrain.hangs.leaving"):
        leaving.stop()


@pytest.fixture
def engine():
    """The engine of one process, as `start` returns it."""
    import torch

    from hvdtrain.engines.single import SerialEngine

    made = SerialEngine(tuning=False, rank=0, size=1, launcher="none")
    made.device = torch.device("cpu")
    return made
