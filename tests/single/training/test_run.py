"""The run object: what the loop computes, saves and restores, as torch does. Mistakes: test_mistakes.py."""

import contextlib
import decimal
import gc
import math
import os
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

from hvdtrain import training
from hvdtrain.checkpoint import checkpoint
from hvdtrain.engines.errors import Failure, UserError
from hvdtrain.inputs import leftovers
from hvdtrain.inputs.sharding import epoch_order
from hvdtrain.loop import prepare
from hvdtrain.output.metric_names import goodness
from hvdtrain.output.recorded_runs import read_runs
from tests.e2e.launchers import events, summary
from tests.single.training.small import Killed, N, Trained, X, Y, fit, flags_for, network, squares


def test_accumulation_is_the_large_batch():
    """With an uneven end: 40 samples in steps of 12 are 12, 12, 12, 4."""
    ends = []
    for argv in (("--batch-size", "12"), ("--batch-size", "4", "--accumulate", "3")):
        t = Trained(*argv, net=lambda: nn.Linear(3, 1))
        assert (t.run.state.step, t.run.state.samples) == (8, 2 * N)
        ends.append(t.weights())
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
    with torch.autocast("cpu", torch.bfloat16):
        Trained("--amp", amp, epochs=1, loss=lambda t, x, y: F.mse_loss(Product.apply(t.model(x).float()), y))
    assert set(Product.types) == {torch.float32}


def test_a_mean_over_tokens_is_that_of_all_micro_batches():
    """Micro-batches of 6 and 2 tokens: their mean of means would weigh the second three times too much. The program counts
    them in one tensor."""
    number = torch.tensor(0)
    tokens = torch.tensor([[1.0, 2.0, 3.0], [1.0, 1.0, 1.0], [5.0, 0.0, 0.0], [7.0, 0.0, 0.0]])
    lengths = torch.tensor([3, 3, 1, 1])

    def loss(t, some, counts):
        mask = torch.arange(3) < counts[:, None]
        return (t.model(some.unsqueeze(-1)).squeeze(-1) - some)[mask].mean()

    flags = ("--accumulate", "2", "--log-steps", "1", "--seed", "3")
    t = Trained(*flags, net=nn.Linear(1, 1, bias=False), before=lambda t: nn.init.zeros_(t.net.weight), lr=1.0, epochs=1,
                batch_size=2, data=(tokens, lengths), loss=loss,
                count=lambda some, counts: number.copy_(counts.sum()))  # fmt: skip
    assert -t.net.weight.item() == pytest.approx((6 + 3 + 5 + 7) / 8)
    assert t.run.state.train["loss"] == pytest.approx(-(6 + 3 + 5 + 7) / 8)


class Half(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.spare = nn.Linear(3, 1), nn.Linear(3, 1)

    def forward(self, x):
        return self.used(x)


@pytest.mark.parametrize("unused", [False, True])
def test_a_parameter_without_a_gradient_is_named_unless_that_is_meant(unused):
    net = Half()
    before = net.spare.weight.clone()
    # Its decay would move what has a gradient of zero.
    program = partial(Trained, net=net, optimizer=lambda p: torch.optim.AdamW(p, lr=0.1), find_unused_parameters=unused)
    if unused:
        program()
    else:
        with pytest.raises(
            UserError, match=r"spare.weight got no gradient in this step: freeze it .*the sum of all losses"
        ):
            program()
    assert torch.equal(net.spare.weight, before)


def test_frozen_and_tied_parameters_train():
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 1))
    net[1].weight = net[0].weight
    net[2].requires_grad_(False)
    before = net[2].weight.clone()
    losses = Trained(net=net, optimizer=lambda p: SGD([one for one in p if one.requires_grad], lr=0.1)).losses
    assert losses[-1] < losses[0]
    assert net[1].weight is net[0].weight
    assert torch.equal(net[2].weight, before)


def test_the_generators_backward_leaves_the_critic_alone():
    with training.start(flags_for()) as run:
        generator, critic = nn.Linear(2, 3), nn.Linear(3, 1)
        optimizers = [SGD(net.parameters(), lr=0.1) for net in (generator, critic)]
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


# ---- gradients that are not finite


@pytest.mark.parametrize("micro_batch", [1, 2])
def test_a_gradient_that_is_not_finite_is_found_in_its_micro_batch(micro_batch):
    x = X[:16].clone()
    x[epoch_order(16, 1, 0)[8 * (micro_batch - 1)]] = float("nan")
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    with pytest.raises(Failure) as caught:
        Trained("--accumulate", "2", "--find-non-finite", net=net, data=(x, Y[:16]), epochs=1)
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
    net = nn.Linear(3, 1)
    nn.init.zeros_(net.weight)
    nn.init.zeros_(net.bias)
    with pytest.raises(Failure, match=said):  # finite at zero, where its slope is not
        Trained(*argv, net=net, data=[X], loss=lambda t, x: t.model(x).sqrt().mean(), epochs=1)


def spoilt(t, x):
    """Inputs that are not finite in the second step."""
    return x * (float("nan") if t.step.number == 2 else 1.0)


def test_a_step_left_out_changes_nothing_and_training_goes_on(tmp_path):
    def state(t):
        return [tensor.clone() for tensor in t.net.state_dict().values()]

    def each(t):
        assert all(map(torch.equal, t.kept, state(t))) == (t.step.number == 2)

    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    Trained("--max-skipped", "1", out=tmp_path, net=net, epochs=1, at_step=lambda t: setattr(t, "kept", state(t)), each=each,
            loss=lambda t, x, y: F.mse_loss(t.model(spoilt(t, x)), y))  # fmt: skip
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
    t = Trained("--max-skipped", "1", net=Growing, data=[X], loss=lambda t, x: squares(t, spoilt(t, x)), epochs=1)
    assert len(t.net.seen) == N - 8
    assert t.net.seen.isfinite().all()


def test_with_fp16_a_program_sees_the_gradients_that_it_sees_without():
    """Also in two updates of one step, as SAM makes them, and where it clips an overflow away."""

    def train(amp, spoil):
        seen = []
        with training.start(flags_for("--amp", amp)) as run:
            torch.manual_seed(1)
            net = nn.Linear(3, 1)
            model, _ = run.prepare(net, SGD(net.parameters(), lr=0.1))
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


# ---- what is saved and restored


def test_a_rate_is_a_tensor_or_a_number_and_foreach_is_taken_as_in_this_run(tmp_path):
    rates = []
    for epochs, (rate, foreach) in enumerate(((0.01, True), (torch.tensor(0.5), False), (0.5, None)), 1):
        t = Trained(out=tmp_path, optimizer=partial(Adam, lr=rate, foreach=foreach), epochs=epochs)
        assert t.optimizer.param_groups[0]["foreach"] is foreach
        rates.append(t.optimizer.param_groups[0]["lr"])
    assert t.run.state.epoch == 3
    assert [type(rate) for rate in rates] == [float, torch.Tensor, float]
    assert [float(rate) for rate in rates] == pytest.approx([0.01] * 3)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("kind", ["complex128", "complex32", "bits8", "uint4"])
def test_a_tensor_that_cannot_be_saved_is_told_at_the_start(kind, tmp_path):
    """complex32 was a warning at each checkpoint, and an error at the end that named the file system."""
    net = network()
    net.register_buffer("wave", torch.empty(2, dtype=getattr(torch, kind)))
    how = "use complex64" if "complex" in kind else "register the buffer with persistent=False"
    with pytest.raises(UserError, match=f"^wave is {kind}, which a checkpoint cannot store: {how}"):
        Trained(out=tmp_path, net=net)


def test_two_optimizers_of_one_loop_have_the_counts_of_their_own_losses():
    """Both were divided by the sum of both counts."""
    ends = []
    for together in (True, False):
        torch.manual_seed(0)
        nets = nn.Linear(3, 1), nn.Linear(3, 1)
        optimizers = [SGD(net.parameters(), lr=0.1) for net in nets]
        if not together:
            for i in epoch_order(N, 1, 0).split(8):
                for net, optimizer, some in zip(nets, optimizers, (X[i, 0] > 0, X[i, 1] > -1), strict=True):
                    optimizer.zero_grad()
                    (net(X[i]) - Y[i])[some].square().mean().backward()
                    optimizer.step()
        else:
            with training.start(flags_for("--batch-size", "4", "--accumulate", "2", epochs=1)) as run:
                first, second, *prepared = run.prepare(*nets, *optimizers)
                for _ in run.epochs(1):
                    for step in run.steps(X, Y):
                        for x, y in step.batches():
                            masks = x[:, 0] > 0, x[:, 1] > -1
                            for net, one, some in zip((first, second), prepared, masks, strict=True):
                                errors = (net(x) - y)[some].square()
                                step.backward(errors.sum() / some.sum().clamp(min=1), one, count=some.sum())
                        step.update()
        ends.append([net.weight.detach().clone() for net in nets])
    torch.testing.assert_close(*ends)


@pytest.mark.parametrize("unused", [True, False])
def test_an_optimizer_without_gradients_has_none_to_divide_by_the_count(unused):
    """It ended in torch's traceback."""
    used, other = nn.Linear(3, 1), nn.Linear(3, 1).requires_grad_(unused)
    before = other.weight.clone(), used.weight.clone()
    with training.start(flags_for(epochs=1)) as run:
        net, *_ = run.prepare(used, other, SGD(used.parameters(), 0.1), SGD(other.parameters(), 0.1),
                              find_unused_parameters=unused)  # fmt: skip
        fit(run, [X, Y], lambda step, x, y: F.mse_loss(net(x), y), count=3)
    assert torch.equal(other.weight, before[0])
    assert not torch.equal(used.weight, before[1])


@pytest.mark.parametrize("scheduled", [True, False])
def test_a_schedule_made_of_the_rate_that_the_optimizer_has_goes_on(scheduled, tmp_path):
    """The program reads the rate after run.prepare, which had restored one that has decayed."""

    def program(directory, epochs):
        rates = []

        def registered(t):
            assert t.rate() == 0.1
            return dict(averaged=torch.optim.swa_utils.AveragedModel(t.net))

        def before(t):
            base = t.base = t.rate()
            if scheduled:
                t.scheduler = LambdaLR(t.optimizer, lambda s: max(0.01, base - 0.008 * s) / base)
                t.run.register(scheduler=t.scheduler)

        def each(t):
            if scheduled:
                t.scheduler.step()
            else:
                t.optimizer.param_groups[0]["lr"] -= t.base / 20
            rates.append(t.rate())

        t = Trained(out=tmp_path / directory, optimizer=partial(SGD, lr=0.1, momentum=0.9), epochs=epochs, seed=5,
                    registered=registered, before=before, each=each)  # fmt: skip
        return t.weights(), rates

    (whole, expected), (_, first), (apart, rest) = program("whole", 2), program("apart", 1), program("apart", 2)
    assert first + rest == expected
    assert torch.equal(whole, apart)


def test_metrics_are_the_scripts_own(tmp_path, capsys):
    """No word of accuracy: in the record, the report, TensorBoard, the best checkpoint, and on the screen."""

    def evaluate(t, epoch):
        with t.run.evaluating(N) as mine:
            t.run.record(error=F.mse_loss(t.model(X[mine]), Y[mine], reduction="none"))
        t.run.record(root=math.sqrt(t.run.evaluation["error"]))

    Trained("--checkpoint-steps", "1", "--keep", "2", "--tensorboard", out=tmp_path, epochs=3, metrics={"error": "min"},
            clip_norm=1.0, tail=evaluate)  # fmt: skip
    evaluations = events(tmp_path, "evaluate")
    assert [set(line) >= {"error", "root", "count"} for line in evaluations] == [True] * 3
    assert "accuracy" not in (tmp_path / "metrics.jsonl").read_text()
    assert f"error {evaluations[-1]['error']:.4f}  root {evaluations[-1]['root']:.4f} of 40" in capsys.readouterr().out
    assert summary(tmp_path)["error"] == evaluations[-1]["error"]
    (run,) = read_runs([tmp_path])
    assert run.name
    best = min(evaluations, key=lambda line: line["error"])
    facts = {path: checkpoint.read_facts(path) for path in (tmp_path / "checkpoints").glob("step-*.safetensors")}
    assert max(facts.values(), key=goodness)["best"] == {"metric": "error", "direction": "min", "value": best["error"]}


# ---- how long, and how it ends


@pytest.mark.parametrize("stopped", [None, 3, 4])
def test_an_epoch_that_the_program_ends_is_ended_also_after_a_resume(stopped, tmp_path):
    """Three of the five steps of each epoch are taken."""

    def program(stops: int | None) -> int:
        def each(t):
            if t.step.number % 3 == 0:
                t.run.end_epoch()
                assert t.step.last
            if t.step.number == stops:
                t.run.stop()

        def end(t):
            assert (t.run.state.epoch, t.run.state.step, t.run.state.samples) == (2, 6, 48)

        return Trained(out=tmp_path, each=each, end=end).run.exit_code

    if stopped is not None:
        assert program(stopped) == 75
    assert program(None) == 0
    whole = summary(tmp_path)
    assert (whole["epochs"], whole["steps"], whole["samples"]) == (2, 6, 48)


@pytest.mark.parametrize("where", ["a step", "an evaluation"])
def test_a_stop_that_the_program_catches_stops_it(where, tmp_path, capsys):
    """`except:` around the loops had exit code 2 and "the epoch was left", or ended the run with 0."""

    def program(stops: bool) -> int:
        with training.start(flags_for("--output-dir", str(tmp_path)), metrics={"loss": "min"}) as run:
            try:
                fit_and_stop(run, where if stops else "")
            except:  # noqa: E722 as programs have it
                run.say("it was caught")
        return run.exit_code

    assert program(True) == 75
    told = capsys.readouterr().out.partition("it was caught\n")[2].splitlines()
    assert told[0] == "warning: the program has caught what stops it: write `except Exception:` for `except:`"
    assert program(False) == 0
    assert "warning: " not in capsys.readouterr().out
    assert (summary(tmp_path)["epochs"], summary(tmp_path)["steps"]) == (2, 10)


def fit_and_stop(run, where):
    net = network()
    run.prepare(net, SGD(net.parameters(), 0.1))
    for _ in run.epochs(2):
        for step in run.steps(X, Y):
            for x, y in step.batches():
                step.backward((net(x) - y).square().mean())
            step.update()
            if where == "a step" and step.number == 3:
                run.stop()
        with run.evaluating(N) as mine:
            if where == "an evaluation":
                run.stop()
                while not run.stopping.watch.stop_reason:
                    time.sleep(0.01)
            run.record(loss=(net(X[mine]) - Y[mine]).square())


class Scaled(nn.Linear):
    scale = 0

    def get_extra_state(self):
        return self.scale

    def set_extra_state(self, state):
        self.scale = state


def test_the_best_weights_are_loaded_after_training(tmp_path):
    values, weights = [3.0, 1.0, 2.0, 4.0], []

    def tail(t, epoch):
        t.net[2].scale, t.scaled.scale = epoch, epoch * 10
        weights.append(t.net[0].weight.detach().clone())
        with t.run.evaluating(N):
            t.run.record(loss=torch.full((N,), values[epoch]))
        with pytest.raises(UserError, match=r"^run.load_best\(\) in the loop over run.epochs, which trains on"):
            t.run.load_best()

    def end(t):
        best = t.run.load_best()
        assert (best.epoch, best.value) == (1, 1.0)
        assert torch.equal(t.net[0].weight, weights[1])
        assert not torch.equal(t.net[0].weight, weights[3])
        assert (t.net[2].scale, t.scaled.scale) == (1, 10)

    Trained("--keep", "1", out=tmp_path, epochs=4, metrics={"loss": "min"}, tail=tail, end=end,
            net=lambda: nn.Sequential(nn.Linear(3, 8), nn.Tanh(), Scaled(8, 1)),
            registered=lambda t: dict(scaled=Scaled(1, 1)))  # fmt: skip
    assert len(weights) == 4


def test_another_thread_is_told_where_to_start():
    """Signals arrive in the main thread only."""

    def start() -> str:
        with pytest.raises(UserError) as caught, training.start(flags_for()):
            pass
        return str(caught.value)

    with ThreadPoolExecutor() as pool:
        assert "in another thread than the main one" in pool.submit(start).result()


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


# ---- evaluations


@pytest.fixture
def run():
    """A run that has begun, with a model and an optimizer."""
    with training.start(flags_for()) as run:
        net = network()
        run.prepare(net, SGD(net.parameters(), lr=0.1))
        yield run


def test_tensors_and_paths_in_the_summary_are_numbers_and_text(tmp_path):
    def end(t):
        t.run.event("seen", rates=torch.tensor([0.5, 2.0]))
        t.run.summary(best=torch.tensor(0.5), where=tmp_path)

    Trained(out=tmp_path, epochs=1, end=end)
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
    adapters = [[[0.0] * 3]]

    def tail(t, epoch):
        adapters.append(t.net[0].adapter.tolist())
        with t.run.evaluating(N):
            assert t.net[0].merged
            t.run.record(loss=torch.zeros(N))
        assert not t.net[0].merged
        assert [module.training for module in t.net.modules()] == [True, True, False]

    Trained(net=lambda: nn.Sequential(Adapted(), nn.BatchNorm1d(1).eval()), tail=tail, lr=0.1)
    assert adapters[0] != adapters[1] != adapters[2]


def test_each_value_of_an_evaluation_is_divided_by_its_own_count(run):
    with run.evaluating(N):
        run.record(loss=30.0, count=(number := torch.tensor(10.0)))
        number.fill_(4)  # which the program uses again
        run.record(hits=torch.ones(N))
        run.record(right=5.0, count=10)
    assert run.evaluation == {"loss": 3.0, "hits": 1.0, "right": 0.5, "count": 10}
    run.record(worth=decimal.Decimal("0.1"))
    assert run.evaluation["worth"] == 0.1


@pytest.mark.parametrize("shape", [(), (3,), (2, 2), (1, 1), (4, 4)])
def test_values_of_a_sample_count_as_their_mean(shape, run):
    """Pixels or tokens, [b, h, w]: the sum over all of them was divided by the number of samples alone."""
    values = torch.rand(N, *shape, generator=torch.Generator().manual_seed(1))
    for data in (N, DataLoader(values, 7)):
        with run.evaluating(data) as mine:
            for some in values[mine].split(7) if isinstance(mine, slice) else mine:
                run.record(light=some, bright=some > 0.5)
        expected = {"light": values.mean().item(), "bright": (values > 0.5).double().mean().item(), "count": N}
        assert run.evaluation == pytest.approx(expected)


@pytest.mark.parametrize(("size", "drop_last", "number"), [(16, False, 3), (16, True, 2), (40, False, 1)])
def test_a_program_may_ask_how_many_batches_an_evaluation_has(size, drop_last, number):
    """It ended in a traceback: what is yielded was a generator."""

    def tail(t, epoch):
        with t.run.evaluating(DataLoader(TensorDataset(X, Y), size, drop_last=drop_last)) as batches:
            assert len(batches) == number
            assert len([t.run.record(loss=(x - x).sum(1)) for x, _ in batches]) == number

    Trained(tail=tail, metrics={"loss": "min"})


# ---- models and evaluations as in a plain torch program


class Sines(nn.Module):
    """Keeps a table as long as the longest sequence so far, as rotary embeddings do."""

    def __init__(self):
        super().__init__()
        self.inner, self.table = nn.Linear(3, 3), torch.ones(0, 1)

    def forward(self, x):
        if len(self.table) < len(x):
            self.table = torch.arange(len(x)).float().sin().unsqueeze(1)
        return self.inner(x) * self.table[: len(x)]


def test_a_table_that_a_model_made_in_an_evaluation_is_used_in_training():
    def evaluated_first(t, x):
        if len(t.net.table) < N:
            with t.run.evaluating(N):
                t.run.record(loss=t.model(X).square().sum())
        return squares(t, x)

    assert len(Trained(net=Sines, data=[X], loss=evaluated_first).net.table) == N


def test_an_evaluation_may_compute_gradients_of_its_own():
    """Of the input, as for adversarial examples and saliency."""

    def evaluate(t, epoch):
        with t.run.evaluating(N) as mine:
            assert not t.model(X[mine]).requires_grad
            with torch.enable_grad():
                x = X[mine].clone().requires_grad_()
                (gradient,) = torch.autograd.grad(t.model(x).sum(), x)
            t.run.record(size=gradient.abs().sum(1))

    t = Trained(net=nn.Linear(3, 1), lr=0.0, epochs=1, tail=evaluate)
    assert abs(t.run.evaluation["size"] - float(t.net.weight.abs().sum())) < 1e-6


@pytest.fixture(params=[torch.bfloat16, torch.float16])
def short(request):
    """The default dtype, while the test runs."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(before)


def test_numbers_keep_their_digits_whatever_the_default_dtype_is(short, tmp_path):
    """Those of the program, and a count of tokens: the gradient of their mean is 1 for each weight."""
    net = nn.Linear(3, 1, dtype=torch.float32)
    before = net.weight.detach().clone()

    def at_step(t):
        t.share = t.step.per_sample(lambda batch: 1001.0)

    def loss(t, x):
        t.step.record(number=1001.25, bright=3)
        return t.model(x).mean()

    def evaluate(t, epoch):
        with t.run.evaluating(N):
            t.run.record(loss=1001.25, count=1)

    t = Trained("--accumulate", "8", "--log-steps", "1", out=tmp_path, net=net, lr=1.0, count=torch.tensor(1001), epochs=1,
                data=[torch.ones(N, 3, dtype=torch.float32)], at_step=at_step, loss=loss, tail=evaluate)  # fmt: skip
    assert t.run.evaluation["loss"] == 1001.25
    assert t.share == 5 * 1001 / N
    assert torch.allclose(before - net.weight, torch.ones(1, 3, dtype=torch.float32))
    assert events(tmp_path, "train")[0]["number"] == 1001.25


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_loss_over_a_step_is_added_up_in_32_bits(dtype):
    def loss(t, _):
        sums = t.model(torch.ones(1, 3, dtype=dtype)).sum()
        return sums - sums.detach() + 101

    def each(t):
        assert t.step.loss == 101

    Trained("--accumulate", "40", "--log-steps", "1", net=nn.Linear(3, 1).to(dtype), lr=0.0, epochs=1, batch_size=1,
            data=[N], loss=loss, count=torch.tensor(4001), each=each)  # fmt: skip


def test_what_a_program_drops_in_its_loop_is_freed():
    """A look at the variables of a function keeps them all until the next one, before Python 3.13."""
    with training.start(flags_for(epochs=1)) as run:
        model, _ = run.prepare(net := network(), torch.optim.SGD(net.parameters(), lr=0.1))
        for _ in run.epochs(1):
            held = nn.Linear(1, 1)
            gone = weakref.ref(held)
            for step in run.steps(X, Y):
                held = None
                assert gone() is None
                for x, y in step.batches():
                    step.backward(F.mse_loss(model(x), y))
                step.update()


@pytest.mark.parametrize("kill", [None, 3])
@pytest.mark.parametrize(
    "flags",
    [
        "--checkpoint-steps 2",
        "--tensorboard",
        "--mirror file://{}-mirror",
        "--virtual-ranks 2",
        "--profile 2",
    ],
)
def test_a_process_keeps_nothing_of_a_training_that_has_ended(flags, kill, tmp_path, monkeypatch):
    """A cross-validation has as many as folds: the models of all would not fit into a GPU, and each had a thread."""
    before, gone, hooks = set(threading.enumerate()), [], []
    monkeypatch.setattr(os, "register_at_fork", lambda **hook: hooks.append(hook))
    for fold in map(str, range(3)):
        with contextlib.suppress(Killed):
            Trained(*flags.format(tmp_path / fold).split(), out=tmp_path / fold, kill=kill,
                    at_step=lambda t: gone.extend(map(weakref.ref, (t.net, t.optimizer, t.run))))  # fmt: skip
    gc.collect()
    assert gone
    assert len(hooks) < 3  # libraries have some; those of a training cannot be taken back
    assert [one() for one in gone] == [None] * len(gone)
    assert {thread.name for thread in set(threading.enumerate()) - before} <= {"leaving"}


def test_the_model_of_the_training_before_is_freed_in_the_first_step(monkeypatch):
    """Before its forward pass: on a GPU there may be no room for both, and the collector comes when it likes."""
    monkeypatch.setattr(prepare, "LARGE_BYTES", 41 * 4)  # the weights of the network
    gone = []
    gc.disable()
    try:
        for _ in range(3):
            with training.start(flags_for(epochs=1)) as run:
                net = network()
                model, optimizer = run.prepare(net, Adam(net.parameters()))
                for _ in run.epochs(1):
                    for step in run.steps(X, Y):
                        for x, y in step.batches():
                            assert [one() for one in gone] == [None] * len(gone)
                            step.backward(F.mse_loss(model(x), y))
                        step.update()
                    with run.evaluating(N) as part:
                        run.record(loss=F.mse_loss(model(X[part]), Y[part], reduction="none"))
            gone += [weakref.ref(net), weakref.ref(optimizer)]
    finally:
        gc.enable()
