"""The mathematics of data-parallel training: equal weights on all ranks, and the large batch's mean."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from hvdtrain.loop import optim
from hvdtrain.output.run_output import parameters_sha256
from tests.parallel.test_loop import N, a_run, alone
from tests.single.training.small import fit

FEATURES, CLASSES = 6, 4
SAMPLES = torch.randn(N, FEATURES, generator=torch.Generator().manual_seed(5))
LABELS = torch.randint(CLASSES, (N,), generator=torch.Generator().manual_seed(6))


def model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES))


def train(engine, flags="--batch-size 3", *, seed=1, name="sgd"):
    """Train two epochs; return the model, the loss over all ranks of every step, and an evaluation's."""
    losses: list[float] = []
    with a_run(engine, *flags.split()) as run:
        net = model(seed)
        replica, _ = run.prepare(net, optim.build_optimizer(name, net.parameters(), 0.1, 0.9, 1e-3))
        loss_of = lambda step, x, y: F.cross_entropy(replica(x), y)  # noqa: E731
        fit(run, [SAMPLES, LABELS], loss_of, each=lambda step: losses.append(step.loss))
        with run.evaluating(N) as mine:
            run.record(loss=F.cross_entropy(replica(SAMPLES[mine]), LABELS[mine], reduction="sum"))
        assert run.state.samples == 2 * N
        return net, losses, run.evaluation["loss"]


def train_alone(batch_size, name="sgd", gradient_factor=1):
    """One process with plain torch: the reference."""
    net, losses = model(1), []

    def loss_of(net, indices):
        loss = F.cross_entropy(net(SAMPLES[indices]), LABELS[indices])
        losses.append(loss.item())
        return loss * gradient_factor

    alone(net, optim.build_optimizer(name, net.parameters(), 0.1, 0.9, 1e-3), batch_size, loss_of)
    return net, losses, F.cross_entropy(net(SAMPLES), LABELS).item()


def assert_same_weights(ours, theirs, **tolerance):
    torch.testing.assert_close(dict(ours.state_dict()), dict(theirs.state_dict()), **tolerance)


# With batch 3 the last step has 4 samples at 2 and 3 ranks; with 7 at 3 ranks it has one, for one rank alone.
EXACT = [f"--batch-size {batch} --accumulate {accumulate}" for batch in (3, 7) for accumulate in (1, 2)]
EXACT += ["--batch-size 3 --gradient-predivide-factor 4", "--batch-size 3 --reduction sum"]
ROUNDED = ["--batch-size 3 --compression fp16", "--batch-size 3 --compression fp16 --gradient-predivide-factor 3"]


@pytest.mark.parametrize(("flags", "name"), [*((flags, "sgd") for flags in (*EXACT, *ROUNDED)), (EXACT[0], "adamw")])
def test_many_ranks_are_one_process_with_the_global_batch(engine, flags, name):
    words = flags.split()
    batch = int(words[1]) * (int(words[3]) if "--accumulate" in words else 1)
    ours, losses, evaluated = train(engine, flags, name=name)
    theirs, reference, expected = train_alone(batch * engine.size, name, engine.size if "sum" in words else 1)
    near = {"rtol": 1e-2, "atol": 2e-3} if flags in ROUNDED else {"rtol": 1e-4, "atol": 1e-6}
    assert [*losses, evaluated] == pytest.approx([*reference, expected], rel=2e-3 if flags in ROUNDED else 1e-5)
    assert_same_weights(ours, theirs, **near)


def test_overflow_on_one_rank_skips_the_step_on_all(engine):
    """Loss scaling (`--amp fp16`): the ranks must take the same decision, or they train on different weights."""
    net = nn.Linear(1, 1, bias=False)
    nn.init.ones_(net.weight)
    replica, optimizer = engine.distribute(net, torch.optim.SGD(net.parameters(), lr=1.0))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(2):  # overflows at step 0, on the last rank only
        optimizer.zero_grad()
        x = float("inf") if step == 0 and engine.rank == engine.size - 1 else 0.25
        with engine.micro_batch([replica], [optimizer], 0, 1):
            scaler.scale(replica(torch.tensor([[x]])).sum()).backward()
        engine.synchronize(optimizer)
        with engine.stepping(optimizer):
            scaler.step(optimizer)
        scaler.update()
        assert net.weight.item() == (1.0 if step == 0 else 0.75)
        assert scaler.get_scale() == 4.0
    assert len(set(engine.all_gather_object(net.weight.item(), "weights"))) == 1


def test_small_buckets_change_nothing_but_rounding_and_repeat_to_the_bit(engine, monkeypatch):
    monkeypatch.setattr("hvdtrain.engines.buckets.bucket_bytes", lambda total: 100)
    ours, again, theirs = train(engine)[0], train(engine)[0], train_alone(3 * engine.size)[0]
    assert_same_weights(ours, theirs, rtol=1e-4, atol=1e-6)
    assert_same_weights(ours, again, rtol=0, atol=0)


def test_ranks_that_start_apart_end_with_the_same_bits(engine):
    net, *_ = train(engine, seed=1 + engine.rank, name="adamw")
    assert len(set(engine.all_gather_object(parameters_sha256(net), "hash"))) == 1
    assert_same_weights(net, train(engine, name="adamw")[0], rtol=0, atol=0)


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_broadcast_moves_neither_weights_nor_state_of_rank_zero(engine, name):
    net = model(1 + engine.rank)
    wrapped = optim.build_optimizer(name, net.parameters(), 0.1, 0.9, 0.1)
    _, optimizer = engine.distribute(net, wrapped)
    engine.broadcast(net, optimizer)
    assert optimizer.state_dict()["state"] == {}
    assert_same_weights(net, model(1), rtol=0, atol=0)  # those of rank 0 before


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_rank_without_optimizer_state_receives_it(engine, name):
    net = model(1)
    _, optimizer = engine.distribute(net, optim.build_optimizer(name, net.parameters(), 0.1, 0.9, 0.1))
    other = model(1)
    plain = optim.build_optimizer(name, other.parameters(), 0.3, 0.9, 0.1)
    F.cross_entropy(other(SAMPLES), LABELS).backward()
    plain.step()
    if engine.rank == 0:  # as after reading a checkpoint
        net.load_state_dict(other.state_dict())
        optimizer.load_state_dict(copy.deepcopy(plain.state_dict()))
    engine.broadcast(net, optimizer)
    ours, theirs = optimizer.state_dict(), plain.state_dict()
    torch.testing.assert_close(ours["state"], theirs["state"], rtol=0, atol=0)
    assert ours["param_groups"][0]["lr"] == 0.3
    assert_same_weights(net, other, rtol=0, atol=0)


def test_the_hooks_of_an_optimizer_run_once_an_update(engine):
    """Also torch's own for all optimizers: a step counter, an average of weights, a decay."""
    counts = {"own": 0, "all": 0}
    everywhere = register_optimizer_step_post_hook(lambda *_: count("all"))

    def count(name):
        counts[name] += 1

    try:
        with a_run(engine, "--batch-size", "3") as run:
            net = model(1)
            replica, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), 0.1))
            optimizer.register_step_pre_hook(lambda *_: count("own"))
            fit(run, [SAMPLES, LABELS], lambda step, x, y: F.cross_entropy(replica(x), y))
            assert counts == {"own": run.state.step, "all": run.state.step}
    finally:
        everywhere.remove()
