"""Each collective of an engine tells the monitor, while it runs, in which one the main thread is."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hvdtrain.engines.ddp import DdpEngine
from hvdtrain.engines.errors import Failure
from hvdtrain.engines.horovod import HorovodEngine
from hvdtrain.engines.single import SerialEngine
from hvdtrain.guards.activity import LAST_CALLED, Activity, collective

CALLS = {
    "loss": lambda engine: engine.all_reduce_(torch.ones(1), "sum", "loss"),
    "hosts": lambda engine: engine.all_gather(torch.ones(1), "hosts"),
    "flags": lambda engine: engine.broadcast_(torch.ones(1), "flags"),
}


class Library:
    """What stands for Horovod or torch.distributed: each call only looks which collective the engine names."""

    Sum = Average = Min = Max = Product = None

    def __init__(self) -> None:
        self.engine: SimpleNamespace | HorovodEngine | DdpEngine = SimpleNamespace(activity=Activity())
        self.seen: list[str | None] = []

    def look(self, tensor: torch.Tensor | None = None, *_, **__):
        self.seen.append(self.engine.activity.collective)
        return tensor

    allreduce_ = allgather = broadcast_ = broadcast_parameters = look


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("kind", [HorovodEngine, DdpEngine])
def test_a_collective_is_named_while_it_runs_and_not_after_it(kind, name, monkeypatch):
    engine, library = kind.__new__(kind), Library()
    engine.size, engine.activity, engine.hvd = 1, Activity(), library
    library.engine = engine
    for call in ("all_reduce", "all_gather", "broadcast"):
        monkeypatch.setattr(torch.distributed, call, library.look)
    CALLS[name](engine)
    assert library.seen == [name]
    assert engine.activity.collective is None


def test_horovods_own_collectives_are_named():
    engine, library = HorovodEngine.__new__(HorovodEngine), Library()
    engine.size, engine.activity, engine.hvd = 1, Activity(), library
    library.engine = engine
    engine.broadcast_model(nn.Linear(1, 1))

    class Optimizer:
        synchronize = library.look

    engine.synchronize(Optimizer)
    assert library.seen == ["broadcast_model", "synchronize"]
    assert engine.activity.collective is None


def test_the_mark_has_the_collectives_name_and_goes_with_it():
    seen = []

    class Marked(SerialEngine):
        @collective
        def all_reduce_(self, tensor, op, name):
            seen.append(self.activity.collective)
            if op == "fails":
                raise RuntimeError
            self.broadcast(None, None)
            seen.append(self.activity.collective)

        @collective
        def broadcast(self, model, optimizer):
            seen.append(self.activity.collective)

    engine = Marked(tuning=False, rank=0, size=1, launcher="none")
    assert engine.activity.collective is None
    engine.sum(torch.ones(1), "loss")
    with pytest.raises(RuntimeError):
        engine.all_reduce_(torch.ones(1), "fails", name="late")
    assert seen == ["loss", "broadcast", "loss", "late"]
    assert engine.activity.collective is None
    assert engine.activity.called == (3, ("loss", "broadcast", "late"))
    for _ in range(100):
        engine.barrier()
    assert engine.activity.called == (203, ("barrier", "broadcast") * (LAST_CALLED // 2))

    class Part(Marked):  # another part may call others
        of_all_ranks = False

    part = Part(tuning=False, rank=0, size=1, launcher="none")
    part.sum(torch.ones(1), "loss")
    assert seen[-3:] == ["loss", "broadcast", "loss"]
    assert part.activity.called == (0, ())


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("Horovod has been shut down. This was caused by an exception", "Horovod has been shut down"),
        ("[/tmp/pair.cc:589] Read error [10.77.0.1]:4013: Reset by peer", "Read error [10.77.0.1]:4013: Reset by peer"),
        ("[/tmp/unbound_buffer.cc:81] Timed out waiting 30000ms", "Timed out waiting 30000ms"),
        ("Mismatched data types: One rank had type float32, but another rank had type int32.", None),
    ],
)
def test_a_lost_connection_is_one_line_and_this_ranks_own(said, why):
    class Broken(SerialEngine):
        @collective
        def all_reduce_(self, tensor, op, name):
            raise RuntimeError(said)

    with pytest.raises(Failure if why else RuntimeError) as caught:
        Broken(tuning=False, rank=0, size=1, launcher="none").sum(torch.ones(1), "loss")
    if why:
        assert not caught.value.everywhere
        assert f"lost in loss ({why}): " in str(caught.value)
