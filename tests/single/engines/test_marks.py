"""Engines say in which collective the main thread is; the watchdog reads it."""

import pytest
import torch

from hvdtrain.engines.base import collective
from hvdtrain.engines.ddp import DdpEngine
from hvdtrain.engines.horovod import HorovodEngine
from hvdtrain.engines.single import SerialEngine

COLLECTIVES = ("all_reduce_", "all_gather", "broadcast_")


@pytest.mark.parametrize("engine", [HorovodEngine, DdpEngine])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_every_collective_is_marked(engine, name):
    assert hasattr(vars(engine)[name], "__wrapped__")


@pytest.mark.parametrize("name", ["broadcast_model", "synchronize"])
def test_horovods_own_are_marked(name):
    assert hasattr(vars(HorovodEngine)[name], "__wrapped__")


def test_the_mark_has_the_collectives_name_and_goes_with_it():
    seen = []

    class Marked(SerialEngine):
        @collective
        def all_reduce_(self, tensor, op, name):
            seen.append(self.waiting_in)
            if op == "fails":
                raise RuntimeError
            self.broadcast(None, None)
            seen.append(self.waiting_in)

        @collective
        def broadcast(self, model, optimizer):
            seen.append(self.waiting_in)

    engine = Marked(tuning=False, rank=0, size=1, launcher="none")
    assert engine.waiting_in is None
    engine.sum(torch.ones(1), "loss")
    with pytest.raises(RuntimeError):
        engine.all_reduce_(torch.ones(1), "fails", name="late")
    assert seen == ["loss", "broadcast", "loss", "late"]
    assert engine.waiting_in is None
