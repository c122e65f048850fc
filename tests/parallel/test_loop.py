"""The run object on every rank: means over unlike parts, two optimizers, parameters that some ranks do not use."""

import contextlib
import copy
import itertools
import math
import random
import time
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler, TensorDataset

from hvdtrain import training
from hvdtrain.checkpoint.saving import Checkpoints
from hvdtrain.checkpoint.writer import CheckpointInterval
from hvdtrain.engines.compression import carries_bf16
from hvdtrain.engines.errors import Failure, UserError
from hvdtrain.engines.modules import flatten, floating_buffers
from hvdtrain.inputs.sharding import epoch_order
from hvdtrain.loop.start import started
from hvdtrain.loop.stopping import Stopped
from hvdtrain.output.metric_names import Metric
from tests.single.training.small import Trained, squares

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


def trained(engine, *argv, **how) -> Trained:
    """Train on all ranks; what is not given is a linear layer's regression in two epochs of batches of 4 on each."""

    @contextlib.contextmanager
    def start(*words, metrics, **defaults):
        with contextlib.suppress(Stopped), a_run(engine, *words, **defaults) as run:
            yield run

    return Trained(*argv, start=start, **dict(net=lambda: nn.Linear(3, 1), data=(X, Y), batch_size=4) | how)


SGD = partial(torch.optim.SGD, lr=0.1)


def equals_plain(engine, make, loss=lambda net, x, y: F.mse_loss(net(x), y), optimizer=SGD) -> None:
    """Compare with a loop of plain torch that has the global batch."""
    net = trained(engine, net=make, optimizer=optimizer, loss=lambda t, x, y: loss(t.model, x, y), seed=5).net
    torch.manual_seed(5)
    plain = make()
    alone(plain, optimizer(plain.parameters()), 4 * engine.size, lambda net, i: loss(net, X[i], Y[i]))
    same(net, plain)


def alike(engine, net: nn.Module) -> bool:
    """Return whether the weights are the same on all ranks."""
    own = [parameter.tolist() for parameter in net.parameters()]
    return engine.all_gather_object(own, "ends") == [own] * engine.size


class Louder(torch.optim.SGD):
    """Keeps an argument as an attribute, not in its groups."""

    def __init__(self, params, lr=0.01, times=1.0):
        super().__init__(params, lr=lr)
        self.times = times

    def step(self, closure=None):
        for parameter in (parameter for group in self.param_groups for parameter in group["params"]):
            parameter.grad.mul_(self.times)
        super().step(closure)


class WithoutClosure(torch.optim.SGD):
    def step(self) -> None:
        super().step()


OPTIMIZERS = {
    "a step without a closure": partial(WithoutClosure, lr=0.1),
    "state from the constructor": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.5),
    "an argument that is an attribute": lambda p: Louder(p, lr=0.01, times=5.0),
}


@pytest.mark.parametrize("case", OPTIMIZERS)
def test_an_optimizer_has_what_its_constructor_was_given(engine, case):
    """Horovod makes another one of its class, from the parameters alone."""
    equals_plain(engine, lambda: nn.Linear(3, 1), optimizer=OPTIMIZERS[case])


@pytest.mark.parametrize("rank", [0, -1])
def test_a_loss_over_all_ranks_that_is_not_finite_on_one_ends_every_rank(rank, engine):
    def loss(t, x):
        z = t.model(x)
        bad = math.nan if engine.rank == rank % engine.size else 1.0
        return (z * bad).mean() + t.run.gather(z).square().mean()

    with pytest.raises(Failure, match="gradients are not finite"):
        trained(engine, net=nn.Linear(3, 4), data=[X], loss=loss, epochs=1)


@pytest.mark.parametrize(
    "flags", ["--compression fp16", *(pytest.param(flags, marks=pytest.mark.slow) for flags in ("", "--accumulate 2"))]
)
def test_weights_in_channels_last_train_as_contiguous_ones_and_resume(engine, flags, shared_directory):
    images = torch.randn(N, 3, 4, 4, generator=torch.Generator().manual_seed(1))

    def result(memory_format: torch.memory_format, epochs: int, out=None) -> list[torch.Tensor]:
        make = lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 1)).to(memory_format=memory_format)  # noqa: E731
        t = trained(engine, *flags.split(), out=out, epochs=epochs, net=make, data=[images], seed=5,
                    optimizer=partial(torch.optim.Adam, lr=0.01),
                    loss=lambda t, x: t.model(x.contiguous(memory_format=memory_format)).square().mean())  # fmt: skip
        weight = t.net[0].weight
        assert t.optimizer.state[weight]["exp_avg"].stride() == weight.grad.stride() == weight.stride()
        return [parameter.detach().clone() for parameter in t.net.parameters()]

    plain = result(torch.contiguous_format, 3)
    whole = result(torch.channels_last, 3)
    result(torch.channels_last, 2, shared_directory)
    resumed = result(torch.channels_last, 3, shared_directory)
    assert not whole[0].is_contiguous()
    assert all(torch.allclose(a, b, rtol=1e-2, atol=1e-4) for a, b in zip(plain, whole, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(whole, resumed, strict=True))


def test_a_model_in_bfloat16_trains_and_stays_alike_on_all_ranks(engine):
    if engine.name == "horovod" and not carries_bf16():
        pytest.skip("this Horovod was built without launch/patches/25")
    net = nn.Linear(3, 2).bfloat16()
    begun = []
    trained(engine, net=net, data=[X], loss=lambda t, x: t.model(x.bfloat16()).float().square().mean(),
            before=lambda t: begun.append(net.weight.detach().clone()))  # fmt: skip
    assert net.weight.dtype == torch.bfloat16
    assert not torch.equal(net.weight, *begun)
    assert alike(engine, net)


class Branches(nn.Module):
    """Rank r uses branch r % 2 in odd steps, nobody uses the third."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(3, 3)
        self.branches = nn.ModuleList(nn.Linear(3, 1) for _ in range(3))

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        return self.branches[which](self.trunk(x))


def test_parameters_that_only_some_ranks_use(engine):
    kept = []
    net = trained(
        engine, net=Branches, data=[X], epochs=1, find_unused_parameters=True,
        optimizer=partial(torch.optim.AdamW, lr=0.1),  # which would decay what has a gradient of zero
        before=lambda t: kept.append(t.net.branches[2].weight.clone()),
        loss=lambda t, x: t.model(x, engine.rank % 2 if t.step.number % 2 else 0).mean(),
    ).net  # fmt: skip
    assert torch.equal(net.branches[2].weight, *kept)
    assert alike(engine, net)


def test_a_rank_whose_loss_does_not_depend_on_the_model_adds_nothing(engine):
    """As a detector's where a batch has no target. The other ranks' gradients count as they are."""
    started_with, constant = [], torch.tensor(0.0, requires_grad=True)
    net = trained(
        engine, data=[X], epochs=1, find_unused_parameters=True,
        before=lambda t: started_with.append(t.net.weight.detach().clone()),
        loss=lambda t, x: constant if engine.rank == engine.size - 1 else t.model(x).sum(),
    ).net  # fmt: skip
    assert alike(engine, net)
    assert torch.equal(net.weight, *started_with) == (engine.size == 1)


def test_a_gradient_missing_on_one_rank_is_named_on_all(engine):
    if engine.name != "horovod":
        pytest.skip("only Horovod's gradients tell the others")
    net = Branches()
    del net.branches[2]  # and rank 0 leaves out branch 1
    with pytest.raises(UserError, match=r"branches\.1\.weight got no gradient"):
        trained(engine, net=net, data=[X], epochs=1,
                loss=lambda t, x: (t.model(x, 0) + (t.model(x, 1) if engine.rank else 0.0)).mean())  # fmt: skip


def test_of_gradients_that_are_not_finite_the_rank_is_named_and_by_a_second_run_the_layer(engine, shared_directory):
    """The second run goes on after the step before."""
    samples, taken, said = X.clone(), [], []
    samples[epoch_order(N, 1, 0)[2 * engine.size : 4 * engine.size][engine.size - 1]] = float("nan")  # of the last rank
    for argv in ((), ("--find-non-finite",)):

        def loss(t, x):
            taken.append(t.step.number)
            return t.model(x).mean()

        with pytest.raises(Failure) as raised:
            trained(engine, *argv, "--checkpoint-steps", "1", out=shared_directory, data=[samples], epochs=1, batch_size=2,
                    net=lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)), loss=loss)  # fmt: skip
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
        monkeypatch.setattr("hvdtrain.guards.connection.listen_for_ranks", refuse)
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
        make = lambda: nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))  # noqa: E731
        net = trained(engine, out=f"{shared_directory}/{len(ends)}", epochs=3, net=make, seed=5,
                      optimizer=partial(torch.optim.Adam, lr=0.1)).net  # fmt: skip
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


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])  # each rank's imports torch
def test_ranks_that_read_the_same_samples_in_their_own_way_train(engine, workers):
    seen = []

    def loss(t, batch):
        seen.extend(t.step.batch.indices[: t.step.batch.count].tolist())
        return t.model(batch["x"] + batch["noise"]).mean()

    trained(
        engine, data=[DataLoader(OwnGenerators(engine.rank), 4, shuffle=True, num_workers=workers)], loss=loss, epochs=1
    )
    assert sorted(itertools.chain(*engine.all_gather_object(seen, "seen"))) == list(range(N))


def left_in(samples):
    kept = [sample for sample in samples if sample[0] != X[1, 0] and sample[0] != X[4, 0]]
    return torch.stack(kept) if kept else None


def test_samples_that_a_collate_fn_leaves_out_on_one_rank_do_not_count_on_any(engine):
    """Nor in an evaluation."""
    loader = DataLoader(list(X), 4, shuffle=True, collate_fn=left_in)

    def evaluate(t):
        with t.run.evaluating(loader) as mine:
            for x in mine:
                t.run.record(loss=x[:, 0])

    t = trained(engine, data=[loader], loss=squares, end=evaluate, seed=5)
    torch.manual_seed(5)
    plain = nn.Linear(3, 1)
    kept = torch.tensor([i not in (1, 4) for i in range(N)])
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    alone(plain, optimizer, 4 * engine.size, lambda net, i: net(X[i[kept[i]]]).square().mean())
    same(t.net, plain)
    assert t.run.evaluation == pytest.approx({"loss": X[kept, 0].mean().item(), "count": N - 2})


def test_a_step_of_several_data_sets_takes_tensors(engine):
    counts = []

    def loss(t, batch):
        counts.append(len(batch["b"][1]) * (t.step.batch.count > 0))
        return t.model(batch["a"][0]).mean() + t.model(batch["b"][0]).mean()

    trained(engine, data=[{"a": (X,), "b": (X, Y)}], loss=loss, epochs=1)
    assert sum(engine.all_gather_object(sum(counts), "count")) == len(X)


@pytest.mark.parametrize("batches", [False, True])
def test_a_step_of_whole_batches_or_without_the_last_has_enough_for_batch_norm(engine, batches):
    """33 samples: one is left over. Or five batches, which leave a rank without one."""
    data = list(torch.randn(33, 3, generator=torch.Generator().manual_seed(1)))
    sampler = BatchSampler(SequentialSampler(data[:20]), 4, drop_last=True)
    loader = DataLoader(data, batch_sampler=sampler) if batches else DataLoader(data, 4, drop_last=True)
    seen = []

    def loss(t, x):
        seen.append(t.step.batch.count)
        return t.model(x).std(0).sum()

    trained(engine, net=nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), data=[loader], loss=loss, epochs=1)
    whole = 20 if batches else 33 - 33 % (4 * engine.size)
    assert sum(itertools.chain(*engine.all_gather_object(seen, "seen"))) == whole


@pytest.mark.parametrize("use_buffers", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_an_average_of_weights_keeps_each_ranks_statistics(engine, use_buffers, shared_directory):
    """Of a network with batch norm: in a checkpoint within an epoch, in a resumed run, in --evaluate and in an export."""
    torch.manual_seed(5)
    start = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))

    def train(name: str, *flags: str, stop: int = 0) -> dict[str, float]:
        def each(t):
            t.average.update_parameters(t.net)
            if t.step.number == stop:
                t.run.stopping.watch.request_stop("the test")

        def evaluate(t, epoch):
            with t.run.evaluating(N) as mine:
                t.run.record(loss=F.mse_loss(t.average(X[mine]), Y[mine], reduction="sum"))

        average = partial(AveragedModel, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=use_buffers)
        return trained(
            engine, *flags, out=f"{shared_directory}/{name}", net=lambda: copy.deepcopy(start), each=each, tail=evaluate,
            optimizer=partial(torch.optim.Adam, lr=0.1), registered=lambda t: dict(average=average(t.net)),
            end=lambda t: t.run.export(f"{shared_directory}/{name}.pt", t.average),
        ).run.evaluation  # fmt: skip

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

    def evaluate(t):
        with t.run.evaluating(N) as mine:
            t.run.record(loss=F.mse_loss(t.net(X[mine]), Y[mine], reduction="sum"))

    trained(engine, net=nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)), end=evaluate,
            registered=lambda t: dict(body=nn.Sequential(t.net[0], t.net[1])))  # fmt: skip
    assert averaged == [2 * (engine.size > 1)]


def evaluated(engine, directory, stop: int | None) -> tuple[list, list]:
    """Train with four evaluations, of which number `stop` is stopped. Return the losses of the weights and of their average
    in each, and the state of both."""
    losses: list[list[float]] = []
    own = []  # the statistics that the repeated evaluations begin with

    def statistics(t) -> torch.Tensor:
        return flatten(floating_buffers([t.net, t.average]))

    def evaluate(t, again=False) -> None:
        if not again:
            own.append(statistics(t).clone())
        with t.run.evaluating(N) as mine:
            if len(losses) == stop and engine.rank == engine.size - 1:
                t.run.stopping.watch.request_stop("the test")
                while not t.run.stopping.watch.stop_reason:  # rank 0 tells all
                    time.sleep(0.01)
            for name, judged in (("loss", t.net), ("averaged", t.average)):
                t.run.record(**{name: F.mse_loss(judged(X[mine]), Y[mine], reduction="sum")})
        losses.append([t.run.evaluation["loss"], t.run.evaluation["averaged"]])

    average = partial(AveragedModel, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)
    t = trained(
        engine, out=directory, optimizer=partial(torch.optim.Adam, lr=0.1), seed=5, end=evaluate,
        net=lambda: nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)),
        registered=lambda t: dict(average=average(t.net)), each=lambda t: t.average.update_parameters(t.net),
        tail=lambda t, epoch: (evaluate(t), evaluate(t, again=True) if epoch == 0 else None),
    )  # fmt: skip
    if stop is not None:
        assert torch.equal(statistics(t), own[-1])
    return losses, [tensor.tolist() for part in (t.net, t.average) for tensor in part.state_dict().values()]


@pytest.fixture(scope="module")
def undisturbed(engine, tmp_path_factory):
    losses, weights = evaluated(engine, tmp_path_factory.mktemp("undisturbed"), None)
    assert len(losses) == 4
    return losses, weights


@pytest.mark.parametrize("stop", [0, 2, *(pytest.param(number, marks=pytest.mark.slow) for number in (1, 3))])
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


@pytest.mark.parametrize("unequal", [True, False])
def test_rows_of_unequal_numbers_are_not_found_by_the_rank(engine, unequal, capsys):
    """Labels of a contrastive loss were those of other rows in the last step, which has fewer samples on some ranks."""
    with a_run(engine, epochs=1) as run:
        net = nn.Linear(3, 1)
        model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        for _ in run.epochs(1):
            for step in run.steps(X[: (N - (engine.size == 2)) if unequal else 4 * engine.size]):
                for (rows,) in step.batches():
                    every = run.gather(model(rows))
                    labels = len(rows) * run.rank
                    step.backward((every[min(labels, len(every) - 1)] - model(rows)).square().mean())
                step.update()
    said = capsys.readouterr().out.count("the rows of a rank begin at step.batch.first")
    assert said == (engine.rank == 0 and engine.size > 1 and unequal)


def test_values_recorded_in_another_order_or_on_some_ranks_alone_are_not_mixed(engine):
    with a_run(engine, "--log-steps", "1", epochs=1) as run:
        model, _ = run.prepare(net := nn.Linear(3, 1), torch.optim.SGD(net.parameters(), lr=0.1))
        for _ in run.epochs(1):
            for step in run.steps(X):
                for (rows,) in step.batches():
                    step.backward(model(rows).mean())
                    names = {"a": 1.0, "b": 100.0} | {f"of {engine.rank}": 7.0 + engine.rank}
                    for name in sorted(names, reverse=engine.rank == 0):
                        step.record(**{name: torch.tensor(names[name])})
                step.update()
        assert math.isfinite(run.state.train["loss"])
        of_ranks = {f"of {rank}": 7.0 + rank for rank in range(engine.size)}
        assert run.state.train.items() >= ({"a": 1.0, "b": 100.0} | of_ranks).items()


@pytest.mark.parametrize("known", [False, True])
def test_a_mean_loss_of_ones_own_is_that_of_one_rank(engine, known, capsys):
    with a_run(engine, epochs=1) as run:
        net, train = nn.Linear(3, 1), DataLoader(TensorDataset(X), 4)
        model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        (own_mean if not known else mean_of_all)(run, model, train)
    line = "warning: running / len(train.dataset) has the samples of this rank alone: step.record() and step.loss are of all"
    assert capsys.readouterr().out.count(line) == (engine.rank == 0 and engine.size > 1 and not known)


def own_mean(run, model, train):
    for _ in run.epochs(1):
        running = 0.0
        for step in run.steps(train):
            for (rows,) in step.batches():
                step.backward(loss := model(rows).square().mean())
                running += loss.item() * len(rows)
            step.update()
        run.say(f"{running / len(train.dataset):.3f}")


def mean_of_all(run, model, train):
    for _ in run.epochs(1):
        for step in run.steps(train):
            for (rows,) in step.batches():
                step.backward(model(rows).square().mean())
            step.update()
            run.say(f"{step.loss:.3f} {step.number / len(train):.1f}")


@pytest.mark.parametrize("batch", [3, 40], ids=["batches", "one batch"])
def test_gathered_rows_of_an_evaluation_have_the_order_of_its_data_set(engine, batch):
    """They came by rank: pairs of samples, or a file of predictions, were those of other samples."""
    data = DataLoader(TensorDataset(torch.arange(31)), batch)
    with a_run(engine) as run:
        run.prepare(net := nn.Linear(1, 1), torch.optim.SGD(net.parameters(), lr=0.1))
        for test, count in ((data, 31), (31, 31), (DataLoader(Numbers(engine.rank), batch), 2 * engine.size)):
            with run.evaluating(test) as mine:
                rows = [torch.arange(31)[mine]] if test == 31 else [numbers for (numbers,) in mine]
            run.record(loss=1.0)
            assert run.gather(rows).tolist() == list(range(count))
        odd = [rows[0][: engine.rank + 1]]  # others come by rank
        assert len(run.gather(odd)) == sum(min(2, rank + 1) for rank in range(engine.size))


class Numbers(IterableDataset):
    """A stream: two numbers of each rank."""

    def __init__(self, rank):
        self.first = 2 * rank

    def __iter__(self):
        return ((torch.tensor(number),) for number in range(self.first, self.first + 2))
