"""Mistakes that need several ranks, or an engine: every rank raises the same line, and none waits for another."""

import contextlib
import importlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Sampler, Subset, SubsetRandomSampler, TensorDataset

from hvdtrain.engines.errors import Failure, UserError
from hvdtrain.engines.launchers import announced
from tests.parallel.test_loop import N, X, a_run
from tests.single.training.small import fit


class Bag(nn.Module):
    """Sparse gradients of a parameter of its own. Of layers with sparse=True, run.prepare refuses them."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.ones(4, 3))

    def forward(self, x):
        return F.embedding(torch.arange(len(x)) % 4, self.table, sparse=True)


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.wave = nn.Parameter(torch.ones(3, 1, dtype=torch.complex64))

    def forward(self, x):
        return ((x + 0j) @ self.wave).abs()


class Around(torch.optim.Optimizer):
    """As Lookahead is, around another one."""

    def __init__(self, inner):
        self.inner = inner
        super().__init__(inner.param_groups, inner.defaults)


class Demanding(torch.optim.SGD):
    def __init__(self, params, times):
        super().__init__(params, lr=times)


def with_a_graph(matrix):
    net = nn.Linear(3, 1)
    net.register_buffer("graph", matrix.to_sparse_csr(), persistent=False)
    return net


class OfRank(Sampler):
    """Batches of one rank, as for DistributedDataParallel."""

    def __init__(self):
        self.rank, self.num_replicas = announced().rank, 2

    def __iter__(self):
        return iter([[self.rank * 2], [self.rank * 2 + 1]])

    def __len__(self):
        return 2


def means_of_batches(run, rows, last):
    test = DataLoader(TensorDataset(X), -(-N // run.size))  # one batch of each rank
    with run.evaluating(test) as mine:
        run.record(loss=sum(F.mse_loss(2 * x, x).item() for (x,) in mine) / len(test))


def sgd(net, last=False):
    return torch.optim.SGD(net.parameters(), lr=0.1)


def reversed_if(last, parameters):
    """As a set may order them, by their addresses."""
    return list(parameters)[:: -1 if last else 1]


def adam_on_one(net, last):
    return torch.optim.Adam(net.parameters()) if last else sgd(net)


def distributed(net, last):
    import horovod.torch as hvd

    return hvd.DistributedOptimizer(sgd(net), net.named_parameters())


def of_horovod(last):
    import horovod.torch as hvd

    return nn.Sequential(nn.Linear(3, 2), hvd.SyncBatchNorm(2))


def with_quantized(last):
    net = nn.Linear(3, 1)
    net.register_buffer("it", torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8))
    return net


def of_torch(last):
    return nn.Sequential(nn.Linear(3, 2), nn.SyncBatchNorm(2))


def a_scheduler_at(run, model, optimizer, last):
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    scheduler.last_epoch += last
    run.register(scheduler=scheduler)


def a_queue(run, model, optimizer, last):
    queue = nn.Module()
    queue.register_buffer("keys", torch.full((4, 3), float(last)))
    run.register(queue=queue)


def shifted(run, rows, last):
    """Register a buffer while training, on one rank."""
    if last:
        run.prepared().models[0].register_buffer("shift", torch.zeros(()))


def evaluate(run, data):
    with run.evaluating(DataLoader(data, 4)) as mine:
        for rows in mine:
            run.record(loss=torch.stack([*rows]).sum())


def an_average_of_a_replica(run, model, optimizer, last):
    run.register(average=torch.optim.swa_utils.AveragedModel(nn.DataParallel(model)))


def one_cycle_of_one_process(run, model, optimizer, last):
    run.register(scheduler=torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=-(-N // 4)))


def program(
    engine, *flags, net_of=lambda last: nn.Linear(3, 1), optimizer_of=sgd, data=lambda last: X,
    before=lambda run, model, optimizer, last: None, each=lambda run, rows, last: None,
    count_of=lambda last: None,
):  # fmt: skip
    """Train; the last rank gets True for `last`, and may be unlike the others."""
    last = engine.rank == engine.size - 1
    with a_run(engine, *flags, epochs=1) as run:
        net = net_of(last)
        model, optimizer = run.prepare(net, optimizer_of(net, last))
        before(run, model, optimizer, last)

        def loss_of(step, rows):
            each(run, rows, last)
            return model(rows).square().mean()

        fit(run, [data(last)], loss_of, count=count_of(last))
    return net


LOCAL = ("--sync-every", "4")
NEED_TWO = {  # ranks that differ
    "an embedding that changes its weights in each forward pass": (
        dict(net_of=lambda last: nn.Sequential(nn.Embedding(5, 3, max_norm=1.0), nn.Linear(3, 1))),
        r"0 has max_norm, which changes its weights on each rank alone: .*write weight.data.renorm_\(2, 0, 1\)"),
    "a bag of them": (dict(net_of=lambda last: nn.EmbeddingBag(5, 3, max_norm=0.5, norm_type=1)),
        r"the model has max_norm, .*renorm_\(1, 0, 0.5\)"),
    "a quantized buffer": (dict(net_of=with_quantized),
        "it is quantized, and ranks exchange no such tensors: keep its integers"),
    "a wider model": (dict(net_of=lambda last: nn.Sequential(nn.Linear(3, 4 + last), nn.Linear(4 + last, 1))),
        r"rank 0 has 0.weight: \[4, 3\] float32 where rank \d has 0.weight: \[5, 3\] float32: build the same"),
    "a deeper model": (
        dict(net_of=lambda last: nn.Sequential(*(nn.Linear(3, 3) for _ in range(last)), nn.Linear(3, 1))),
        r"rank 0 has 0.weight: \[1, 3\] float32 where rank \d has 0.weight: \[3, 3\] float32"),
    "another sparse buffer": (
        dict(net_of=lambda last: with_a_graph(torch.eye(3) * (1 + last))),
        r"rank 0 has \[3, 3\] float32 buffer, sparse, SHA-256 \w{12} where rank \d has \[3, 3\] float32 buffer, sparse",
    ),
    "another optimizer": (dict(optimizer_of=adam_on_one), r"rank 0 has SGD where rank \d has Adam"),
    "an optimizer whose parameters come from a set": (
        dict(optimizer_of=lambda net, last: torch.optim.SGD(reversed_if(last, net.parameters()), lr=0.1)),
        r"rank 0 has weight as parameter 0 of group 0 of SGD where rank \d has bias as parameter 0 .*: .* without sets"),
    "other data": (dict(data=lambda last: X[: N - last]),
        r"the number of samples of run.steps\(\): rank 0 has 22, rank \d has 21: give every rank all samples"),
    "other tensors": (dict(data=lambda last: X + last),
        r"ranks have different data: part 1 of sample \d+ is .* on rank 0, and .* on rank \d: give all ranks all"),
    "files in another order": (dict(data=lambda last: DataLoader(list(X.flip(0) if last else X), 4, shuffle=True)),
        r"ranks have different data: part 1 of sample \d+ is"),
    "that of a worker": (dict(data=lambda last: DataLoader(list(X.flip(0) if last else X), 4, num_workers=1)),
        r"ranks have different data: part 1 of sample \d+ is"),
    "a sampler for one rank": (dict(data=lambda last: DataLoader(list(X), batch_sampler=OfRank())),
        r"ranks disagree about the order that OfRank draws: .*: leave its rank and the number of ranks out: what it draws"),
    "another split": (dict(data=lambda last: DataLoader(Subset(list(X), range(last, N - 2 + last)), 4)),
        r"ranks disagree about which samples the subset has: .*random_split\(..., generator=torch.Generator"),
    "another split of a test set": (
        dict(before=lambda run, model, optimizer, last: evaluate(run, Subset(list(X), range(last, 10 + last)))),
        r"ranks disagree about which samples the subset of the test set has: draw it"),
    "another test set": (
        dict(before=lambda run, model, optimizer, last: evaluate(run, TensorDataset(X[last : 10 + last]))),
        r"^rank \d has another test set than rank 0: give run.evaluating\(\) the whole test set on every rank"),
    "a part of a test set": (
        dict(before=lambda run, model, optimizer, last: evaluate(run, list(X[last:]))),
        r"^rank \d has another test set than rank 0: give run.evaluating\(\) the whole test set on every rank"),
    "rows of another type": (dict(each=lambda run, rows, last: run.gather(rows.double() if last else rows)),
        r"ranks disagree about the rows of run.gather\(\): rank 0 has \[3\] float32, rank \d has \[3\] float64: give"),
    "rows of another width": (dict(each=lambda run, rows, last: run.gather(rows[:, : 3 - last])),
        r"rank 0 has \[3\] float32, rank \d has \[2\] float32: give it rows of the same shape and type"),
    "another queue": (dict(before=a_queue),
        r"run.register\(queue=...\): the Module has other values on rank \d than on rank 0: create it alike"),
    "a scheduler at another step": (dict(before=a_scheduler_at),
        r"run.register\(scheduler=...\): the StepLR has other values on rank \d than on rank 0: create it alike"),
    "a buffer of one rank alone": (dict(each=shifted),
        r"^the buffer shift is nothing on rank 0, and \[\] float32 on rank \d: make it alike on every rank, or"),
    "a count on some ranks": (
        dict(count_of=lambda last: None if last else 4.0),
        r"ranks disagree about count= of step.backward\(\): rank 0 has one, rank \d has none: give it on all ranks, or",
    ),
    "a sampler of fewer samples than ranks": (
        dict(data=lambda last: DataLoader(TensorDataset(X), 4, sampler=SubsetRandomSampler([0]))),
        r"1 samples but \d ranks: use -np 1 or fewer"),
    "a schedule of one process": (dict(before=one_cycle_of_one_process),
        r"OneCycleLR is made for 6 steps, and this run has \d steps in 1 epochs over all ranks"),
}  # fmt: skip
ALWAYS = {
    "a sum of means by the number of all batches": (dict(each=means_of_batches),
        r"^run.record\(loss=...\) got a mean, and parts may have unequal numbers"),
    "sparse gradients of a parameter": (dict(net_of=lambda last: Bag()),
        "^table has sparse gradients, which are not reduced"),
    "an average of a replica": (dict(before=an_average_of_a_replica),
        r"run.register\(average=...\) holds a DataParallel.*: make it of the model that you gave"),
    "a loss over all ranks beside local steps": (dict(flags=LOCAL, each=lambda run, rows, last: run.gather(rows)),
        r"run.gather\(\) cannot go with --sync-every"),
    "synchronized batch norm beside local steps": (dict(flags=LOCAL, net_of=of_torch),
        "SyncBatchNorm, which runs on GPUs only: use nn.BatchNorm on CPUs"),
}  # fmt: skip
OF_ENGINES = {
    "horovod": {
        "Horovod's end": (dict(each=lambda run, rows, last: importlib.import_module("horovod.torch").shutdown()),
            r"^shutdown\(\) during training, which the other ranks continue: leave it out: hvdtrain does so"),
        "the optimizer of a Horovod script": (dict(optimizer_of=distributed),
            "a DistributedOptimizer would reduce gradients, too: give it the optimizer"),
        "an optimizer that Horovod cannot make": (dict(optimizer_of=lambda net, last: Demanding(net.parameters(), 2.0)),
            "^Demanding cannot be made from parameters alone, as Horovod does .*: give its arguments defaults, or use"),
        "an optimizer around another": (dict(optimizer_of=lambda net, last: Around(sgd(net))),
            "^Around cannot be made from parameters alone, as Horovod does: use --engine ddp"),
        "batch norm that normalizes each rank's samples alone": (dict(net_of=of_torch),
            "1 is a SyncBatchNorm, which runs on GPUs only: use nn.BatchNorm on CPUs"),
        "a complex parameter": (dict(net_of=lambda last: Complex()),
            "^wave is complex, which Horovod does not reduce: use --engine ddp"),
    },
    "ddp": {
        "the end of torch.distributed": (dict(each=lambda run, rows, last: torch.distributed.destroy_process_group()),
            r"^destroy_process_group\(\) during training, which the other ranks continue: leave it out"),
        "Horovod's batch norm": (dict(net_of=of_horovod),
            "1 is a SyncBatchNorm, which runs on GPUs only: use nn.BatchNorm on CPUs"),
        "torch's, on CPUs": (dict(net_of=of_torch),
            "1 is a SyncBatchNorm, which runs on GPUs only: use nn.BatchNorm on CPUs"),
    },
}  # fmt: skip
CASES = NEED_TWO | ALWAYS | OF_ENGINES["horovod"] | OF_ENGINES["ddp"]
SLOW = {"that of a worker": pytest.mark.slow}  # each rank's imports torch


@pytest.mark.parametrize("case", [pytest.param(case, marks=SLOW.get(case, ())) for case in CASES])
def test_every_rank_is_told_in_one_line(engine, case):
    if case in NEED_TWO and engine.size == 1:
        pytest.skip("ranks that differ: needs two")
    if any(case in those and name != engine.name for name, those in OF_ENGINES.items()):
        pytest.skip("a mistake under another engine")
    how, complaint = CASES[case]
    how = dict(how)
    with pytest.raises(UserError, match=complaint) as caught:
        program(engine, *how.pop("flags", ()), **how)
    assert caught.value.everywhere or case not in NEED_TWO


def test_complex_parameters_are_trained(engine):
    if engine.name == "horovod":
        pytest.skip("Horovod does not reduce them")
    wave = program(engine, net_of=lambda last: Complex()).wave
    assert len(set(engine.all_gather_object(str(wave.tolist()), "ends"))) == 1


class Noisy(torch.optim.SGD):
    """As in Langevin dynamics. noise: the generator; None: torch's, of which each rank has its own."""

    def __init__(self, params, noise=None):
        super().__init__(params, lr=0.1)
        self.noise = noise

    def step(self, closure=None):
        super().step(closure)
        with torch.no_grad():
            for one in self.param_groups[0]["params"]:
                one.add_(torch.randn(one.shape, generator=self.noise), alpha=0.01)


@pytest.mark.parametrize("alike", [False, True])
def test_weights_that_change_on_each_rank_alone_are_noticed_in_the_first_step(engine, alike):
    noise = torch.Generator().manual_seed(7) if alike else None

    def train():
        with a_run(engine, epochs=1) as run:
            net = nn.Linear(3, 1)
            model, _ = run.prepare(net, Noisy(net.parameters(), noise))
            fit(run, [X], lambda step, x: model(x).square().mean())
            return run.state.step

    if alike or engine.size == 1:
        assert train() > 1
        return
    with pytest.raises(Failure, match=r"between steps 0 and 1: change weights on .* random numbers in"):
        train()


@pytest.mark.parametrize("inner_first", [True, False])
def test_a_model_in_another_one_is_refused_where_its_gradients_would_be_reduced_twice(engine, inner_first):
    """A loss that holds the model, and is given to run.prepare beside it, was a traceback of DDP's."""
    if engine.name != "ddp" or engine.size == 1:
        pytest.skip("needs two ranks of ddp: it alone has a reducer for each model")
    outer = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    models = (outer[0], outer) if inner_first else (outer, outer[0])
    with (
        a_run(engine) as run,
        pytest.raises(UserError, match=r"beside a model that holds it, or is in it: give run.prep"),
    ):
        run.prepare(*models, sgd(outer))


def test_gradients_that_are_clipped_while_they_are_reduced_are_refused(engine):
    """With Horovod, ranks clipped what others were reducing: "the weights differ between ranks". ddp reduces before."""
    waits = contextlib.nullcontext()
    if engine.name == "horovod" and engine.size > 1:
        waits = pytest.raises(UserError, match=r"gradients were changed in the loop over step.batches\(\), before they")
    with waits, a_run(engine, epochs=1) as run:
        net = nn.Linear(3, 1)
        model, _ = run.prepare(net, sgd(net))
        for _ in run.epochs(1):
            for step in run.steps(X):
                for (rows,) in step.batches():
                    step.backward(model(rows).square().mean())
                    nn.utils.clip_grad_norm_(net.parameters(), 0.01)
                step.update()


def test_a_loss_times_the_number_of_ranks_is_refused(engine):
    waits = contextlib.nullcontext()
    if engine.size > 1:
        match = rf"got a loss times {engine.size}, the number of ranks: leave that out, gradients are means over all"
        waits = pytest.raises(UserError, match=match)
    with waits, a_run(engine, epochs=1) as run:
        net = nn.Linear(3, 1)
        model, _ = run.prepare(net, sgd(net))
        for _ in run.epochs(1):
            for step in run.steps(X):
                for (rows,) in step.batches():
                    loss = model(rows).square().mean() * run.size
                    step.backward(loss)
                step.update()


def test_a_value_that_is_added_to_an_evaluation_is_that_of_all_ranks(engine):
    """Rank 0's was recorded, as a loss of its own last batch, and could decide which epoch is the best."""
    with a_run(engine) as run:
        net = nn.Linear(3, 1)
        run.prepare(net, sgd(net))
        for apart in (0.0, 1e-9, 1e-3):
            waits = pytest.raises(
                UserError, match=r"run.record\(own=...\) after run.evaluating\(\): 2 on rank 0, 2.001 on rank 1"
            )
            with waits if apart == 1e-3 and engine.size > 1 else contextlib.nullcontext():
                with run.evaluating(N) as mine:
                    run.record(loss=torch.zeros(N)[mine])
                run.record(own=2.0 + apart * run.rank)
                with run.evaluating(N) as mine:
                    run.record(loss=torch.zeros(N)[mine])


@pytest.mark.parametrize("data", [N, "loader"])
def test_a_metric_that_one_rank_alone_records_is_refused(engine, data):
    """Its sum would be divided by the samples of all ranks. With count= it is a mean over its own values."""
    if engine.size == 1:
        pytest.skip("with one rank, every rank records it")
    data = DataLoader(TensorDataset(X), 4) if data == "loader" else data

    def evaluate_alone(run, **count):
        with run.evaluating(data) as mine:
            for _ in mine if isinstance(data, DataLoader) else [None]:
                run.record(loss=torch.zeros(()))
                if run.rank == 0:
                    run.record(own=6.0, **count)

    with a_run(engine) as run:
        net = nn.Linear(3, 1)
        run.prepare(net, sgd(net))
        evaluate_alone(run, count=3.0)
        assert run.evaluation["own"] == 2.0
        with pytest.raises(UserError, match=r"run.record\(own=...\) was not called on rank 1"):
            evaluate_alone(run)


def test_what_a_rank_has_found_alone_is_averaged_unequally(engine, capsys):
    with a_run(engine, epochs=1) as run:
        model, _ = run.prepare(net := nn.Linear(3, 1), sgd(net))
        # Of a rank that has fewer samples than the others, nothing is said.
        fit(run, [X], lambda step, rows: model(rows)[: 3 + run.rank].relu().mean())
    said = capsys.readouterr().out
    told = (
        "warning: the loss is a mean over 3 items of " in said
        and "give step.backward(loss, count=...) their number" in said
    )
    assert told == (engine.rank == 0 and engine.size > 1)


def test_a_rate_of_a_rank_alone_is_the_cause(engine):
    """A scheduler by the loss of each rank: "check that host's memory"."""
    waits = contextlib.nullcontext()
    if engine.size > 1:
        match = r"first in weight, between steps 0 and 1: the learning rate is 0.1 on rank 0 and 1.1 on rank \d: give a"
        waits = pytest.raises(Failure, match=match)

    def each(run, rows, last):
        run.prepared().optimizers[0].param_groups[0]["lr"] = 0.1 + (last and engine.size > 1)

    with waits:
        program(engine, each=each)


def test_rows_of_all_ranks_are_not_to_be_recorded_in_an_evaluation(engine, capsys):
    with a_run(engine) as run:
        run.prepare(net := nn.Linear(3, 1), sgd(net))
        with run.evaluating(N) as mine:
            run.gather(X[mine])
            run.record(loss=torch.zeros(N)[mine])
    line = "warning: run.gather() inside of run.evaluating() returns the rows of all ranks: record values of this rank there"
    assert capsys.readouterr().out.count(line) == (engine.rank == 0 and engine.size > 1)
