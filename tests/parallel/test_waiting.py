"""Horovod's waiting as our build has it (launch/patches/18 and 19); tests/horovod_calls has late, early and joined ranks."""

import re
import time
from pathlib import Path

import pytest
import torch


@pytest.fixture
def hvd(engine):
    if engine.name != "horovod":
        pytest.skip(f"these call Horovod itself, which {engine.name} has not")
    return engine.hvd


def ones(n: int = 4) -> torch.Tensor:
    return torch.ones(n)


def wakings() -> int:
    """Return how often the threads of this process have slept and were woken."""
    states = [path.read_text() for path in Path("/proc/self/task").glob("*/status")]
    return sum(int(re.search(r"^voluntary_ctxt_switches:\s+(\d+)", state, re.M)[1]) for state in states)


def test_while_nothing_is_queued_no_thread_looks_for_work(engine, hvd):
    hvd.allreduce(ones(), op=hvd.Sum, name="before")
    before = wakings()
    time.sleep(0.3)
    woken = wakings() - before
    hvd.allreduce(ones(), op=hvd.Sum, name="after")  # the others may be asleep still
    assert woken < 200  # looking every 0.1 ms, it would be thousands
