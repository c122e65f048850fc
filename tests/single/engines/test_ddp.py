"""The ddp engine alone in its engine."""

import contextlib
import socket
import warnings
from pathlib import Path

import pytest
import torch

from hvdtrain.engines import ddp
from hvdtrain.engines.choice import start_engine
from hvdtrain.engines.errors import UserError
from tests.e2e.launchers import free_port
from tests.waiting import wait_for


def threads() -> list[str]:
    names = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it ended meanwhile
            names.append((task / "comm").read_text().strip())
    return names


class Crossed(torch.nn.Module):
    """Uses its layers in another order than it has them, as no guess at the order of gradients expects."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(400, 400) for _ in range(5))  # 0.6 MB each: several buckets

    def forward(self, x):
        for place in (3, 0, 4, 1, 2):
            x = self.layers[place](x)
        return x


def test_gradients_are_reduced_in_the_same_buckets_from_the_first_step_on(monkeypatch):
    """Else a run that continues from a checkpoint sums its first step's gradients in another order, on 3 ranks or more."""
    seen: list[list[int]] = []
    reduce = ddp.GradientHook.reduce

    def recorded(self, state, bucket):
        seen[-1].append([names[parameter] for parameter in bucket.parameters()])
        return reduce(self, state, bucket)

    monkeypatch.setattr(ddp.GradientHook, "reduce", recorded)
    with start_engine("ddp", device="cpu", tuning=False) as engine:
        model = Crossed()
        names = {parameter: number for number, parameter in enumerate(model.parameters())}
        seen.append([])
        replica, optimizer = engine.distribute(model, torch.optim.SGD(model.parameters(), 0.1))
        assert all(parameter.grad is None for parameter in model.parameters())
        engine.broadcast(model, optimizer)
        for _ in range(3):
            seen.append([])
            with engine.micro_batch([replica], [optimizer], 0, 1):
                replica(torch.ones(1, 400)).sum().backward()
        del replica
    assert len(seen[1]) > 1
    # Each gradient is a part of its bucket, to which it is not copied back.
    assert len({parameter.grad.untyped_storage().data_ptr() for parameter in model.parameters()}) == len(seen[1])
    # Each bucket is reduced once it is full, so only their own order may differ.
    assert sorted(seen[1]) == sorted(seen[2]) == sorted(seen[3])


def test_ddp_does_not_warn_of_strides_that_mean_the_same():
    """With one input channel and channels_last images, the gradient of a convolution has other strides than its weight."""
    with start_engine("ddp", device="cpu", tuning=False) as engine, warnings.catch_warnings():
        warnings.simplefilter("error")
        net = torch.nn.Conv2d(1, 16, 5).to(memory_format=torch.channels_last)
        replica, _ = engine.distribute(net, torch.optim.SGD(net.parameters(), 0.1))
        images = torch.ones(4, 1, 8, 8).contiguous(memory_format=torch.channels_last)
        with engine.micro_batch([replica], [], 0, 1):
            replica(images).sum().backward()
        del replica


def test_ranks_that_do_not_come_are_named(monkeypatch):
    monkeypatch.setattr(ddp, "MEETING_SECONDS", 1.0)
    for name, value in dict(RANK="0", WORLD_SIZE="3", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port())).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        UserError, match=r"^the ranks did not meet: rank 1, 2 did not connect within 1 s: check MASTER_"
    ):
        start_engine("ddp", device="cpu")


def test_an_interface_that_is_not_there_is_said_to_be_the_cause(monkeypatch):
    values = dict(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    values["GLOO_SOCKET_IFNAME"] = "none0"
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=r"none0: check GLOO_SOCKET_IFNAME and the network$"):
        start_engine("ddp", device="cpu")


def test_a_group_that_the_program_has_started_is_refused(monkeypatch):
    """Its port was "already in use", with forty lines of torch's."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(UserError, match=r"^the program has called dist.init_process_group: leave it out"):
            start_engine("ddp", device="cpu")
    finally:
        torch.distributed.destroy_process_group()


def test_a_port_whose_program_never_answers_is_not_waited_for_without_a_limit(monkeypatch):
    """torch has no time limit for the first answer: the rank hung."""
    monkeypatch.setattr(ddp, "MEETING_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        for name, value in dict(RANK="1", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)).items():
            monkeypatch.setenv(name, value)
        with pytest.raises(
            UserError, match=rf"^the ranks did not meet: what listens at 127\.0\.0\.1:{port} does not ans"
        ):
            start_engine("ddp", device="cpu")


@pytest.mark.parametrize("address", ["", "all", "10.0.0.1", "10.0.0.1 a port", "10.0.0.1 1 2"])
def test_what_names_no_place_is_one_line(address):
    with pytest.raises(UserError, match="is not where rank 0 listens: another program uses the port of the rendezvous"):
        ddp.join(address, 2)


def test_shutdown_ends_gloos_threads():
    """One that outlives Python's own end may abort the process, after a run that was good."""

    def of_gloo() -> int:
        return sum("gloo" in name for name in threads())

    before = of_gloo()  # of groups that another test has left to the garbage collector
    with start_engine("ddp", device="cpu", tuning=False) as engine:
        model = torch.nn.Linear(3, 2)
        replica, optimizer = engine.distribute(model, torch.optim.SGD(model.parameters(), 0.1))
        engine.broadcast(model, optimizer)
        with engine.micro_batch([replica], [optimizer], 0, 1):
            replica(torch.ones(1, 3)).sum().backward()
        del replica
        assert of_gloo() > before
    # A thread that was joined may stand in /proc a moment longer.
    wait_for(lambda: of_gloo() <= before, threads)


def test_a_rank_whose_rank_0_never_comes_ends_at_its_limit(monkeypatch):
    """torch tries for longer: 211 s in place of 120."""
    monkeypatch.setattr(ddp, "MEETING_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(TimeoutError, match=f"^rank 0 did not listen at 127.0.0.1:{port} within 0 s$"):
        ddp.join(f"127.0.0.1 {port}", 2)
