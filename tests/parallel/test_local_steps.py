"""--sync-every on every rank: what is equal at exchanges, what stays on a rank, and a run that is stopped and resumed."""

import time
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

from hvdtrain.engines.errors import Failure, UserError
from hvdtrain.inputs.sharding import epoch_order
from tests.parallel.test_loop import N, X, Y, alike, trained
from tests.parallel.test_streams import Share
from tests.single.training.small import killed, nothing

LOCAL = ("--sync-every", "2", "--outer-lr", "0.7", "--outer-momentum", "0.9")
MEANS = ("--sync-every", "100", "--outer-lr", "1", "--outer-momentum", "0")
EPOCHS = 4


def network() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))


def train(engine, *argv, each=nothing, end=nothing) -> list:
    """Train four epochs and return the final state of the model and of this rank's optimizer. Evaluates in steps, too."""

    def after(t):
        t.average.update_parameters(t.net)
        each(t)

    def evaluate(t, epoch):
        with t.run.evaluating(N) as mine:
            t.run.record(loss=F.mse_loss(t.model(X[mine]), Y[mine], reduction="sum"))

    average = partial(AveragedModel, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    t = trained(engine, *argv, epochs=EPOCHS, net=network, optimizer=partial(torch.optim.Adam, lr=0.05), each=after,
                registered=lambda t: dict(average=average(t.net)), tail=evaluate, end=end)  # fmt: skip
    state = [tensor.tolist() for module in (t.net, t.average) for tensor in module.state_dict().values()]
    return [state, [tensor.tolist() for held in t.optimizer.state.values() for _, tensor in sorted(held.items())]]


@pytest.mark.parametrize("wire", ["none", "fp16"])
def test_weights_are_equal_at_exchanges_and_optimizers_are_not(engine, wire):
    different = []

    def look(t):
        weights = engine.all_gather_object(t.net[0].weight.flatten().tolist(), "look")
        different.append(any(one != weights[0] for one in weights))
        before = t.net[0].weight.clone()
        with t.run.evaluating(1):
            evaluated = t.net[0].weight.flatten().tolist()
            t.run.record(loss=0.0, count=1)
        shared = engine.all_gather_object(evaluated, "shared")
        assert shared == [shared[0]] * engine.size
        assert torch.equal(t.net[0].weight, before)  # this rank's own again

    state, optimizers = train(engine, *LOCAL, "--compression", wire, each=look)
    assert all(different) == any(different) == (engine.size > 1)  # within a step, before the exchange
    assert engine.all_gather_object(state, "state") == [state] * engine.size
    if engine.size > 1:
        assert engine.all_gather_object(optimizers, "optimizers") != [optimizers] * engine.size


class Restless(torch.optim.SGD):
    """Changes a setting by what it sees, and keeps a number: each rank has its own, beside the tensors."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            group["seen"] = group.get("seen", 0.0) + float(group["params"][0].grad.sum())
            for parameter in group["params"]:
                self.state[parameter]["steps"] = self.state[parameter].get("steps", 0) + 1


@pytest.mark.parametrize("late", [False, True])
def test_what_an_optimizer_keeps_is_restored_on_each_rank(engine, late, shared_directory):
    """Also numbers, and where rank 0 has no state yet: it has skipped its steps."""
    nan = float("nan") if late and engine.rank == 0 else 1.0

    def start(epochs):
        begun = []  # the settings of groups are restored when training begins
        t = trained(engine, *LOCAL, "--max-skipped", "99", out=shared_directory, epochs=epochs, net=network,
                    optimizer=partial(Restless, lr=0.01, momentum=0.9), at_step=lambda t: begun.append(plain(t)),
                    loss=lambda t, x, y: F.mse_loss(t.model(x), y) * nan)  # fmt: skip
        return begun[0], plain(t)

    (_, end), (resumed, _) = start(1), start(2)
    assert resumed == end
    assert (end["skipped"] > 0) == (late and engine.rank == 0)


class Odd(torch.optim.SGD):
    """Keeps what a checkpoint cannot store."""

    def step(self, closure=None):
        super().step(closure)
        self.param_groups[0]["odd"] = object()


def test_an_optimizer_whose_state_cannot_be_saved_is_told_on_every_rank(engine, shared_directory):
    with pytest.raises(UserError, match=r"^(rank 1 on .*: )?the state of Odd holds a object at .*, which a checkpoint"):
        trained(engine, *LOCAL, out=shared_directory, net=network, optimizer=partial(Odd, lr=0.01))


def plain(t) -> dict:
    held = t.optimizer.state_dict()
    state = {
        f"{index}.{name}": value.tolist() if isinstance(value, torch.Tensor) else value
        for index, entries in held["state"].items()
        for name, value in entries.items()
    }
    return state | held["param_groups"][0] | {"skipped": t.run.state.skipped}


def test_layers_that_are_thawed_while_training_are_exchanged_and_saved(engine, shared_directory):
    """The first checkpoint after it ended the run by a traceback."""

    def thaw(t, epoch):
        t.net[0].requires_grad_(epoch > 0)
        t.net[3].requires_grad_(epoch < 2)

    def fine_tuned(*argv, **how):
        net = network()
        net[0].requires_grad_(False)
        return trained(engine, *LOCAL, *argv, epochs=EPOCHS, net=net, head=thaw, **how)

    whole = fine_tuned()
    killed(fine_tuned, out=shared_directory, kill=whole.run.state.step // 2 + 1)  # in the third of four epochs
    apart = fine_tuned(out=shared_directory)
    assert torch.equal(apart.weights(), whole.weights())
    assert alike(engine, apart.net)


@pytest.mark.parametrize("stop", [1, 4])
def test_a_run_that_was_stopped_anywhere_ends_with_the_same_bits(engine, stop, shared_directory):
    ended = []

    def ask(t):
        if t.step.number == stop and engine.rank == engine.size - 1:
            t.run.stopping.watch.request_stop("the test")
            while not t.run.stopping.watch.stop_reason:  # rank 0 tells all
                time.sleep(0.01)

    def end(t):
        ended.append(t.run.checkpoints.resume.facts["state"]["step"])  # of the checkpoint from which it was resumed

    whole = train(engine, *LOCAL)
    again = (*LOCAL, "--output-dir", shared_directory)
    train(engine, *again, each=ask, end=end)
    assert not ended
    resumed = train(engine, *again, end=end)
    for part, what in enumerate(("weights", "optimizers")):
        assert resumed[part] == whole[part], what
    (step,) = ended
    steps_per_epoch = -(-N // (4 * engine.size))
    assert stop <= step < EPOCHS * steps_per_epoch
    assert step % 2 == 0 or step % steps_per_epoch == 0  # after an exchange


def mean_of_workers(engine, workers):
    """Return the mean over ranks of the weights that a loop of plain torch has for each. workers: of each rank, all ranks of
    its worker."""
    ends = []
    for ranks in workers:
        torch.manual_seed(5)
        alone = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
        for indices in epoch_order(N, 1, 0).split(4 * engine.size):
            mine = torch.cat([indices[rank :: engine.size] for rank in ranks])
            weight = len(mine) * engine.size / len(ranks) / len(indices)  # of the last, uneven step
            optimizer.zero_grad()
            (F.mse_loss(alone(X[mine]), Y[mine]) * weight).backward() if len(mine) else None
            optimizer.step()
        ends.append(alone.weight.detach())
    return torch.stack(ends).mean(0)


def test_one_exchange_is_the_mean_of_what_each_rank_has_learnt(engine):
    """Outer rate 1 without momentum averages the weights."""
    net = trained(engine, *MEANS, epochs=1, seed=5).net
    expected = mean_of_workers(engine, [[rank] for rank in range(engine.size)])
    torch.testing.assert_close(net.weight.detach(), expected, rtol=1e-4, atol=1e-6)


def test_a_parameter_without_a_gradient_is_left_alone_where_that_is_intended(engine):
    """Rank 0 uses one branch, the others another: the shared weights have learnt both."""
    net = nn.ModuleList([nn.Linear(3, 1), nn.Linear(3, 1)])
    before = [layer.weight.clone() for layer in net]
    mine = min(engine.rank, 1)
    t = trained(engine, *LOCAL, epochs=1, net=net, optimizer=torch.optim.Adam, find_unused_parameters=True,
                loss=lambda t, x, y: F.mse_loss(t.model[mine](x), y))  # fmt: skip
    assert net[1 - mine].weight not in t.optimizer.state
    changed = [not torch.equal(layer.weight, old) for layer, old in zip(net, before, strict=True)]
    assert changed == [True, engine.size > 1]


def test_what_is_registered_is_averaged_whatever_the_model_has_let_go(engine):
    """A tensor that is made after another was freed may have its place in memory."""

    def registered(t):
        t.net[1].running_mean = t.net[1].running_mean.clone()  # as load_state_dict(assign=True) does
        own = nn.Module()
        for number in range(100):
            own.register_buffer(f"b{number}", torch.zeros(1))
        return {"own": own}

    def each(t):
        for buffer in t.own.buffers():
            buffer.add_(1 + engine.rank)

    t = trained(engine, *MEANS, net=network, each=each, registered=registered)
    assert engine.all_gather_object(len({float(buffer) for buffer in t.own.buffers()}), "kinds") == [1] * engine.size


def test_a_registered_model_is_averaged_once(engine):
    """Its weights are those of the prepared model: averaged again, they would be rounded again."""
    ends = []
    for registered in (lambda t: {}, lambda t: dict(again=nn.Sequential(t.net))):
        t = trained(engine, *LOCAL, "--compression", "fp16", epochs=1, net=network, registered=registered)
        ends.append([tensor.tolist() for tensor in t.net.state_dict().values()])
    assert ends[0] == ends[1]


@pytest.mark.parametrize("outer", [(1.0, 0.0), (0.5, 0.0), (0.5, 0.9)])
def test_outer_rate_and_momentum_are_those_of_the_shared_weights(engine, outer):
    """Two exchanges, in plain arithmetic: SGD with Nesterov momentum on the mean of the changes."""
    rate, decay = outer
    changes, ends = [], []

    def note(t):
        ends.append(t.net.weight.detach().clone())

    def change(t):
        if t.step.number % 2 == 0:
            changes.append(engine.sum(t.net.weight.detach() - ends[-1], "change") / engine.size)

    trained(engine, "--sync-every", "2", "--outer-lr", str(rate), "--outer-momentum", str(decay), steps=4,
            net=lambda: nn.Linear(3, 1, bias=False), data=[X.repeat(engine.size, 1)], before=note, each=change, end=note,
            at_step=lambda t: note(t) if t.step.number == 3 else None,
            loss=lambda t, x: t.model(x).sin().mean() * (1 + engine.rank))  # fmt: skip
    momentum = torch.zeros_like(ends[0])
    for before, change, after in zip(ends[:-1], changes, ends[1:], strict=True):
        momentum = decay * momentum + change
        torch.testing.assert_close(after, before + rate * (change + decay * momentum), rtol=1e-4, atol=1e-6)


def test_ranks_exchange_after_the_last_step_of_a_stream_too(engine):
    """No step of it knows that it is the last one. Its run ended at the epoch's checkpoint: weights differed."""
    ends, stream = [], DataLoader(Share(engine.rank, engine.size), 4)
    trained(engine, *MEANS, data=[stream], net=lambda: nn.Linear(1, 1), tail=lambda t, _: ends.append(alike(engine, t.net)),
            loss=lambda t, x: (t.model(x) - x).square().mean())  # fmt: skip
    assert ends == [True, True]


def test_weights_that_are_not_finite_are_named(engine):
    def spoil(t):
        if t.step.number == 2 and engine.rank == engine.size - 1:
            with torch.no_grad():
                t.net[0].weight[0] = float("inf")

    said = f"the weights of rank {engine.size - 1}.* are not finite|gradients are not finite"
    with pytest.raises(Failure, match=said):
        train(engine, *LOCAL, each=spoil)
