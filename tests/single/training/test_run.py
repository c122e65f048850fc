"""The run object: what the loop computes, saves and restores. Mistakes in a program: test_mistakes.py."""

import decimal
import math
import os
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hvdtrain import training
from hvdtrain.checkpoint import checkpoint
from hvdtrain.engines.errors import Failure, UserError
from hvdtrain.inputs import leftovers
from hvdtrain.inputs.sharding import epoch_order
from hvdtrain.loop.run import Run
from hvdtrain.loop.step import Step
from hvdtrain.output.metric_names import goodness
from hvdtrain.output.recorded_runs import read_runs
from tests.e2e.launchers import events, summary
from tests.single.training.small import N, X, Y, fit, flags_for, network, train


def prepared(run):
    net = network()
    return run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))


def test_accumulation_is_the_large_batch():
    """With an uneven end: 40 samples in steps of 12 are 12, 12, 12, 4."""
    ends = []
    for argv in (("--batch-size", "12"), ("--batch-size", "4", "--accumulate", "3")):
        with training.start(flags_for(*argv)) as run:
            net = nn.Linear(3, 1)
            model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
            train(run, model)
            assert (run.state.step, run.state.samples) == (8, 2 * N)
            ends.append(net.weight.detach().clone())
    torch.testing.assert_close(*ends)


class Product(torch.autograd.Function):
    """The input. Its backward pass records the type of a matrix product."""

    types: ClassVar[list[torch.dtype]] = []

    @staticmethod
    def forward(context, given):
        return given.clone()

    @staticmethod
    def backward(context, gradient):
        Product.types.append(torch.mm(torch.ones(1, 1), torch.ones(1, 1)).dtype)
        return gradient


@pytest.mark.parametrize("amp", ["bf16", "off"])
def test_the_backward_pass_is_outside_of_autocast_as_torch_recommends(amp):
    """Also of one that the author's loop is in."""
    Product.types.clear()
    with training.start(flags_for("--amp", amp)) as run, torch.autocast("cpu", torch.bfloat16):
        model, _ = prepared(run)
        fit(run, [X, Y], lambda step, x, y: F.mse_loss(Product.apply(model(x).float()), y), epochs=1)
    assert set(Product.types) == {torch.float32}


def test_a_mean_over_tokens_is_that_of_all_micro_batches():
    """Micro-batches of 6 and 2 tokens: their mean of means would weigh the second three times too much."""
    tokens = torch.tensor([[1.0, 2.0, 3.0], [1.0, 1.0, 1.0], [5.0, 0.0, 0.0], [7.0, 0.0, 0.0]])
    lengths = torch.tensor([3, 3, 1, 1])
    with training.start(flags_for("--batch-size", "2", "--accumulate", "2", "--log-steps", "1", "--seed", "3")) as run:
        net = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(net.weight)
        model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=1.0))
        for _ in run.epochs(1):
            for step in run.steps(tokens, lengths):
                for some, counts in step.batches():
                    mask = torch.arange(3) < counts[:, None]
                    loss = (model(some.unsqueeze(-1)).squeeze(-1) - some)[mask].mean()
                    step.backward(loss, count=mask.sum())
                gradient = net.weight.grad.item()
                step.update()
        assert gradient == pytest.approx((6 + 3 + 5 + 7) / 8)
        assert run.state.train["loss"] == pytest.approx(-(6 + 3 + 5 + 7) / 8)


@pytest.mark.parametrize("unused", [False, True])
def test_a_parameter_without_a_gradient_is_named_unless_that_is_meant(unused):
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.spare = nn.Linear(3, 1), nn.Linear(3, 1)

        def forward(self, x):
            return self.used(x)

    def program():
        with training.start(flags_for()) as run:
            net = Half()
            before = net.spare.weight.clone()
            optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)  # its decay would move what has a gradient of zero
            model, _ = run.prepare(net, optimizer, find_unused_parameters=unused)
            train(run, model)
            assert torch.equal(net.spare.weight, before)

    if unused:
        program()
    else:
        with pytest.raises(UserError, match=r"spare.weight got no gradient in this step: freeze it"):
            program()


def test_frozen_and_tied_parameters_train():
    with training.start(flags_for()) as run:
        net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 1))
        net[1].weight = net[0].weight
        net[2].requires_grad_(False)
        before = net[2].weight.clone()
        model, _ = run.prepare(net, torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1))
        losses = train(run, model)
        assert losses[-1] < losses[0]
        assert net[1].weight is net[0].weight
        assert torch.equal(net[2].weight, before)


def test_the_generators_backward_leaves_the_critic_alone():
    with training.start(flags_for()) as run:
        generator, critic = nn.Linear(2, 3), nn.Linear(3, 1)
        optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (generator, critic)]
        g, c, g_optimizer, c_optimizer = run.prepare(generator, critic, *optimizers)
        for _ in run.epochs(1):
            for step in run.steps(X):
                for (real,) in step.batches():
                    step.backward(c(g(torch.randn(len(real), 2)).detach()).mean() - c(real).mean(), c_optimizer)
                of_critic = critic.weight.grad.clone()
                step.update(c_optimizer)
                for (real,) in step.batches():
                    step.backward(-c(g(torch.randn(len(real), 2))).mean(), g_optimizer)
                assert torch.equal(critic.weight.grad, of_critic)
                assert generator.weight.grad is not None
                step.update(g_optimizer)


@pytest.mark.parametrize("micro_batch", [1, 2])
def test_a_gradient_that_is_not_finite_is_found_in_its_micro_batch(micro_batch):
    x = X[:16].clone()
    x[epoch_order(16, 1, 0)[8 * (micro_batch - 1)]] = float("nan")
    flags = flags_for("--accumulate", "2", "--find-non-finite", epochs=1)
    with pytest.raises(Failure) as caught, training.start(flags) as run:
        net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        fit(run, [x, Y[:16]], lambda step, some, targets: F.mse_loss(model(some), targets))
    assert "step 1: gradients are not finite: rank 0 on " in str(caught.value)
    assert f"input of 0 (Linear) in micro-batch {micro_batch} of 2" in str(caught.value)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ((), "loss is finite, .*: the same command with --find-non-finite"),
        (("--find-non-finite",), "gradient of bias;"),
    ],
)
def test_a_gradient_that_only_backward_makes_infinite_names_its_parameter(argv, said):
    with pytest.raises(Failure, match=said), training.start(flags_for(*argv, epochs=1)) as run:
        net = nn.Linear(3, 1)
        nn.init.zeros_(net.weight)
        nn.init.zeros_(net.bias)
        model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        fit(run, [X], lambda step, x: model(x).sqrt().mean())  # finite at zero, where its slope is not


def test_a_step_left_out_changes_nothing_and_training_goes_on(tmp_path):
    flags = flags_for("--max-skipped", "1", "--output-dir", str(tmp_path), epochs=1)
    with training.start(flags) as run:
        net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        for _ in run.epochs(1):
            for step in run.steps(X, Y):
                bad = step.number == 2
                before = [tensor.clone() for tensor in net.state_dict().values()]
                for x, y in step.batches():
                    step.backward(F.mse_loss(model(x * (float("nan") if bad else 1.0)), y))
                step.update()
                same = [torch.equal(a, b) for a, b in zip(before, net.state_dict().values(), strict=True)]
                assert all(same) == bad
    (error,) = events(tmp_path, "error")
    assert "step 2: gradients are not finite" in error["message"]
    assert error["message"].endswith(": step skipped") or error["kind"] == "non-finite"


class Growing(nn.Module):
    """Makes its buffer anew in each forward pass."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(3, 1)
        self.register_buffer("seen", torch.zeros(0))

    def forward(self, x):
        self.seen = torch.cat([self.seen, x[:, 0]])
        return self.body(x)


def test_a_step_left_out_takes_back_a_buffer_that_was_replaced():
    with training.start(flags_for("--max-skipped", "1", epochs=1)) as run:
        net = Growing()
        model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        fit(run, [X], lambda step, x: model(x * (float("nan") if step.number == 2 else 1.0)).square().mean())
    assert len(net.seen) == N - 8
    assert net.seen.isfinite().all()


def regression(directory, epochs):
    """A program without accuracy, of which each step is saved."""
    argv = ("--checkpoint-steps", "1", "--keep", "2", "--tensorboard", "--output-dir", str(directory))
    with training.start(flags_for(*argv, epochs=epochs), metrics={"error": "min"}) as run:
        model, _ = prepared(run)
        for _ in run.epochs(epochs):
            for step in run.steps(X, Y):
                for x, y in step.batches():
                    step.backward(F.mse_loss(model(x), y))
                step.update(clip_norm=1.0)
            with run.evaluating(N) as mine:
                run.record(error=F.mse_loss(model(X[mine]), Y[mine], reduction="none"))
            run.record(root=math.sqrt(run.evaluation["error"]))


class Nested(torch.optim.SGD):
    """Keeps lists of tensors, as SOAP and Shampoo do."""

    def step(self, closure=None):
        super().step(closure)
        for parameter in (parameter for group in self.param_groups for parameter in group["params"]):
            (mean,) = self.state[parameter].setdefault("means", [torch.zeros_like(parameter)])
            parameter.data.sub_(mean.lerp_(parameter.data, 0.5), alpha=0.01)


class Odd(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        self.state[self.param_groups[0]["params"][0]]["seen"] = object()


STATES = {
    "statistics in float64": (
        lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double(),
        lambda p: torch.optim.SGD(p, lr=0.1),
    ),
    "lists in an optimizer's state": (network, lambda p: Nested(p, lr=0.1, momentum=0.9)),
    "a learning rate that is a tensor": (network, lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01))),
}


def kept(directory, make, optimizer_of, epochs):
    """Train `make()` and return its state."""
    with training.start(flags_for("--output-dir", str(directory), epochs=epochs)) as run:
        torch.manual_seed(5)
        net = make()
        model, _ = run.prepare(net, optimizer_of(net.parameters()))
        kind = next(net.parameters()).dtype
        fit(run, [X.to(kind), Y.to(kind)], lambda step, x, y: F.mse_loss(model(x), y))
    return net.state_dict()


@pytest.mark.parametrize("case", STATES)
def test_all_of_a_state_goes_on_with_the_run(case, tmp_path):
    whole = kept(tmp_path / "whole", *STATES[case], 3)
    kept(tmp_path / "apart", *STATES[case], 1)
    apart = kept(tmp_path / "apart", *STATES[case], 3)
    assert all(torch.equal(whole[name], apart[name]) for name in whole)


def test_a_rate_is_a_tensor_or_a_number_as_in_this_run(tmp_path):
    rates = []
    for epochs, rate in enumerate((0.01, torch.tensor(0.5), 0.5), 1):
        with training.start(flags_for("--output-dir", str(tmp_path), epochs=epochs)) as run:
            net = network()
            model, optimizer = run.prepare(net, torch.optim.Adam(net.parameters(), lr=rate))
            fit(run, [X, Y], lambda step, x, y, model=model: F.mse_loss(model(x), y))
            rates.append(optimizer.param_groups[0]["lr"])
    assert [type(rate) for rate in rates] == [float, torch.Tensor, float]
    assert [float(rate) for rate in rates] == pytest.approx([0.01] * 3)


def test_how_to_compute_is_the_choice_of_this_run(tmp_path):
    for epochs, foreach in enumerate((True, False), 1):
        with training.start(flags_for("--output-dir", str(tmp_path), epochs=epochs)) as run:
            net = network()
            model, optimizer = run.prepare(net, torch.optim.Adam(net.parameters(), lr=0.01, foreach=foreach))
            assert optimizer.param_groups[0]["foreach"] is foreach
            fit(run, [X, Y], lambda step, x, y, model=model: F.mse_loss(model(x), y))
    assert run.state.epoch == 2


Adam = torch.optim.Adam
OTHERS = {
    "another one": (Adam, lambda p: torch.optim.SGD(p, lr=0.1), "Adam in the checkpoint, SGD now"),
    "a setting of another form": (Adam, lambda p: type("Adam", (Alone,), {})(p), "betas is .0.9, 0.999."),
    "fewer groups": (lambda p: Adam([{"params": [one]} for one in p]), Adam, "zip"),
}


class Alone(torch.optim.Optimizer):
    """Has one beta, where Adam has two: as Adafactor has two for eps."""

    def __init__(self, params):
        super().__init__(params, {"betas": 0.9})

    def step(self, closure=None):
        raise AssertionError("it is refused before")


@pytest.mark.parametrize("case", OTHERS)
def test_a_checkpoint_of_another_optimizer_is_refused_in_one_line(case, tmp_path):
    first, then, why = OTHERS[case]
    kept(tmp_path, network, first, 1)
    with pytest.raises(
        UserError,
        match=rf"^the checkpoint does not match the optimizer \(.*{why}.*\): make the optimizer as the run did",
    ):
        kept(tmp_path, network, then, 2)


def test_an_optimizer_whose_state_cannot_be_saved_is_told_at_the_first_checkpoint(tmp_path):
    with pytest.raises(
        UserError, match=r"^the state of Odd holds a object at \[.*, which a checkpoint cannot store: keep to"
    ):
        kept(tmp_path, network, lambda p: Odd(p, lr=0.1), 1)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("kind", ["complex128", "complex32", "bits8", "uint4"])
def test_a_tensor_that_cannot_be_saved_is_told_at_the_start(kind, tmp_path):
    """complex32 was a warning at each checkpoint, and an error at the end that named the file system."""
    net = network()
    net.register_buffer("wave", torch.empty(2, dtype=getattr(torch, kind)))
    how = "use complex64" if "complex" in kind else "register the buffer with persistent=False"
    with (
        pytest.raises(UserError, match=f"^wave is {kind}, which a checkpoint cannot store: {how}"),
        training.start(flags_for("--output-dir", str(tmp_path))) as run,
    ):
        run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))


def test_two_optimizers_of_one_loop_have_the_counts_of_their_own_losses():
    """Both were divided by the sum of both counts."""
    ends = []
    for together in (True, False):
        torch.manual_seed(0)
        nets = nn.Linear(3, 1), nn.Linear(3, 1)
        if not together:
            optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
            for i in epoch_order(N, 1, 0).split(8):
                for net, optimizer, kept in zip(nets, optimizers, (X[i, 0] > 0, X[i, 1] > -1), strict=True):
                    optimizer.zero_grad()
                    (net(X[i]) - Y[i])[kept].square().mean().backward()
                    optimizer.step()
        else:
            with training.start(flags_for("--batch-size", "4", "--accumulate", "2", epochs=1)) as run:
                first, second, *optimizers = run.prepare(
                    *nets, *(torch.optim.SGD(n.parameters(), lr=0.1) for n in nets)
                )
                for _ in run.epochs(1):
                    for step in run.steps(X, Y):
                        for x, y in step.batches():
                            for net, one, kept in zip(
                                (first, second), optimizers, (x[:, 0] > 0, x[:, 1] > -1), strict=True
                            ):
                                errors = (net(x) - y)[kept].square()
                                step.backward(errors.sum() / kept.sum().clamp(min=1), one, count=kept.sum())
                        step.update()
        ends.append([net.weight.detach().clone() for net in nets])
    torch.testing.assert_close(*ends)


@pytest.mark.parametrize("scheduled", [True, False])
def test_a_schedule_made_of_the_rate_that_the_optimizer_has_goes_on(scheduled, tmp_path):
    """The program reads the rate after run.prepare, which had restored one that has decayed."""

    def trained(directory, epochs):
        with training.start(flags_for("--output-dir", str(tmp_path / directory), epochs=epochs)) as run:
            torch.manual_seed(5)
            net = network()
            model, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
            base = optimizer.param_groups[0]["lr"]
            assert base == 0.1
            averaged = torch.optim.swa_utils.AveragedModel(net)
            run.register(averaged=averaged)
            base = optimizer.param_groups[0]["lr"]
            if scheduled:
                scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: max(0.01, base - 0.008 * s) / base)
                run.register(scheduler=scheduler)

            def each(step):
                if scheduled:
                    scheduler.step()
                else:
                    optimizer.param_groups[0]["lr"] -= base / 20
                rates.append(optimizer.param_groups[0]["lr"])

            fit(run, [X, Y], lambda step, x, y: F.mse_loss(model(x), y), epochs=epochs, each=each)
        return net.state_dict()

    rates = []
    whole, whole_rates = trained("whole", 2), list(rates)
    rates.clear()
    trained("apart", 1)
    apart = trained("apart", 2)
    assert rates == whole_rates
    assert all(torch.equal(whole[name], apart[name]) for name in whole)


def test_metrics_are_the_scripts_own(tmp_path, capsys):
    """No word of accuracy: in the record, the report, TensorBoard, the best checkpoint, and on the screen."""
    regression(tmp_path, epochs=3)
    evaluations = events(tmp_path, "evaluate")
    assert [set(line) >= {"error", "root", "count"} for line in evaluations] == [True] * 3
    assert "accuracy" not in (tmp_path / "metrics.jsonl").read_text()
    assert f"error {evaluations[-1]['error']:.4f}  root {evaluations[-1]['root']:.4f} of 40" in capsys.readouterr().out
    assert summary(tmp_path)["error"] == evaluations[-1]["error"]
    (run,) = read_runs([tmp_path])
    assert run.name
    best = min(evaluations, key=lambda line: line["error"])
    facts = {path: checkpoint.read_facts(path) for path in (tmp_path / "checkpoints").glob("step-*.safetensors")}
    kept = max(facts.values(), key=goodness)
    assert kept["best"] == {"metric": "error", "direction": "min", "value": best["error"]}


def test_training_by_steps_ends_in_the_middle_of_an_epoch(tmp_path):
    with training.start(flags_for("--output-dir", str(tmp_path))) as run:
        model, _ = prepared(run)
        seen = []
        train(run, model, steps=7, each=lambda step: seen.append((step.number, round(run.progress * 7))))
    assert seen == [(number, number - 1) for number in range(1, 8)]
    assert summary(tmp_path)["steps"] == 7


def test_a_goal_that_is_reached_ends_training_and_one_that_is_not_gives_three(tmp_path):
    for goal, code, epochs in ((1e9, 0, 1), (0.0, 3, 2)):
        with training.start(flags_for()) as run:
            model, _ = prepared(run)
            for _ in run.epochs(2, stop_at={"loss": goal}):
                for step in run.steps(X, Y):
                    for x, y in step.batches():
                        step.backward(F.mse_loss(model(x), y))
                    step.update()
                with run.evaluating(N) as mine:
                    run.record(loss=F.mse_loss(model(X[mine]), Y[mine], reduction="sum"))
        assert (run.exit_code, run.state.epoch) == (code, epochs)


def test_modes_and_random_numbers_of_training_survive_an_evaluation():
    with training.start(flags_for(epochs=1)) as run:
        net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
        model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        net[1].eval()  # as a script that freezes statistics has it
        for _ in run.epochs(1):
            for step in run.steps(X, Y):
                for x, y in step.batches():
                    step.backward(F.mse_loss(model(x), y))
                step.update()
            with run.evaluating(DataLoader(TensorDataset(X, Y), 16)) as batches:
                assert not net.training
                for x, y in batches:
                    run.record(loss=(model(x) - y).square())
            assert net.training
            assert not net[1].training
        assert run.evaluation["count"] == N


def test_every_start_removes_what_a_killed_rank_has_left(tmp_path, monkeypatch):
    """Also if the run has no sample left to train on, so that no DataLoader worker starts."""
    monkeypatch.setattr(leftovers, "SEMAPHORES", tmp_path)
    dead, living = (
        tmp_path / f"sem.{tag}-x" for tag in (f"hvdtrain-{leftovers.machine()}-4194305-1", leftovers.tag(os.getpid()))
    )
    dead.touch()
    living.touch()
    with training.start(flags_for()):
        assert [path.name for path in tmp_path.iterdir()] == [living.name]


def test_tensors_and_paths_in_the_summary_are_numbers_and_text(tmp_path):
    with training.start(flags_for("--output-dir", str(tmp_path))) as run:
        prepared(run)
        run.event("seen", rates=torch.tensor([0.5, 2.0]))
        run.summary(best=torch.tensor(0.5), where=tmp_path)
    assert events(tmp_path, "seen")[0]["rates"] == [0.5, 2.0]
    assert (summary(tmp_path)["best"], summary(tmp_path)["where"]) == (0.5, str(tmp_path))


class Adapted(nn.Linear):
    """As in loralib: evaluation mode adds the adapter to the weight, and training mode takes it out again."""

    def __init__(self):
        super().__init__(3, 1)
        self.adapter, self.merged = nn.Parameter(torch.zeros(1, 3)), False

    def train(self, mode=True):
        super().train(mode)
        if self.merged == mode:
            self.weight.data += -self.adapter.data if mode else self.adapter.data
            self.merged = not mode
        return self

    def forward(self, x):
        return super().forward(x) if self.merged else super().forward(x) + x @ self.adapter.T


def test_a_module_whose_train_does_work_is_trained_on_after_an_evaluation():
    with training.start(flags_for()) as run:
        net = nn.Sequential(Adapted(), nn.BatchNorm1d(1).eval())
        model, _ = run.prepare(net, torch.optim.SGD([net[0].adapter], lr=0.1))
        adapters = [net[0].adapter.tolist()]
        for _ in run.epochs(2):
            for step in run.steps(X, Y):
                for x, y in step.batches():
                    step.backward((model(x).squeeze(1) - y).square().mean())
                step.update()
            adapters.append(net[0].adapter.tolist())
            with run.evaluating(N):
                assert net[0].merged
                run.record(loss=torch.zeros(N))
            assert not net[0].merged
            assert [module.training for module in net.modules()] == [True, True, False]
    assert adapters[0] != adapters[1] != adapters[2]


def test_each_value_of_an_evaluation_is_divided_by_its_own_count():
    with training.start(flags_for()) as run:
        prepared(run)
        with run.evaluating(N):
            run.record(loss=30.0, count=10)
            run.record(hits=torch.ones(N))
            run.record(right=5.0, count=10)
        assert run.evaluation == {"loss": 3.0, "hits": 1.0, "right": 0.5, "count": 10}


@pytest.mark.parametrize("stopped", [None, 3, 4])
def test_an_epoch_that_the_program_ends_is_ended_also_after_a_resume(stopped, tmp_path):
    """Three of the five steps of each epoch are taken."""

    def program(stops: int | None, epochs: int = 2) -> Run:
        flags = flags_for("--output-dir", str(tmp_path), epochs=epochs)
        with training.start(flags) as run:
            net = network()
            model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))

            def each(step: Step) -> None:
                if step.number % 3 == 0:
                    run.end_epoch()
                    assert step.last
                if step.number == stops:
                    run.stop()

            train(run, model, each=each)
            assert (run.state.epoch, run.state.step, run.state.samples) == (epochs, 3 * epochs, 24 * epochs)
        return run

    if stopped is not None:
        assert program(stopped).exit_code == 75
    assert program(None).exit_code == 0
    whole = summary(tmp_path)
    assert (whole["epochs"], whole["steps"], whole["samples"]) == (2, 6, 48)


def test_the_best_weights_are_loaded_after_training(tmp_path):
    with training.start(
        flags_for("--output-dir", str(tmp_path), "--keep", "1", epochs=4), metrics={"loss": "min"}
    ) as run:
        net = network()
        model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        weights = []
        for epoch in run.epochs(4):
            with pytest.raises(UserError, match=r"^run.load_best\(\) in the loop over run.epochs, which trains on"):
                run.load_best()
            for step in run.steps(X, Y):
                for x, y in step.batches():
                    step.backward(F.mse_loss(model(x), y))
                step.update()
            weights.append(net[0].weight.detach().clone())
            with run.evaluating(N):
                run.record(loss=torch.full((N,), [3.0, 1.0, 2.0, 4.0][epoch]))
            if epoch == 2:
                break
        best = run.load_best()
        assert (best.epoch, best.value) == (1, 1.0)
        assert torch.equal(net[0].weight, weights[1])
        assert not torch.equal(net[0].weight, weights[2])


def test_several_values_of_a_sample_count_as_their_mean():
    """Pixels, tokens, labels: the mean over all values of the samples, and not their sum."""
    pixels = torch.rand(N, 4, 4, generator=torch.Generator().manual_seed(3))
    with training.start(flags_for()) as run:
        prepared(run)
        for data in (N, torch.utils.data.DataLoader(pixels, 7)):
            with run.evaluating(data) as mine:
                for rows in [pixels[mine]] if isinstance(mine, slice) else mine:
                    run.record(bright=rows > 0.5, light=rows)
            expected = {"bright": (pixels > 0.5).double().mean().item(), "light": pixels.mean().item(), "count": N}
            assert run.evaluation == pytest.approx(expected)
        run.record(worth=decimal.Decimal("0.1"))
        assert run.evaluation["worth"] == 0.1


def test_with_fp16_a_program_sees_the_gradients_that_it_sees_without():
    """Also in two updates of one step, as SAM makes them, and where it clips an overflow away."""

    def train(amp, spoil):
        seen = []
        with training.start(flags_for("--amp", amp)) as run:
            torch.manual_seed(1)
            net = nn.Linear(3, 1)
            model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
            for _ in run.epochs(1):
                for step in run.steps(X, Y):
                    for _ in range(2):
                        for x, y in step.batches():
                            weight = 1e38 if spoil == step.number else 0.01
                            step.backward(F.mse_loss(model(x).float(), y) * weight)
                        seen.append(net.weight.grad.norm().item())
                        torch.nn.utils.clip_grad_value_(net.parameters(), 5e-4)
                        step.update()
        return seen, net.weight.detach()

    for ours, plain in zip(train("fp16", None), train("off", None), strict=True):
        torch.testing.assert_close(torch.as_tensor(ours), torch.as_tensor(plain), rtol=0.01, atol=1e-3)
    norms, weight = train("fp16", 2)
    assert not math.isfinite(norms[2])
    assert weight.isfinite().all()


def test_another_thread_is_told_where_to_start():
    """Signals arrive in the main thread only."""

    def start() -> str:
        with pytest.raises(UserError) as caught, training.start(flags_for()):
            pass
        return str(caught.value)

    with ThreadPoolExecutor() as pool:
        assert "in another thread than the main one" in pool.submit(start).result()


@pytest.mark.parametrize("shape", [(), (3,), (2, 2), (1, 1)])
def test_values_of_a_sample_count_as_their_mean(shape):
    """Pixels or tokens, [b, h, w]: the sum over all of them was divided by the number of samples alone."""
    values = torch.rand(N, *shape, generator=torch.Generator().manual_seed(1))
    with training.start(flags_for()) as run:
        net = network()
        run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        with run.evaluating(N) as mine:
            for some in values[mine].split(7):
                run.record(loss=some)
    assert run.evaluation["loss"] == pytest.approx(values.mean().item())
