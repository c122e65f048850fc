"""Horovod's waiting as our build has it (launch/patches/18 and 19): ranks that are late, early, out of order, or done."""

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


def test_tensors_queued_in_another_order_on_each_rank(engine, hvd):
    names = [f"order.{number}" for number in range(6)]
    for turn in range(3):  # the first is negotiated by name, the others by the cache
        mine = names[engine.rank :] + names[: engine.rank]
        handles = {name: hvd.allreduce_async(ones() * int(name[-1]), op=hvd.Sum, name=name) for name in mine}
        for name in names:
            assert hvd.synchronize(handles[name]).tolist() == [engine.size * int(name[-1])] * 4, (turn, name)


def test_ranks_that_joined_take_part_without_queueing(engine, hvd):
    for step in range(1 + engine.rank):
        present = engine.size - step  # ranks 0 .. step - 1 have joined, and count as zeros
        assert hvd.allreduce(ones(), op=hvd.Sum, name=f"uneven.{step}").tolist() == [present] * 4
    assert hvd.join() == engine.size - 1


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
