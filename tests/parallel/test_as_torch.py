"""What a plain torch program of one process does with the same model, optimizer and data, every engine does on all ranks."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, SubsetRandomSampler, TensorDataset

from hvdtrain.training import checkpoint
from tests.parallel.test_loop import N, X, Y, a_run, fit


@pytest.mark.parametrize("how", ["subset", "batches"])
def test_an_evaluation_uses_the_samples_of_its_sampler(engine, how):
    data = TensorDataset(X, Y)
    loader = (
        DataLoader(data, 4, sampler=SubsetRandomSampler(range(8, N)))
        if how == "subset"
        else DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), 4, False))
    )
    with a_run(engine, epochs=1) as run:
        net = nn.Linear(3, 1)
        model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        fit(run, [X, Y], lambda step, x, y: (model(x) - y).square().mean())
        with run.evaluating(loader) as mine:
            for x, y in mine:
                run.record(loss=(model(x) - y).square())
    tested = slice(8, N) if how == "subset" else slice(0, N)
    assert run.evaluation["count"] == len(X[tested])
    assert run.evaluation["loss"] == pytest.approx(float((net(X[tested]) - Y[tested]).square().mean()))


# ---- buffers

KINDS = {
    "bool": lambda base: base % 2 == 0,
    "complex": lambda base: torch.polar(torch.ones(2, 3), base.float()),
    "a lazy conjugate": lambda base: torch.polar(torch.ones(2, 3), base.float()).conj(),
    "uint16": lambda base: base.to(torch.uint16),
    "int16": lambda base: base.to(torch.int16),
    "bfloat16": lambda base: base.to(torch.bfloat16),
    "float8": lambda base: base.to(torch.float8_e4m3fn),
    "expanded": lambda base: base[0].float().expand(2, 3),
    "transposed": lambda base: base.float().T,
    "sliced": lambda base: base.float()[:, ::2],
    "empty": lambda base: torch.empty(0),
    "a scalar": lambda base: base[0, 0].float(),
}


class WithBuffer(nn.Module):
    def __init__(self, buffer, persistent=True):
        super().__init__()
        self.body = nn.Linear(3, 1)
        self.register_buffer("extra", buffer, persistent=persistent)

    def forward(self, x):
        return self.body(x)


def bits(tensor):
    return tensor.resolve_conj().contiguous().reshape(-1).view(torch.uint8).tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_a_buffer_of_any_kind_is_rank_0s_on_all_ranks_and_comes_back(engine, kind, shared_directory):
    def made(start):
        return KINDS[kind](torch.arange(6).reshape(2, 3) + start)

    for epochs in (1, 2):  # the second run is resumed
        with a_run(engine, "--output-dir", shared_directory, epochs=epochs) as run:
            net = WithBuffer(made(10 * engine.rank if epochs == 1 else 50))
            model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
            fit(run, [X], lambda step, x, model=model: model(x).square().mean(), epochs=epochs)
            with run.evaluating(N) as mine:
                run.record(loss=model(X[mine]).square())
        assert bits(net.extra) == bits(made(0))
        assert run.state.epoch == epochs


def test_a_buffer_that_no_state_dict_has_is_rank_0s_too(engine):
    with a_run(engine) as run:
        net = WithBuffer(torch.full((2,), 1.0 + engine.rank), persistent=False)
        run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    assert net.extra.tolist() == [1.0, 1.0]


class Norm(nn.Module):
    """Batch norm of another library: it has the buffers of torch's, and is none of its classes."""

    def __init__(self):
        super().__init__()
        self.momentum = 0.5
        self.register_buffer("running_mean", torch.zeros(3))

    def forward(self, x):
        if self.training:
            self.running_mean.lerp_(x.detach().mean(0), self.momentum)
        return x - self.running_mean


class Frozen(Norm):
    """Has another rank's mean, and no momentum: nothing to average."""

    def __init__(self):
        super().__init__()
        del self.momentum

    def forward(self, x):
        return x


class Masked(nn.Module):
    """A network with buffers of each kind: statistics, a mask, and what each rank changes by itself."""

    def __init__(self):
        super().__init__()
        self.norms = nn.Sequential(nn.BatchNorm1d(3), Norm(), Frozen())
        self.body = nn.Linear(3, 1)
        lowest = torch.finfo(torch.float32).min
        self.register_buffer("mask", torch.tensor([lowest, -torch.inf, 0.1]))
        self.register_buffer("first", torch.zeros(3))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        if self.training:
            self.first.copy_(x[0].detach())
            self.seen += len(x)
        return self.body(self.norms(x))


def test_an_evaluation_averages_running_statistics_and_nothing_else(engine, capsys):
    with a_run(engine, epochs=1) as run:
        net = Masked()
        mask = net.mask.clone()
        net.norms[2].running_mean.fill_(0.1)  # three times 0.1, divided by three, is another float32
        model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        fit(run, [X], lambda step, x: model(x).square().mean())
        before = [t.clone() for t in (net.norms[0].running_var, net.norms[1].running_mean, net.first, net.seen)]
        everyone = [engine.all_gather(tensor, "before") for tensor in before]
        with run.evaluating(N) as mine:
            run.record(loss=model(X[mine]).square())
    assert bits(net.mask) == bits(mask)
    assert bits(net.norms[2].running_mean) == bits(torch.full((3,), 0.1))
    torch.testing.assert_close(net.norms[0].running_var, everyone[0].mean(0))
    torch.testing.assert_close(net.norms[1].running_mean, everyone[1].mean(0))
    assert bits(net.first) == bits(everyone[2][0])
    assert int(net.seen) == int(everyone[3][0])
    said = "warning: the buffer first" + (" and 1 others differ" if len(set(everyone[3].tolist())) > 1 else " differs")
    assert (said in capsys.readouterr().out) == (engine.size > 1 and engine.rank == 0)


def test_buffers_of_a_run_on_other_ranks_are_means_only_if_they_are_statistics(engine, shared_directory):
    """The checkpoint is one of twice as many ranks, whose statistics differ."""
    kept = torch.zeros(0)
    for epochs in (1, 2):
        with a_run(engine, "--output-dir", shared_directory, epochs=epochs) as run:
            net = Masked()
            model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
            if epochs == 2:
                assert bits(net.mask) == bits(Masked().mask)
                assert bits(net.first) == bits(kept)
                torch.testing.assert_close(net.norms[0].running_mean, torch.full((3,), engine.size - 0.5))
            fit(run, [X], lambda step, x, model=model: model(x).square().mean(), epochs=epochs)
            kept = engine.all_gather(net.first, "kept")[0]
        if epochs == 1 and engine.rank == 0:
            path = checkpoint.listed(Path(shared_directory) / "checkpoints")[0]
            facts, tensors = checkpoint.read(path)
            tensors["buffers"] = tensors["buffers"].repeat(2, 1)
            tensors["buffers"][:, 6:9] = torch.arange(2.0 * engine.size).unsqueeze(1)
            facts["shapes"]["buffers"] = list(tensors["buffers"].shape)
            facts["world_size"] = 2 * engine.size
            checkpoint.write(path, facts, tensors)
        engine.barrier()


def test_with_local_steps_buffers_are_made_the_same_at_exchanges(engine):
    with a_run(engine, "--sync-every", "2", epochs=1) as run:
        net = Masked()
        mask = net.mask.clone()
        model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.01))
        run.register(average=torch.optim.swa_utils.AveragedModel(net))
        fit(run, [X], lambda step, x: model(x).square().mean())
    assert bits(net.mask) == bits(mask)
    assert engine.all_gather_object(net.first.tolist(), "first") == [net.first.tolist()] * engine.size
