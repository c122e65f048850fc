"""The run object on every rank: means over unlike parts, two optimizers, parameters that some ranks do not use."""

import contextlib
import copy
import itertools
import math
import random
import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import BatchSampler, DataLoader, Dataset, SequentialSampler

from hvdtrain import training
from hvdtrain.checkpoint.checkpoints import Checkpoints
from hvdtrain.checkpoint.writer import CheckpointInterval
from hvdtrain.engines.compression import carries_bf16
from hvdtrain.engines.errors import Failure, UserError
from hvdtrain.engines.modules import flatten, floating_buffers
from hvdtrain.inputs.sharding import epoch_order
from hvdtrain.loop.start import started
from hvdtrain.loop.stopping import Stopped
from hvdtrain.output.metric_names import Metric
from tests.single.training.small import fit

N = 22  # with batches of 4: at 3 ranks the last step has 10 samples, at 2 ranks 6
X = torch.randn(N, 3, generator=torch.Generator().manual_seed(1))
Y = X.sum(1, keepdim=True).sin()


@contextlib.contextmanager
def a_run(engine, *argv, **defaults):
    parser = training.parser("test", None, **{"epochs": 2, "batch_size": 4} | defaults)
    flags = parser.parse(["--engine", engine.name, "--no-progress", *argv])
    with started(engine, flags, {"loss": Metric("min")}) as run:
        yield run


def alone(net: nn.Module, optimizer: torch.optim.Optimizer, batch: int, loss_of) -> None:
    """Plain torch with the global batch: the reference."""
    for epoch in range(2):
        for indices in epoch_order(N, 1, epoch).split(batch):
            optimizer.zero_grad()
            loss_of(net, indices).backward()
            optimizer.step()


def same(net: nn.Module, other: nn.Module) -> None:
    torch.testing.assert_close(dict(net.state_dict()), dict(other.state_dict()), rtol=1e-4, atol=1e-6)


class Louder(torch.optim.SGD):
    """Keeps an argument as an attribute, not in its groups."""

    def __init__(self, params, lr=0.01, times=1.0):
        super().__init__(params, lr=lr)
        self.times = times

    def step(self, closure=None):
        for parameter in (parameter for group in self.param_groups for parameter in group["params"]):
            parameter.grad.mul_(self.times)
        super().step(closure)


OPTIMIZERS = {
    "state from the constructor": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.5),
    "an argument that is an attribute": lambda p: Louder(p, lr=0.01, times=5.0),
}


@pytest.mark.parametrize("case", OPTIMIZERS)
def test_an_optimizer_has_what_its_constructor_was_given(engine, case):
    """Horovod makes another one of its class, from the parameters alone."""
    with a_run(engine) as run:
        torch.manual_seed(5)
        net = nn.Linear(3, 1)
        model, _ = run.prepare(net, OPTIMIZERS[case](net.parameters()))
        fit(run, [X, Y], lambda step, x, y: F.mse_loss(model(x), y))
    torch.manual_seed(5)
    plain = nn.Linear(3, 1)
    alone(plain, OPTIMIZERS[case](plain.parameters()), 4 * engine.size, lambda net, i: F.mse_loss(net(X[i]), Y[i]))
    same(net, plain)


@pytest.mark.parametrize("rank", [0, -1])
def test_a_loss_over_all_ranks_that_is_not_finite_on_one_ends_every_rank(rank, engine):
    with pytest.raises(Failure, match="gradients are not finite"), a_run(engine) as run:
        net = nn.Linear(3, 4)
        model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        bad = math.nan if run.rank == rank % run.size else 1.0

        def loss_of(step, x):
            z = model(x)
            return (z * bad).mean() + run.gather(z).square().mean()

        fit(run, [X], loss_of, epochs=1)


@pytest.mark.parametrize("flags", ["--compression none", "--compression fp16", "--accumulate 2"])
def test_weights_in_channels_last_train_as_contiguous_ones_and_resume(engine, flags, shared_directory):
    images = torch.randn(N, 3, 4, 4, generator=torch.Generator().manual_seed(1))

    def trained(memory_format: torch.memory_format, epochs: int, *more: str) -> list[torch.Tensor]:
        with a_run(engine, *flags.split(), *more, epochs=epochs) as run:
            torch.manual_seed(5)
            net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 1)).to(memory_format=memory_format)
            model, optimizer = run.prepare(net, torch.optim.Adam(net.parameters(), lr=0.01))
            fit(run, [images], lambda step, x: model(x.contiguous(memory_format=memory_format)).square().mean())
            weight = net[0].weight
            assert optimizer.state[weight]["exp_avg"].stride() == weight.grad.stride() == weight.stride()
        return [parameter.detach().clone() for parameter in net.parameters()]

    plain = trained(torch.contiguous_format, 3)
    whole = trained(torch.channels_last, 3)
    trained(torch.channels_last, 2, "--output-dir", shared_directory)
    resumed = trained(torch.channels_last, 3, "--output-dir", shared_directory)
    assert not whole[0].is_contiguous()
    assert all(torch.allclose(a, b, rtol=1e-2, atol=1e-4) for a, b in zip(plain, whole, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(whole, resumed, strict=True))


def test_a_model_in_bfloat16_trains_and_stays_alike_on_all_ranks(engine):
    if engine.name == "horovod" and not carries_bf16():
        pytest.skip("this Horovod was built without launch/patches/25")
    with a_run(engine) as run:
        torch.manual_seed(5)
        net = nn.Linear(3, 2).bfloat16()
        model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        begun = net.weight.detach().clone()
        fit(run, [X], lambda step, x: model(x.bfloat16()).float().square().mean())
        ends = engine.all_gather_object(net.weight.tolist(), "ends")
    assert net.weight.dtype == torch.bfloat16
    assert not torch.equal(net.weight, begun)
    assert all(end == ends[0] for end in ends)


class Branches(nn.Module):
    """Rank r uses branch r % 2 in odd steps, nobody uses the third."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(3, 3)
        self.branches = nn.ModuleList(nn.Linear(3, 1) for _ in range(3))

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        return self.branches[which](self.trunk(x))


def test_parameters_that_only_some_ranks_use(engine):
    with a_run(engine, epochs=1) as run:
        net = Branches()
        before = net.branches[2].weight.clone()
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)  # which would decay what has a gradient of zero
        model, _ = run.prepare(net, optimizer, find_unused_parameters=True)
        fit(run, [X], lambda step, x: model(x, run.rank % 2 if step.number % 2 else 0).mean())
        assert torch.equal(net.branches[2].weight, before)
        ends = engine.all_gather_object([p.sum().item() for p in net.parameters()], "ends")
        assert all(end == ends[0] for end in ends)


def test_a_rank_whose_loss_does_not_depend_on_the_model_adds_nothing(engine):
    """As a detector's where a batch has no target. The other ranks' gradients count as they are."""
    with a_run(engine, epochs=1) as run:
        net = nn.Linear(3, 1)
        start = net.weight.detach().clone()
        model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), find_unused_parameters=True)
        last = engine.size - 1
        constant = torch.tensor(0.0, requires_grad=True)
        fit(run, [X], lambda step, x: constant if run.rank == last else model(x).sum())
        ends = engine.all_gather_object(net.weight.tolist(), "ends")
        assert all(end == ends[0] for end in ends)
        assert torch.equal(net.weight, start) == (engine.size == 1)


class WithoutClosure(torch.optim.SGD):
    def step(self) -> None:
        super().step()


def test_an_optimizer_whose_step_takes_no_closure(engine):
    with a_run(engine, epochs=1) as run:
        net = nn.Linear(3, 1)
        start = net.weight.detach().clone()
        model, _ = run.prepare(net, WithoutClosure(net.parameters(), lr=0.1))
        fit(run, [X], lambda step, x: model(x).sum())
        assert not torch.equal(net.weight, start)


def test_a_gradient_missing_on_one_rank_is_named_on_all(engine):
    if engine.name != "horovod":
        pytest.skip("only Horovod's gradients tell the others")
    complaint = r"branches\.1\.weight got no gradient"
    with pytest.raises(UserError, match=complaint), a_run(engine, epochs=1) as run:
        net = Branches()
        del net.branches[2]
        model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        # rank 0 leaves out branch 1
        fit(run, [X], lambda step, x: (model(x, 0) + (model(x, 1) if run.rank else 0.0)).mean())


def test_of_gradients_that_are_not_finite_the_rank_is_named_and_by_a_second_run_the_layer(engine, shared_directory):
    """The second run goes on after the step before."""
    samples, taken, said = X.clone(), [], []
    samples[epoch_order(N, 1, 0)[2 * engine.size : 4 * engine.size][engine.size - 1]] = float("nan")  # of the last rank
    for argv in ((), ("--find-non-finite",)):
        flags = (*argv, "--checkpoint-steps", "1", "--output-dir", shared_directory)
        with pytest.raises(Failure) as raised, a_run(engine, *flags, epochs=1, batch_size=2) as run:
            net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
            model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))

            def loss_of(step, x, model=model):
                taken.append(step.number)
                return model(x).mean()

            fit(run, [samples], loss_of)
        said.append(str(raised.value))
    blamed = f"step 2: gradients are not finite: rank {engine.size - 1} on "
    assert all(line.startswith(blamed) for line in said)
    assert said[0].endswith(
        "--max-skipped 0: the same command with --find-non-finite continues from the last checkpoint, and names the layer"
    )
    assert ", input of 0 (Linear); " in said[1]
    assert taken == [1, 2, 2]


@pytest.mark.parametrize("connected", [True, False])
def test_when_a_checkpoint_is_saved_changes_no_bit(engine, connected, monkeypatch, shared_directory):
    """Rank 0 alone draws lots. Saving is a collective: if ranks did not agree on the step, they would hang."""

    def refuse(hosts):
        raise OSError("no listener")

    if not connected:
        monkeypatch.setattr("hvdtrain.guards.connection.listen", refuse)
    chance = random.Random(7)
    ends, steps, save = [], [], Checkpoints.save

    def noted(self, state, source, moment, **about):
        if about.get("automatic"):
            steps.append(state.step)
        save(self, state, source, moment, **about)

    monkeypatch.setattr(Checkpoints, "save", noted)
    for due in (lambda: False, lambda: engine.rank == 0 and chance.random() < 0.4):
        due_at = property(lambda self, due=due: 0.0 if due() else math.inf, lambda self, at: None)
        monkeypatch.setattr(CheckpointInterval, "due_at", due_at, raising=False)
        with a_run(engine, "--output-dir", f"{shared_directory}/{len(ends)}", epochs=3) as run:
            torch.manual_seed(5)
            net = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))
            model, _ = run.prepare(net, torch.optim.Adam(net.parameters(), lr=0.1))
            fit(run, [X, Y], lambda step, x, y, model=model: F.mse_loss(model(x), y))
        ends.append([p.tolist() for p in net.parameters()])
        assert bool(steps) == (len(ends) == 2)  # automatic ones in the second run alone
    assert ends[0] == ends[1]
    assert engine.all_gather_object(steps, "steps") == [steps] * engine.size


class OwnGenerators(Dataset):
    """Draws what differs between ranks, as hosts and libraries do; the last part is the sample."""

    def __init__(self, rank):
        self.random, self.rank = random.Random(rank), rank

    def __len__(self):
        return N

    def __getitem__(self, index):
        decoded = torch.arange(100.0) + index + 1e-3 * self.rank
        noise = torch.rand(3) + self.random.random()
        return {"noise": noise, "decoded": decoded, "path": f"/scratch/{self.rank}/{index}", "x": X[index]}


@pytest.mark.parametrize("workers", [0, 1])
def test_ranks_that_read_the_same_samples_in_their_own_way_train(engine, workers):
    seen = []
    with a_run(engine, epochs=1) as run:
        net = nn.Linear(3, 1)
        model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        for _ in run.epochs(1):
            for step in run.steps(DataLoader(OwnGenerators(engine.rank), 4, shuffle=True, num_workers=workers)):
                for batch in step.batches():
                    seen += step.batch.indices[: step.batch.count].tolist()
                    step.backward(model(batch["x"] + batch["noise"]).mean())
                step.update()
    assert sorted(itertools.chain(*engine.all_gather_object(seen, "seen"))) == list(range(N))


def left_in(samples):
    kept = [sample for sample in samples if sample[0] != X[1, 0] and sample[0] != X[4, 0]]
    return torch.stack(kept) if kept else None


def test_samples_that_a_collate_fn_leaves_out_on_one_rank_do_not_count_on_any(engine):
    """Nor in an evaluation."""
    with a_run(engine) as run:
        torch.manual_seed(5)
        net = nn.Linear(3, 1)
        model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        loader = DataLoader(list(X), 4, shuffle=True, collate_fn=left_in)
        fit(run, [loader], lambda step, x: model(x).square().mean())
        with run.evaluating(loader) as mine:
            for x in mine:
                run.record(loss=x[:, 0])
    torch.manual_seed(5)
    plain = nn.Linear(3, 1)
    kept = torch.tensor([i not in (1, 4) for i in range(N)])
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    alone(plain, optimizer, 4 * engine.size, lambda net, i: net(X[i[kept[i]]]).square().mean())
    same(net, plain)
    assert run.evaluation == pytest.approx({"loss": X[kept, 0].mean().item(), "count": N - 2})


@pytest.mark.parametrize("batches", [False, True])
def test_a_step_of_whole_batches_or_without_the_last_has_enough_for_batch_norm(engine, batches):
    """33 samples: one is left over. Or five batches, which leave a rank without one."""
    data = list(torch.randn(33, 3, generator=torch.Generator().manual_seed(1)))
    sampler = BatchSampler(SequentialSampler(data[:20]), 4, drop_last=True)
    loader = DataLoader(data, batch_sampler=sampler) if batches else DataLoader(data, 4, drop_last=True)
    seen = []
    with a_run(engine, epochs=1) as run:
        net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))

        def loss_of(step, x):
            seen.append(step.batch.count)
            return model(x).std(0).sum()

        fit(run, [loader], loss_of)
    whole = 20 if batches else 33 - 33 % (4 * engine.size)
    assert sum(itertools.chain(*engine.all_gather_object(seen, "seen"))) == whole


@pytest.mark.parametrize("use_buffers", [True, False])
def test_an_average_of_weights_keeps_each_ranks_statistics(engine, use_buffers, shared_directory):
    """Of a network with batch norm: in a checkpoint within an epoch, in a resumed run, in --evaluate and in an export."""
    torch.manual_seed(5)
    start = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))

    def train(name: str, *flags: str, stop: int = 0) -> dict[str, float]:
        with contextlib.suppress(Stopped), a_run(engine, "--output-dir", f"{shared_directory}/{name}", *flags) as run:
            net = copy.deepcopy(start)
            model, _ = run.prepare(net, torch.optim.Adam(net.parameters(), lr=0.1))
            average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=use_buffers)
            run.register(average=average)
            for _ in run.epochs(2):
                for step in run.steps(X, Y):
                    for x, y in step.batches():
                        step.backward(F.mse_loss(model(x), y))
                    step.update()
                    average.update_parameters(net)
                    if step.number == stop:
                        run.stopping.watch.request_stop("the test")
                with run.evaluating(N) as mine:
                    run.record(loss=F.mse_loss(average(X[mine]), Y[mine], reduction="sum"))
            run.export(f"{shared_directory}/{name}.pt", average)
        return run.evaluation

    whole = train("whole")
    assert train("stopped", stop=1) == {}
    assert train("stopped") == whole
    assert train("evaluated", "--evaluate", f"{shared_directory}/whole") == whole
    exported = AveragedModel(start)
    exported.load_state_dict(torch.load(f"{shared_directory}/whole.pt"))
    exported.eval()
    assert F.mse_loss(exported(X), Y).item() == pytest.approx(whole["loss"], rel=1e-5)


def test_statistics_that_a_registered_module_shares_with_the_model_are_averaged_once(engine, monkeypatch):
    """Averaging the means again could change their bits."""
    averaged: list[int] = []
    average = type(engine).average_
    monkeypatch.setattr(
        type(engine), "average_", lambda engine, tensors: averaged.append(len(tensors)) or average(engine, tensors)
    )
    with a_run(engine) as run:
        net = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
        model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        run.register(body=nn.Sequential(net[0], net[1]))
        fit(run, [X, Y], lambda step, x, y: F.mse_loss(model(x), y))
        with run.evaluating(N) as mine:
            run.record(loss=F.mse_loss(net(X[mine]), Y[mine], reduction="sum"))
    assert averaged == [2 * (engine.size > 1)]


def evaluated(engine, directory, stop: int | None) -> tuple[list, list]:
    """Train with four evaluations, of which number `stop` is stopped. Return the losses of the weights and of their average
    in each, and the state of both."""
    losses: list[list[float]] = []
    own = torch.zeros(0)  # the statistics that the repeated evaluations begin with
    with contextlib.suppress(Stopped), a_run(engine, "--output-dir", str(directory), epochs=2) as run:
        torch.manual_seed(5)
        net = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
        model, _ = run.prepare(net, torch.optim.Adam(net.parameters(), lr=0.1))
        average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)
        run.register(average=average)

        def statistics() -> torch.Tensor:
            return flatten(floating_buffers([net, average]))

        def evaluate() -> None:
            with run.evaluating(N) as mine:
                if len(losses) == stop and engine.rank == engine.size - 1:
                    run.stopping.watch.request_stop("the test")
                    while not run.stopping.watch.stop_reason:  # rank 0 tells all
                        time.sleep(0.01)
                for name, judged in (("loss", net), ("averaged", average)):
                    run.record(**{name: F.mse_loss(judged(X[mine]), Y[mine], reduction="sum")})
            losses.append([run.evaluation["loss"], run.evaluation["averaged"]])

        for epoch in run.epochs(2):
            for step in run.steps(X, Y):
                for x, y in step.batches():
                    step.backward(F.mse_loss(model(x), y))
                step.update()
                average.update_parameters(net)
            own = statistics()
            evaluate()
            if epoch == 0:
                evaluate()
        own = statistics()
        evaluate()
    if stop is not None:
        assert torch.equal(statistics(), own)
    return losses, [tensor.tolist() for part in (net, average) for tensor in part.state_dict().values()]


@pytest.fixture(scope="module")
def undisturbed(engine, tmp_path_factory):
    losses, weights = evaluated(engine, tmp_path_factory.mktemp("undisturbed"), None)
    assert len(losses) == 4
    return losses, weights


@pytest.mark.parametrize("stop", [0, 1, 2, 3], ids=["first", "second", "in a later epoch", "after the last epoch"])
def test_an_evaluation_that_was_stopped_and_repeated_ends_with_the_same_bits(
    engine, stop, undisturbed, shared_directory
):
    """Each rank has its own batch statistics, and an evaluation averages them. Averaging twice changes bits, on 8 ranks."""
    whole, weights = undisturbed
    before, _ = evaluated(engine, shared_directory, stop)
    after, resumed = evaluated(engine, shared_directory, None)
    repeated = [0, 0, 2, 3][stop]  # an epoch's evaluations are repeated from its first
    assert before == whole[:stop]
    assert after == whole[repeated:]
    assert resumed == weights
