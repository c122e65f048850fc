"""What a plain torch program of one process does with the same model, optimizer and data, every engine does on all ranks."""

import decimal
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, SubsetRandomSampler, TensorDataset

from hvdtrain.checkpoint import checkpoint
from hvdtrain.engines.errors import UserError
from hvdtrain.inputs.sharding import epoch_order
from tests.facts import own_states, own_tensors
from tests.parallel.test_loop import N, X, Y, a_run, alike, alone, equals_plain, same, trained
from tests.single.training.small import squares
from tests.twins.models import Saving


@pytest.mark.parametrize("how", ["subset", "batches"])
def test_an_evaluation_uses_the_samples_of_its_sampler(engine, how):
    data = TensorDataset(X, Y)
    batches = DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), 4, False))
    loader = DataLoader(data, 4, sampler=SubsetRandomSampler(range(8, N))) if how == "subset" else batches

    def judge(t):
        with t.run.evaluating(loader) as mine:
            for x, y in mine:
                t.run.record(loss=(t.model(x) - y).square())

    t = trained(engine, epochs=1, end=judge)
    run, net, tested = t.run, t.net, slice(8, N) if how == "subset" else slice(0, N)
    assert run.evaluation["count"] == len(X[tested])
    assert run.evaluation["loss"] == pytest.approx(float((net(X[tested]) - Y[tested]).square().mean()))


def evaluate(t):
    with t.run.evaluating(N) as mine:
        t.run.record(loss=t.model(X[mine]).square())


# ---- optimizers that share out their state


class Shares(torch.optim.SGD):
    """Each rank keeps another state, and then all have the same weights, as with a distributed Muon."""

    def step(self, closure=None):
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["rank"] = torch.tensor(torch.distributed.get_rank())


def zero(parameters):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(parameters, torch.optim.Adam, lr=0.1)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda parameters: Shares(parameters, 0.1), "the state of Shares differs between ranks 0 and 1, and"),
        (zero, "the state of ZeroRedundancyOptimizer cannot be read"),
    ],
)
def test_an_optimizer_that_shares_out_its_state_is_refused_at_the_first_checkpoint(
    engine, make, told, shared_directory
):
    """A checkpoint has rank 0's, with which the others went on: other weights, exit code 0."""
    if engine.size == 1 or engine.name != "ddp":
        pytest.skip("needs two ranks of ddp: these optimizers ask torch.distributed which rank they are")
    steps = []
    with pytest.raises(UserError, match=f"^{told}.*: use one that keeps all"):
        trained(engine, "--checkpoint-steps", "2", out=shared_directory, optimizer=make, data=[X], loss=squares, epochs=1,
                each=lambda t: steps.append(t.step.number))  # fmt: skip
    assert steps == ([1, 2] if make is not zero else [])  # the first checkpoint, or run.prepare


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


class WithBuffers(nn.Module):
    def __init__(self, buffers, persistent=True):
        super().__init__()
        self.body = nn.Linear(3, 1)
        for number, buffer in enumerate(buffers):
            self.register_buffer(f"extra{number}", buffer, persistent=persistent)

    def forward(self, x):
        return self.body(x)


def bits(tensor):
    return tensor.resolve_conj().contiguous().reshape(-1).view(torch.uint8).tolist()


def test_buffers_of_any_kind_are_rank_0s_on_all_ranks_and_come_back(engine, shared_directory):
    def made(start):
        return [kind(torch.arange(6).reshape(2, 3) + start) for kind in KINDS.values()]

    for epochs in (1, 2):  # the second run is resumed
        t = trained(engine, out=shared_directory, epochs=epochs, data=[X], loss=squares, end=evaluate,
                    net=WithBuffers(made(10 * engine.rank if epochs == 1 else 50)))  # fmt: skip
        for kind, buffer, expected in zip(KINDS, t.net.buffers(), made(0), strict=True):
            assert bits(buffer) == bits(expected), kind
        assert t.run.state.epoch == epochs


def test_a_buffer_that_no_state_dict_has_is_rank_0s_too(engine):
    t = trained(engine, net=WithBuffers([torch.full((2,), 1.0 + engine.rank)], persistent=False))
    assert t.net.extra0.tolist() == [1.0, 1.0]


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
    net, everyone = Masked(), []
    mask = net.mask.clone()
    net.norms[2].running_mean.fill_(0.1)  # three times 0.1, divided by three, is another float32

    def end(t):
        before = [t.clone() for t in (net.norms[0].running_var, net.norms[1].running_mean, net.first, net.seen)]
        everyone.extend(engine.all_gather(tensor, "before") for tensor in before)
        evaluate(t)

    trained(engine, net=net, data=[X], loss=squares, epochs=1, end=end)
    assert bits(net.mask) == bits(mask)
    assert bits(net.norms[2].running_mean) == bits(torch.full((3,), 0.1))
    torch.testing.assert_close(net.norms[0].running_var, everyone[0].mean(0))
    torch.testing.assert_close(net.norms[1].running_mean, everyone[1].mean(0))
    assert bits(net.first) == bits(everyone[2][0])
    assert int(net.seen) == int(everyone[3][0])
    said = "warning: the buffer first" + (" and 1 others differ" if len(set(everyone[3].tolist())) > 1 else " differs")
    assert (said in capsys.readouterr().out) == (engine.size > 1 and engine.rank == 0)


def test_statistics_that_are_equal_keep_their_bits_and_those_of_one_rank_alone_are_told(engine, capsys):
    """Three times 0.1, divided by three, is another float32. And torch's update_bn on rank 0 alone counts no other's."""
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3).double().requires_grad_(False).eval())
    net[1].running_mean.fill_(0.1)
    average, own = AveragedModel(nn.Sequential(nn.BatchNorm1d(3))), torch.zeros(3)

    def end(t):
        if engine.rank == 0:
            torch.optim.swa_utils.update_bn(X.split(4), average)
        own.copy_(average.module[0].running_mean)
        with t.run.evaluating(N) as mine:
            t.run.record(loss=X[mine, 0])

    trained(engine, net=net, data=[X], epochs=1, loss=lambda t, x: net[0](x).square().mean(), end=end,
            optimizer=lambda _: torch.optim.SGD(net[0].parameters(), lr=0.1),
            registered=lambda t: dict(average=average))  # fmt: skip
    assert bits(net[1].running_mean) == bits(torch.full((3,), 0.1, dtype=torch.float64))
    of_rank_0 = engine.broadcast_object(bits(own), "own")
    assert engine.all_gather_object(bits(average.module[0].running_mean), "means") == [of_rank_0] * engine.size
    said = "warning: the buffer average.module.0.num_batches_tracked differs between ranks, and rank 0's"
    assert (said in capsys.readouterr().out) == (engine.size > 1 and engine.rank == 0)


def test_buffers_of_a_run_on_other_ranks_are_means_only_if_they_are_statistics(engine, shared_directory):
    """The checkpoint is one of twice as many ranks, whose statistics differ."""
    kept = torch.zeros(0)

    def resumed(t):
        if t.run.flags.epochs == 2:
            assert t.run.state.step > 0
            assert bits(t.net.mask) == bits(Masked().mask)
            assert bits(t.net.first) == bits(kept)
            torch.testing.assert_close(t.net.norms[0].running_mean, torch.full((3,), engine.size - 0.5))

    for epochs in (1, 2):
        t = trained(
            engine, out=shared_directory, epochs=epochs, net=Masked, data=[X], loss=squares, before=resumed,
        )  # fmt: skip
        kept = engine.all_gather(t.net.first, "kept")[0]
        if epochs == 1 and engine.rank == 0:
            path = checkpoint.checkpoints_in(Path(shared_directory) / "checkpoints")[0]
            facts, tensors = checkpoint.read_checkpoint(path)
            states = own_states(tensors) + own_states(tensors)
            for rank, of in enumerate(states):
                of["buffers"]["norms.0.running_mean"].fill_(rank)
            facts["world_size"] = len(states)
            tensors |= own_tensors(states)
            checkpoint.write_checkpoint(path, facts, tensors)
        engine.barrier()


def test_with_local_steps_buffers_are_made_the_same_at_exchanges(engine):
    net = trained(engine, "--sync-every", "2", epochs=1, net=Masked, lr=0.01, data=[X], loss=squares,
                  registered=lambda t: dict(average=AveragedModel(t.net))).net  # fmt: skip
    assert bits(net.mask) == bits(Masked().mask)
    assert engine.all_gather_object(net.first.tolist(), "first") == [net.first.tolist()] * engine.size


class Queue(nn.Module):
    """Keeps samples of its rank, at a position of its own, as MoCo and memory banks do."""

    def __init__(self, rank):
        super().__init__()
        self.body, self.rank = nn.Linear(3, 1), rank
        self.register_buffer("kept", torch.zeros(16, 3))
        self.register_buffer("at", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        if self.training:
            self.kept[(self.at + torch.arange(len(x))) % 16] = x
            self.at.add_(len(x) + self.rank)
        return self.body(x) + self.body(self.kept.clone()).mean()


def test_a_queue_of_each_rank_is_told_without_an_evaluation_and_goes_on_at_its_position(
    engine, shared_directory, capsys
):
    def result(epochs, out=None):
        net = trained(
            engine, out=out, epochs=epochs, net=lambda: Queue(engine.rank), data=[X], loss=squares, seed=5
        ).net
        return bits(net.kept), int(net.at), bits(net.body.weight)

    whole = result(2)
    told = "warning: the buffer kept and 1 others differ between ranks" in capsys.readouterr().out
    assert told == (engine.size > 1 and engine.rank == 0)
    result(1, shared_directory)
    assert result(2, shared_directory) == whole


# ---- models called in any way


class Pairs(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.dim = nn.Linear(3, 3), 7

    def loss(self, x, y):
        return (self.body(x).tanh().sum(1, keepdim=True) * self.dim - y).square().mean()

    def forward(self, x):
        return self.body(x).tanh()


CALLS = {
    "a method": lambda model, raw, x, y: model.loss(x, y),
    "the model as it was made": lambda model, raw, x, y: raw.loss(x, y),
    "that model, called": lambda model, raw, x, y: (raw(x).sum(1, keepdim=True) * raw.dim - y).square().mean(),
    "an attribute": lambda model, raw, x, y: (model(x).sum(1, keepdim=True) * model.dim - y).square().mean(),
    "a layer": lambda model, raw, x, y: (model.body(x).tanh().sum(1, keepdim=True) * 7 - y).square().mean(),
}


@pytest.mark.parametrize("how", CALLS)
def test_a_model_may_be_called_in_any_way(engine, how):
    def loss(t, x, y):
        assert list(t.model.state_dict()) == list(t.net.state_dict())
        return CALLS[how](t.model, t.net, x, y)

    net = trained(engine, net=Pairs, lr=0.01, loss=loss, seed=5).net
    torch.manual_seed(5)
    plain = Pairs()
    alone(plain, torch.optim.SGD(plain.parameters(), lr=0.01), 4 * engine.size, lambda net, i: net.loss(X[i], Y[i]))
    same(net, plain)


def test_a_wrapper_around_a_prepared_model_trains_it(engine):
    """As people put a loss around a model."""

    class Around(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x, y):
            return self.inner.loss(x, y)

    net = trained(engine, net=Pairs, lr=0.01, seed=5, before=lambda t: setattr(t, "around", Around(t.model)),
                  loss=lambda t, x, y: t.around(x, y)).net  # fmt: skip
    assert alike(engine, net)


def test_a_block_that_is_checkpointed_twice_needs_the_other_kind(engine):
    if engine.size == 1 and engine.name == "horovod":
        pytest.skip("one rank of Horovod has no hooks: it trains")
    complaint = "computed twice in a micro-batch: a block that is checkpointed twice needs use_reentrant=False$"
    with pytest.raises(UserError, match=complaint):
        trained(engine, net=Saving(reentrant=True, times=2), data=(torch.ones(N, 4), Y))


def test_the_gradient_of_an_input_may_be_computed_first(engine):
    """Adversarial training: two passes through the model for each batch."""

    def loss_of(net, x, y):
        x = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad((net(x) - y).square().mean(), x)
        return (net(x.detach() + 0.1 * gradient.sign()) - y).square().mean()

    equals_plain(engine, lambda: nn.Linear(3, 1), loss_of)


@pytest.mark.parametrize("models_of", [lambda net: [net], lambda net: net])
@pytest.mark.parametrize("unused", [False, True])
def test_a_part_of_a_model_with_an_optimizer_of_its_own(engine, models_of, unused):
    """DDP's reducer takes the gradients of whole models."""
    torch.manual_seed(5)
    net, plain = (nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)) for _ in range(2))
    plain.load_state_dict(net.state_dict())
    one, two = (torch.optim.SGD(part.parameters(), lr=0.1) for part in net)
    with a_run(engine) as run:
        *_, one, two = run.prepare(*models_of(net), one, two, find_unused_parameters=unused)
        for _ in run.epochs(2):
            for step in run.steps(X, Y):
                for part in (one, two):
                    for x, y in step.batches():
                        step.backward((net(x) - y).square().mean(), part)
                    step.update(part)
    for epoch in range(2):
        for i in epoch_order(N, 1, epoch).split(4 * engine.size):
            for part in plain:
                optimizer = torch.optim.SGD(part.parameters(), lr=0.1)
                plain.zero_grad()
                (plain(X[i]) - Y[i]).square().mean().backward()
                optimizer.step()
    same(net, plain)
    assert alike(engine, net)


def by_one_of(models, x):
    return torch.cat([models[int(row[0] * 10) % len(models)](row).view(1, 1) for row in x])


def in_either_order(models, x):
    one, two = models[:2]
    each = [one(row).sin() + two(row) if row[0] > 0 else two(row) + one(row).sin() for row in x]
    return torch.stack(each)


def tied(models):
    models[1].weight = models[0].weight


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize(
    ("of_models", "change"),
    [(by_one_of, None), (in_either_order, None), (in_either_order, tied)],
    ids=lambda it: it and it.__name__,
)
def test_models_that_ranks_use_in_another_order_or_not_at_all(engine, of_models, change, passes):
    """Under ddp, each rank reduced them in the order of its own backward pass: a hang, or sums of different gradients."""
    torch.manual_seed(5)
    nets, plain = (
        nn.ModuleList(nn.Linear(3, 1) for _ in range(2 if of_models is in_either_order else 6)) for _ in range(2)
    )
    plain.load_state_dict(nets.state_dict())
    for models in (nets, plain) if change else ():
        change(models)
    optimizer = torch.optim.AdamW(nets.parameters(), lr=0.01)
    with a_run(engine, "--accumulate", str(passes), batch_size=4 // passes) as run:
        *_, optimizer = run.prepare(*nets, optimizer, find_unused_parameters=of_models is by_one_of)
        for _ in run.epochs(2):
            for step in run.steps(X, Y):
                for x, y in step.batches():
                    step.backward(F.mse_loss(of_models(nets, x), y))
                step.update()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    alone(plain, optimizer, 4 * engine.size, lambda net, i: F.mse_loss(of_models(net, X[i]), Y[i]))
    same(nets, plain)
    assert alike(engine, nets)


def test_a_model_may_be_frozen_as_a_whole_for_an_epoch(engine):
    """The loss then depends on another tensor that has gradients: an IndexError under ddp with unused parameters."""
    net = nn.Linear(3, 1)
    with a_run(engine, "--accumulate", "2", batch_size=2) as run:
        net, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), find_unused_parameters=True)
        ends = []
        for epoch in run.epochs(3):
            net.requires_grad_(epoch != 1)
            for step in run.steps(X, Y):
                for x, y in step.batches():
                    step.backward(F.mse_loss(net(x.requires_grad_()), y))
                step.update()
            ends.append(net.weight.detach().clone())
    assert torch.equal(*ends[:2])
    assert not torch.equal(*ends[1:])
    assert alike(engine, net)


# ---- losses


@pytest.mark.parametrize("kind", [int, float, torch.tensor])
def test_a_batch_without_a_token_adds_nothing_to_the_recorded_loss(engine, kind):
    """The mean over none is NaN. Here every token of the last rank is masked, if there are several ranks."""
    y = torch.randint(3, (N,), generator=torch.Generator().manual_seed(1))
    masked = y.clone()
    for i in epoch_order(N, 1, 0).split(engine.size):
        masked[i[-1:]] = -100 if engine.size > 1 and len(i) == engine.size else masked[i[-1:]]
    losses = []
    t = trained(engine, "--log-steps", "1", epochs=1, net=nn.Linear(3, 3), lr=0.0, data=(X, masked),
                loss=lambda t, x, labels: F.cross_entropy(t.model(x), labels), each=lambda t: losses.append(t.step.loss),
                count=lambda x, labels: kind(int((labels >= 0).sum())))  # fmt: skip
    net, order = t.net, epoch_order(N, 1, 0).split(4 * engine.size)
    expected = [float(F.cross_entropy(net(X[i]), masked[i])) for i in order]
    assert losses == pytest.approx(expected)
    assert t.run.state.train["loss"] == pytest.approx(expected[-1])


# ---- state that is neither parameter nor buffer


STATES = {
    "tensor": lambda calls: torch.tensor([calls]),
    "number": lambda calls: calls,
    "bytes": lambda calls: bytes([calls]),
    "nested": lambda calls: {"calls": [None, (calls, torch.tensor(calls))]},
}


class Counts(nn.Module):
    """Scales by how often it was called in training, which no parameter or buffer says."""

    def __init__(self, kind, calls):
        super().__init__()
        self.kind, self.calls = kind, calls

    def forward(self, x):
        self.calls += self.training
        return x * (1 + 0.01 * self.calls)

    def get_extra_state(self):
        return STATES[self.kind](self.calls)

    def set_extra_state(self, state):
        if self.kind == "nested":
            state = state["calls"][1][1]
        self.calls = int(state[0] if self.kind in ("tensor", "bytes") else state)


def test_extra_states_of_layers_come_back_as_they_were_on_each_rank(engine, shared_directory):
    def calls(module):
        return [layer.calls for layer in module if isinstance(layer, Counts)]

    def result(end, out=None):
        own, began = 10 * engine.rank, []
        t = trained(
            engine, out=out, epochs=end, data=[X], loss=squares, seed=0,
            optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
            net=lambda: nn.Sequential(nn.Linear(3, 2), *(Counts(kind, own) for kind in STATES), nn.Linear(2, 1)),
            registered=lambda t: dict(averaged=AveragedModel(t.net)), each=lambda t: t.averaged(X),
            before=lambda t: began.extend(calls(t.net)),
        )  # fmt: skip
        return began, calls(t.net), calls(t.averaged.module), t.net[0].weight.tolist()

    _, *whole = result(3)
    _, after_one, *_ = result(1, shared_directory)
    began, *resumed = result(3, shared_directory)
    assert began == after_one
    assert min(began) > 10 * engine.rank
    assert resumed == whole


def test_extra_state_that_a_checkpoint_cannot_store_is_one_line(engine, shared_directory):
    class Odd(nn.Linear):
        def get_extra_state(self):
            return {"when": decimal.Decimal(1)}

        def set_extra_state(self, state):
            pass

    said = "0._extra_state holds a Decimal at .*when.*, which a checkpoint cannot store: let get_extra_state return"
    with pytest.raises(UserError, match=said):
        trained(engine, out=shared_directory, net=nn.Sequential(Odd(3, 1)))
