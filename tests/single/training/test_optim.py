"""Schedules are pure functions; where torch has the same one, it is the oracle."""

import math

import pytest
import torch

from hvdtrain.features.schedule_rules import length_of_lambdas
from hvdtrain.loop import optim
from tests.single.training.test_mistakes import run


def test_onecycle_is_torchs():
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    steps = 101
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=steps, cycle_momentum=False)
    theirs = []
    for _ in range(steps):
        theirs.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step() if len(theirs) < steps else None
    # torch puts the peak at step 0.3 * total - 1 of total - 1: compare on its own axis of progress.
    peak = (0.3 * steps - 1) / (steps - 1)
    for step, rate in enumerate(theirs):
        at = step / (steps - 1)
        progress = 0.3 * at / peak if at < peak else 0.3 + 0.7 * (at - peak) / (1 - peak)
        assert 0.01 * optim.schedule_factor("onecycle", progress) == pytest.approx(rate, rel=1e-6)


def test_cosine_falls_from_one_to_zero_and_constant_stays():
    assert [optim.schedule_factor("cosine", p) for p in (0.0, 0.5, 1.0)] == pytest.approx([1.0, 0.5, 0.0])
    assert {optim.schedule_factor("constant", p) for p in (0.0, 0.3, 1.0)} == {1.0}


def test_linear_warmup_starts_from_the_single_device_rate():
    peak = optim.scaled_rate(0.1, "linear", size=8)
    assert peak == pytest.approx(0.8)
    rates = [peak * optim.warmup_factor(epochs, 5, 8, "linear") for epochs in (0.0, 2.5, 5.0, 9.0)]
    assert rates == pytest.approx([0.1, 0.45, 0.8, 0.8])
    assert optim.warmup_factor(0.0, 5, 8, "none") == 0.0
    assert optim.warmup_factor(0.0, 0.0, 8, "none") == 1.0


def test_rate_is_not_scaled_where_the_gradient_has_grown_already():
    assert optim.scaled_rate(0.1, "linear", size=4, reduction="sum") == 0.1
    assert optim.scaled_rate(0.1, "none", size=4) == 0.1


@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_fused_is_the_same_up_to_rounding_and_a_loop_where_torch_has_no_kernel(name, monkeypatch):
    def trained(fused: bool) -> tuple[torch.Tensor, bool]:
        weight = torch.nn.Parameter(torch.linspace(-1, 1, 7))
        optimizer = optim.build_optimizer(name, iter([{"params": [weight]}]), 0.1, 0.9, 0.1, fused)
        for _ in range(6):
            weight.grad = weight.detach().cos()
            optimizer.step()
        return weight.detach(), bool(optimizer.param_groups[0]["fused"])

    (loop, no), (kernel, yes) = trained(False), trained(True)
    assert (no, yes) == (False, True)
    torch.testing.assert_close(kernel, loop)
    real = torch.optim.Adam.__init__

    def older(self, *args, fused=None, **settings):
        real(self, *args, fused=fused, **settings)
        if fused:
            raise RuntimeError("`fused=True` requires all the params to be floating point Tensors of supported devices")

    monkeypatch.setattr(torch.optim.Adam, "__init__", older)  # AdamW's calls it
    fallback, no = trained(True)
    assert not no
    assert torch.equal(fallback, loop)


@pytest.mark.parametrize(("name", "kind"), [("sgd", torch.optim.SGD), ("adam", torch.optim.Adam)])
def test_eager_optimizers_are_torchs_own_to_the_bit(name, kind):
    """Also after a restart from a state_dict, with weight decay."""
    options = {"momentum": 0.9} if name == "sgd" else {"betas": (0.9, 0.999)}
    weights = []
    for build in (
        lambda p: optim.build_optimizer(name, p, rate=0.1, momentum=0.9, weight_decay=0.1),
        lambda p: kind(p, lr=0.1, weight_decay=0.1, **options),
    ):
        weight = torch.nn.Parameter(torch.linspace(-1, 1, 7))
        optimizer = build([weight])
        for step in range(6):
            if step == 3:
                state = optimizer.state_dict()
                optimizer = build([weight])
                optimizer.load_state_dict(state)
            optimizer.zero_grad()
            (weight * weight.detach().cos() + weight**3).sum().backward()
            optimizer.step()
        assert not weight.grad.requires_grad
        weights.append(weight.detach())
    assert torch.equal(*weights)


LAMBDAS = {  # of 48 steps in 4 epochs on two ranks: the length of one process, or None
    "a line": (lambda step: min(1, step / 5) * max(0.0, 1 - step / 96), 96),
    "a cosine": (lambda step: 0.5 * (1 + math.cos(math.pi * step / 93)), 93),
    "of this run": (lambda step: max(0.0, 1 - step / 48), None),
    "without an end": (lambda step: 0.9**step, None),
    "a rise": (lambda step: min(1.0, step / 90), None),
    "a cosine of the epochs": (lambda step: 0.5 * (1 + math.cos(math.pi * step / 4)), None),
    "a triangle that restarts": (lambda step: abs(step % 14 / 7 - 1) if step % 14 != 7 else 0.0, None),
    "an error": (lambda step: [1.0] * 48 + [0.0][step], None),
}


@pytest.mark.parametrize("case", LAMBDAS)
def test_a_function_that_falls_to_0_at_the_end_of_one_process_tells_its_length(case):
    """On two ranks, the rate ended at the half, without a word."""
    function, length = LAMBDAS[case]
    made = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        made, lambda step: function(step) if case != "an error" or step else 1.0
    )
    assert length_of_lambdas(scheduler, 48, 4, {1, 2}) == length
    assert length_of_lambdas(scheduler, 48, 4, {1, 2, 4}) == length  # two ranks and two micro-batches
    assert length_of_lambdas(scheduler, 48, 4, {1}) is None


OWN_SCHEDULES = {
    "its length in the rate": ("step.lr = 0.1 * (1 - step.number / (2 * len(train)))", True),
    "a variable that is its length": ("number = len(train); step.lr = 0.1 * (1 - step.number / (2 * number))", True),
    "its length in a function": ("set_rate(step)", True),
    "divided by what makes it shorter": ("step.lr = 0.1 * (1 - step.number / (len(train) // flags.accumulate))", False),
    "shown": ("print(f'{step.number / len(train):.2f}')", False),
    "of samples": ("samples = len(train) * train.batch_size", False),
    "with a variable that knows of ranks": ("k = flags.accumulate; rate = 0.1 / (len(train) / k)", False),
    "said": ("run.say(f'{step.number / len(train):.2f}')", False),
    "of a parameter of that name": ("mean_of(other)", False),
    "of another loader": ("step.lr = 0.1 * (1 - step.number / (20 * len(other)))", False),
    "of its data": ("step.lr = 0.1 * (1 - step.number / (2 * len(train.dataset)))", False),
}


@pytest.mark.parametrize("case", OWN_SCHEDULES)
def test_the_length_of_a_loader_is_that_of_one_process(case, capsys):
    line, said = OWN_SCHEDULES[case]
    before = "flags.accumulate = 2; train, other = DataLoader(DATA, 8), DataLoader(DATA, 8)"
    if line == "mean_of(other)":
        before += "\ndef mean_of(train): return 1 / len(train)"
    if line == "set_rate(step)":
        before += "\ndef set_rate(step): step.lr = 0.1 * (1 - step.number / (2 * len(train)))"
    run(dict(before=before, data="train", at_step=line))
    expected = (
        "warning: len(train) is 5, the steps of one process, and an epoch has 3: compute with run.total_steps(train, 1)"
    )
    assert capsys.readouterr().out.count(expected) == said
