"""What a program does at the head of an epoch counts once, also in an epoch that is resumed."""

import copy
import time
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR

from hvdtrain import training
from hvdtrain.engines.errors import UserError
from hvdtrain.engines.lock import Lock
from tests.single.training.small import (
    Killed,
    Stateful,
    Trained,
    X,
    Y,
    alone,
    flags_for,
    killed,
    network,
    nothing,
    resumed,
    saving,
    squares,
)


def change_all(t):
    """Change the rate, by hand and by a scheduler, a buffer, weights, momentum, and a number of the program's own."""
    for group in t.optimizer.param_groups:
        group["lr"] *= 0.8
    t.scheduler.step()
    t.net.heat.mul_(0.5)
    t.net.weight.data.mul_(0.5)
    t.optimizer.state.clear()
    t.counter.number += 1


def heated():
    net = nn.Linear(3, 1)
    net.register_buffer("heat", torch.ones(()))
    return net


def counted(directory, *argv, **how):
    """Train for three epochs what `change_all` changes."""
    return Trained(
        *argv, out=directory, net=heated, optimizer=lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9), data=[X], epochs=3,
        registered=lambda t: dict(scheduler=ExponentialLR(t.optimizer, 0.5), counter=Stateful(number=0)),
        loss=lambda t, x: (t.model(x) * t.net.heat - t.counter.number).square().mean(), **how,
    )  # fmt: skip


def evaluated(t, loss, stops):
    """Evaluate; where `stops` is true, the run is stopped in it."""
    with t.run.evaluating(len(X)) as mine:
        if stops:
            t.run.stop()
            while not t.run.stopping.watch.stop_reason:
                time.sleep(0.01)
        t.run.record(loss=loss(X[mine]))


def test_a_stop_in_an_evaluation_after_the_loop_keeps_the_random_numbers(tmp_path):
    """What was drawn after the loop was drawn from those of the last epoch's head, when the run went on."""
    drawn = []
    for stops in (True, False):
        end = partial(evaluated, loss=lambda x: x[:, 0], stops=stops)
        t = Trained(out=tmp_path, epochs=1, end=lambda t, end=end: (drawn.append(torch.rand(1).item()), end(t)))
        assert t.run.exit_code == 75 * stops
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize("head", [nothing, lambda t, epoch: t.net.train()])
def test_an_epoch_in_which_the_steps_have_ended_goes_on_with_the_modes_of_its_last_one(head, tmp_path):
    """The rest of it was trained in evaluation mode, which its tail had set."""
    program = partial(Trained, head=head, tail=lambda t, epoch: t.net.eval())
    program(out=tmp_path, steps=3)
    assert torch.equal(program(out=tmp_path, steps=8).weights(), program(steps=8).weights())


@pytest.mark.parametrize("keeps", [True, False])
def test_a_second_loop_begins_with_what_the_program_has_set_before_it(keeps, tmp_path):
    """With checkpoints, it began with the modes of the last one, and what the first loop had begun to train was frozen."""

    def pretrain(run, net):  # it does not see the optimizer
        for epoch in run.epochs(2):
            net[0].requires_grad_(epoch == 1)
            for step in run.steps(X):
                for (x,) in step.batches():
                    step.backward(net(x).square().mean())
                step.update()

    with alone(*(("--output-dir", str(tmp_path)) if keeps else ())) as run:
        net = network()
        net[0].requires_grad_(False)
        net, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        pretrain(run, net)
        net[1].eval()
        for _ in run.epochs(3):
            assert ([one.training for one in net], net[0].weight.requires_grad) == ([True, False, True, True], True)
            for step in run.steps(X):
                for (x,) in step.batches():
                    step.backward(net(x).square().mean())
                step.update()
            optimizer.param_groups[0]["lr"] /= 2


@pytest.mark.filterwarnings("ignore:Detected call of")
def test_the_head_of_a_resumed_epoch_counts_once(tmp_path):
    def program(directory, kill):
        t = counted(directory, *saving(kill), head=lambda t, _: change_all(t), kill=kill)
        state = {name: value.tolist() for name, value in t.net.state_dict().items()}
        return state, t.rate(), t.counter.number, copy.deepcopy(t.scheduler.state_dict())

    whole, apart = resumed(program, tmp_path, 8)
    assert apart == whole


@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.parametrize("stops", [(3,), (4,), (7, 5), (9,), (8, 7, 9)])
def test_what_precedes_an_evaluation_in_which_a_run_stops_counts_once(stops, tmp_path):
    """Each epoch has four, the first before its steps, and changes something before each. stops: the evaluations, counted
    from the beginning of training, in which a run is stopped."""

    def program(directory, number=None):
        states = []

        def evaluate(t, epoch, place):
            change_all(t)
            evaluated(t, lambda x: (t.model(x) - t.counter.number).square().sum(), 4 * epoch + place == number)
            states.append([epoch, place, t.net.weight.tolist(), t.net.heat.item(), t.scheduler.get_last_lr()])

        t = counted(directory, head=lambda t, epoch: evaluate(t, epoch, 1),
                    tail=lambda t, epoch: [evaluate(t, epoch, place) for place in (2, 3, 4)])  # fmt: skip
        return states, t.rate(), t.counter.number, t.run.exit_code

    *whole, code = program(tmp_path / "whole")
    assert code == 0
    for stop in stops:
        assert program(tmp_path / "apart", stop)[-1] == 75
    states, *rest, _ = program(tmp_path / "apart")
    assert rest == whole[1:]
    left = 4 * 3 + 1 - max(stops)  # what is evaluated again before that, has later weights
    assert states[-left:] == whole[0][-left:]


def train_all(net, teacher):
    net.train()
    teacher.train()


def freeze_or_train(net, _):
    net[0].weight.requires_grad_(not net[0].weight.requires_grad)


MODES = {  # what a program does before its loop, at the head of an epoch, after a step, in the tail: to model and teacher
    "forgets train() after an evaluation": (nothing, nothing, nothing, lambda net, teacher: net.eval()),
    "train() at each head": (nothing, lambda net, teacher: net.train(), nothing, lambda net, teacher: net.eval()),
    "toggles at each head": (nothing, lambda net, teacher: net.train(not net.training), nothing, nothing),
    "toggles a part at each step": (nothing, nothing, lambda net, teacher: net[1].train(not net[1].training), nothing),
    "freezes a weight at a head": (nothing, freeze_or_train, nothing, nothing),
    "freezes a weight in a tail": (nothing, nothing, nothing, lambda net, _: net[0].weight.requires_grad_(False)),
    "freezes or trains a weight in each tail": (nothing, nothing, nothing, freeze_or_train),
    "trains a weight from a step on": (freeze_or_train, nothing, freeze_or_train, nothing),
    "a registered teacher before the loop": (lambda net, teacher: teacher.eval(), nothing, nothing, train_all),
}


STOPS = [(6,), (8,), (8, "tail 1"), ("before", "tail 0", "before"), ("after",)]


@pytest.mark.parametrize(
    ("place", "stops"), [(place, STOPS[(number + k) % 5]) for number, place in enumerate(MODES) for k in (0, 2)]
)
def test_a_resumed_run_has_the_modes_of_its_modules(place, stops, tmp_path):
    """stops: the steps at which a run is killed, the first of an epoch or within one, or evaluations in which it is stopped.
    One that has stopped in its last evaluation goes on for an epoch."""
    before, head, after, tail = MODES[place]
    longer = int(stops == ("after",))

    def program(directory, stop=None, epochs=3 + longer):
        losses = {}

        def evaluate(t, name):
            evaluated(t, lambda x: t.model(x).square().sum(), name == stop)

        def each(t):
            after(t.net, t.teacher)
            losses[t.step.number] = t.losses[-1]

        t = Trained(
            *saving(stop), out=directory, lr=0.05, data=[X], epochs=epochs, kill=stop, each=each,
            registered=lambda t: dict(teacher=network()), head=lambda t, _: head(t.net, t.teacher),
            loss=lambda t, x: (t.model(x) - t.teacher(x).detach()).square().mean(),
            before=lambda t: (evaluate(t, "before"), before(t.net, t.teacher)),
            tail=lambda t, epoch: (tail(t.net, t.teacher), evaluate(t, f"tail {epoch}")),
            end=lambda t: (t.net.eval(), evaluate(t, "after")),
        )  # fmt: skip
        return losses, t.net.state_dict(), t.run.exit_code

    losses, weights, _ = program(tmp_path / "whole")
    for stop in stops:
        if isinstance(stop, int):
            killed(program, tmp_path / "apart", stop)
        else:
            assert program(tmp_path / "apart", stop, 3)[-1] == 75
    again, as_resumed, code = program(tmp_path / "apart")
    assert code == 0
    assert again == {number: losses[number] for number in again}
    assert all(torch.equal(value, as_resumed[name]) for name, value in weights.items())


@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.parametrize(
    "head", ["halves the rate", "halves it, and each step lowers it", "sets the rate by the end", "steps a scheduler"]
)
def test_the_head_of_a_resumed_epoch_of_a_longer_run_counts_once(head, tmp_path):
    """A rate that follows the end of the run follows the new one. Others were halved twice."""

    def program(epochs, kill=None):
        rates = {}

        def at_head(t, epoch):
            group = t.optimizer.param_groups[0]
            if "scheduler" in head:
                t.scheduler.step()
            else:
                group["lr"] = 0.8 * (1 - epoch / epochs) if "end" in head else group["lr"] * 0.5

        def each(t):
            rates[t.step.number] = t.rate()
            t.optimizer.param_groups[0]["lr"] *= lowered

        Trained(
            *saving(kill), out=tmp_path, net=nn.Linear(3, 1), lr=0.8, data=[X], loss=squares, epochs=epochs, kill=kill,
            registered=lambda t: dict(scheduler=LambdaLR(t.optimizer, lambda n: 0.5**n)) if "scheduler" in head else {},
            head=at_head, each=each,
        )  # fmt: skip
        return rates

    lowered = 0.9 if "lowers" in head else 1.0
    killed(program, 2, 8)
    each = [0.8, 0.6, 0.4, 0.2] if "end" in head else [0.4, 0.2, 0.1, 0.05]
    assert program(4) == pytest.approx(
        {number: each[(number - 1) // 5] * lowered ** (number - 1) for number in range(8, 21)}
    )


def test_a_scheduler_with_last_epoch_finds_the_initial_rate(tmp_path):
    """KeyError: 'initial_lr'."""

    def scheduled(t):
        return dict(scheduler=LambdaLR(t.optimizer, lambda n: 0.5**n, last_epoch=int(t.run.epochs_done) - 1))

    how = dict(out=tmp_path, net=lambda: nn.Linear(3, 1), data=[X], loss=squares, epochs=3, registered=scheduled)
    how |= dict(tail=lambda t, _: t.scheduler.step())
    killed(Trained, *saving(8), **how, kill=8)
    assert Trained(**how).scheduler.get_last_lr() == [0.0125]


def test_a_copy_of_a_running_run_is_not_locked(tmp_path):
    """Its lock named the process that had the original."""
    for name in ("original", "copy"):
        (tmp_path / name).mkdir()
    original = Lock(tmp_path / "original", 0.0)
    (tmp_path / "copy" / ".lock").write_bytes((tmp_path / "original" / ".lock").read_bytes())
    Lock(tmp_path / "copy", 0.0).release()
    with pytest.raises(TimeoutError):
        Lock(tmp_path / "original", 0.0)
    original.release()


def printing(directory, kill=None):
    """A program that prints the loss of the last step of each epoch."""
    argv = ("--output-dir", str(directory), "--checkpoint-steps", "5")
    with training.start(flags_for(*argv)) as run:
        net = nn.Linear(3, 1)
        model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        for epoch in run.epochs(2):
            for step in run.steps(X, Y):
                for x, y in step.batches():
                    loss = (model(x) - y).square().mean()
                    step.backward(loss)
                step.update()
            if epoch == kill:
                raise Killed
            print(loss.item())


def test_a_variable_of_the_last_step_that_a_resumed_run_lacks_is_said(tmp_path):
    """It was a traceback, at each restart."""
    killed(printing, tmp_path, 1)
    checkpoints = tmp_path / "checkpoints"
    remedy = f"or go on from an earlier checkpoint once: --resume {checkpoints}/step-00000005.safetensors"
    with pytest.raises(UserError, match=f"^loss is not set: the run was resumed after step 10, the last .*{remedy}$"):
        printing(tmp_path)
