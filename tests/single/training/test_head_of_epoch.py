"""What a program does at the head of an epoch counts once, also in an epoch that is resumed."""

import copy
import time

import pytest
import torch
from torch import nn

from hvdtrain import training
from hvdtrain.engines.lock import Lock
from tests.single.training.small import Killed, X, flags_for, network


class Counter:
    number = 0

    def state_dict(self):
        return {"number": self.number}

    def load_state_dict(self, state):
        self.number = state["number"]


def halve_rate(net, optimizer, scheduler, counter):
    for group in optimizer.param_groups:
        group["lr"] *= 0.5


HEADS = {
    "rate": halve_rate,
    "scheduler": lambda net, optimizer, scheduler, counter: scheduler.step(),
    "buffer": lambda net, optimizer, scheduler, counter: net.heat.mul_(0.5),
    "weights": lambda net, optimizer, scheduler, counter: net.weight.data.mul_(0.5),
    "momentum": lambda net, optimizer, scheduler, counter: optimizer.state.clear(),
    "counter": lambda net, optimizer, scheduler, counter: setattr(counter, "number", counter.number + 1),
}


@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.parametrize("head", HEADS)
def test_the_head_of_a_resumed_epoch_counts_once(head, tmp_path):
    def program(directory, stop=None):
        with training.start(flags_for("--output-dir", str(directory), "--checkpoint-steps", "1", epochs=3)) as run:
            net, counter = nn.Linear(3, 1), Counter()
            net.register_buffer("heat", torch.ones(()))
            model, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9))
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
            run.register(scheduler=scheduler, counter=counter)
            for _ in run.epochs(3):
                HEADS[head](net, optimizer, scheduler, counter)
                for step in run.steps(X):
                    for (x,) in step.batches():
                        step.backward((model(x) * net.heat - counter.number).square().mean())
                    step.update()
                    if step.number == stop:
                        raise Killed
        state = {name: value.tolist() for name, value in net.state_dict().items()}
        return state, optimizer.param_groups[0]["lr"], counter.number, copy.deepcopy(scheduler.state_dict())

    whole = program(tmp_path / "whole")
    with pytest.raises(Killed):
        program(tmp_path / "apart", 8)
    assert program(tmp_path / "apart") == whole


@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("stops", [(3,), (4,), (7, 5), (9,), (8, 7, 9)])
def test_what_precedes_an_evaluation_in_which_a_run_stops_counts_once(head, stops, tmp_path):
    """Each epoch has four, the first before its steps, and changes something before each. stops: the evaluations, counted
    from the beginning of training, in which a run is stopped."""

    def program(directory, number=None):
        states = []
        with training.start(flags_for("--output-dir", str(directory), epochs=3)) as run:
            net, counter = nn.Linear(3, 1), Counter()
            net.register_buffer("heat", torch.ones(()))
            model, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9))
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
            run.register(scheduler=scheduler, counter=counter)

            def evaluate(epoch, place):
                HEADS[head](net, optimizer, scheduler, counter)
                with run.evaluating(len(X)) as mine:
                    if 4 * epoch + place == number:
                        run.stop()
                        while not run.stopping.watch.stop_reason:
                            time.sleep(0.01)
                    run.record(loss=(model(X[mine]) - counter.number).square().sum())
                states.append([epoch, place, net.weight.tolist(), net.heat.item(), scheduler.get_last_lr()])

            for epoch in run.epochs(3):
                evaluate(epoch, 1)
                for step in run.steps(X):
                    for (x,) in step.batches():
                        step.backward((model(x) * net.heat - counter.number).square().mean())
                    step.update()
                for place in (2, 3, 4):
                    evaluate(epoch, place)
        return states, optimizer.param_groups[0]["lr"], counter.number, run.exit_code

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


MODES = {  # what a program does before its loop, at the head of an epoch, after a step, in the tail: to model and teacher
    "forgets train() after an evaluation": (None, None, None, lambda net, teacher: net.eval()),
    "train() at each head": (None, lambda net, teacher: net.train(), None, lambda net, teacher: net.eval()),
    "toggles at each head": (None, lambda net, teacher: net.train(not net.training), None, None),
    "toggles a part at each step": (None, None, lambda net, teacher: net[1].train(not net[1].training), None),
    "a registered teacher before the loop": (lambda net, teacher: teacher.eval(), None, None, train_all),
}


@pytest.mark.parametrize("place", MODES)
@pytest.mark.parametrize("stops", [(6,), (8,), (8, "tail 1"), ("before", "tail 0", "before"), ("after",)])
def test_a_resumed_run_has_the_modes_of_its_modules(place, stops, tmp_path):
    """stops: the steps at which a run is killed, the first of an epoch or within one, or evaluations in which it is stopped.
    One that has stopped in its last evaluation goes on for an epoch."""
    before, head, after, tail = (call or (lambda net, teacher: None) for call in MODES[place])
    longer = int(stops == ("after",))

    def program(directory, stop=None, epochs=3 + longer):
        losses = {}
        with training.start(flags_for("--output-dir", str(directory), "--checkpoint-steps", "1", epochs=epochs)) as run:
            net, teacher = network(), network()
            model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.05))
            run.register(teacher=teacher)

            def evaluate(name):
                with run.evaluating(len(X)) as mine:
                    if name == stop:
                        run.stop()
                        while not run.stopping.watch.stop_reason:
                            time.sleep(0.01)
                    run.record(loss=model(X[mine]).square().sum())

            evaluate("before")
            before(net, teacher)
            for epoch in run.epochs(epochs):
                head(net, teacher)
                for step in run.steps(X):
                    for (x,) in step.batches():
                        step.backward(loss := (model(x) - teacher(x).detach()).square().mean())
                    step.update()
                    after(net, teacher)
                    losses[step.number] = loss.item()
                    if step.number == stop:
                        raise Killed
                tail(net, teacher)
                evaluate(f"tail {epoch}")
            net.eval()
            evaluate("after")
        return losses, net.state_dict(), run.exit_code

    losses, weights, _ = program(tmp_path / "whole")
    for stop in stops:
        if isinstance(stop, int):
            with pytest.raises(Killed):
                program(tmp_path / "apart", stop)
        else:
            assert program(tmp_path / "apart", stop, 3)[-1] == 75
    resumed, as_resumed, code = program(tmp_path / "apart")
    assert code == 0
    assert resumed == {number: losses[number] for number in resumed}
    assert all(torch.equal(value, as_resumed[name]) for name, value in weights.items())


@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.parametrize("head", ["halves the rate", "sets the rate by the end", "steps a scheduler"])
def test_the_head_of_a_resumed_epoch_of_a_longer_run_counts_once(head, tmp_path):
    """A rate that follows the end of the run follows the new one. Others were halved twice."""

    def program(epochs, stop=None):
        rates = {}
        with training.start(flags_for("--output-dir", str(tmp_path), "--checkpoint-steps", "1", epochs=epochs)) as run:
            net = nn.Linear(3, 1)
            model, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.8))
            if head == "steps a scheduler":
                run.register(scheduler=(scheduler := torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.5**n)))
            for epoch in run.epochs(epochs):
                if head == "steps a scheduler":
                    scheduler.step()
                else:
                    group = optimizer.param_groups[0]
                    group["lr"] = 0.8 * (1 - epoch / epochs) if "end" in head else group["lr"] * 0.5
                for step in run.steps(X):
                    for (x,) in step.batches():
                        step.backward(model(x).square().mean())
                    step.update()
                    rates[step.number] = group["lr"] if head != "steps a scheduler" else scheduler.get_last_lr()[0]
                    if step.number == stop:
                        raise Killed
        return rates

    with pytest.raises(Killed):
        program(2, 8)
    each = [0.8, 0.6, 0.4, 0.2] if "end" in head else [0.4, 0.2, 0.1, 0.05]
    assert program(4) == pytest.approx({number: each[(number - 1) // 5] for number in range(8, 21)})


def test_a_scheduler_with_last_epoch_finds_the_initial_rate(tmp_path):
    """KeyError: 'initial_lr'."""

    def program(stop=None):
        with training.start(flags_for("--output-dir", str(tmp_path), "--checkpoint-steps", "1", epochs=3)) as run:
            net = nn.Linear(3, 1)
            model, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
            epoch = int(run.epochs_done)
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch, last_epoch=epoch - 1)
            run.register(scheduler=scheduler)
            for _ in run.epochs(3):
                for step in run.steps(X):
                    for (x,) in step.batches():
                        step.backward(model(x).square().mean())
                    step.update()
                    if step.number == stop:
                        raise Killed
                scheduler.step()
            return scheduler.get_last_lr()

    with pytest.raises(Killed):
        program(8)
    assert program() == [0.0125]


def test_a_copy_of_a_running_run_is_not_locked(tmp_path):
    """Its lock named the process that had the original."""
    (tmp_path / "original").mkdir()
    original = Lock(tmp_path / "original", 0.0)
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / ".lock").write_bytes((tmp_path / "original" / ".lock").read_bytes())
    Lock(tmp_path / "copy", 0.0).release()
    with pytest.raises(TimeoutError):
        Lock(tmp_path / "original", 0.0)
    original.release()
