"""Mistakes that only several ranks can make: every rank raises the same line, and none waits for another."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset

from hvdtrain.engines.errors import UserError
from tests.parallel.test_loop import N, X, Y, a_run
from tests.single.training.small import fit


def build(
    net_of, optimizer_of=lambda net, rank: torch.optim.SGD(net.parameters(), lr=0.1), samples=lambda rank: len(X)
):
    def program(run):
        last = run.rank == run.size - 1  # the rank that is unlike the others
        net = net_of(last)
        model, _ = run.prepare(net, optimizer_of(net, last))
        fit(run, [X[: samples(last)], Y[: samples(last)]], lambda step, x, y: F.mse_loss(model(x), y))

    return program


def in_each_step(does, before=lambda run, last: None, data=lambda last: (X,)):
    """A program that calls `does(run, rows, last)` beside its loss, for the last rank with True."""

    def program(run):
        last = run.rank == run.size - 1
        net = nn.Linear(3, 1)
        model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        before(run, last)
        for _ in run.epochs(1):
            for step in run.steps(*data(last)):
                for (inputs,) in step.batches():
                    does(run, inputs, last)
                    step.backward(model(inputs).square().mean())
                step.update()

    return program


def register_a_queue(run, last):
    queue = nn.Module()
    queue.register_buffer("keys", torch.full((4, 3), float(last)))
    run.register(queue=queue)


def too_few(last):
    return (DataLoader(TensorDataset(X), 4, sampler=SubsetRandomSampler([0])),)


def one_cycle_of_one_process(run):
    net = nn.Linear(3, 1)
    _, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    loader = DataLoader(TensorDataset(X), 4)
    run.register(scheduler=torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=len(loader)))
    for _ in run.epochs(1):
        list(run.steps(loader))


def adam_on_one(net, last):
    return (torch.optim.Adam if last else torch.optim.SGD)(net.parameters(), lr=0.1)


MISTAKES = {
    "a wider model": (
        build(lambda last: nn.Sequential(nn.Linear(3, 4 + last), nn.Linear(4 + last, 1))),
        r"rank 0 has 0.weight: \[4, 3\] float32 where rank \d has 0.weight: \[5, 3\] float32: build the same",
    ),
    "a deeper model": (
        build(lambda last: nn.Sequential(*(nn.Linear(3, 3) for _ in range(last)), nn.Linear(3, 1))),
        r"rank 0 has 0.weight: \[1, 3\] float32 where rank \d has 0.weight: \[3, 3\] float32",
    ),
    "another optimizer": (build(lambda last: nn.Linear(3, 1), adam_on_one), r"rank 0 has SGD where rank \d has Adam"),
    "other data": (
        build(lambda last: nn.Linear(3, 1), samples=lambda last: len(X) - last),
        r"the number of samples of run.steps\(\): rank 0 has 22, rank \d has 21: give every rank all samples",
    ),
    "rows of another type": (
        in_each_step(lambda run, rows, last: run.gather(rows.double() if last else rows)),
        r"ranks disagree about the rows of run.gather\(\): rank 0 has \[3\] float32, rank \d has \[3\] float64: give",
    ),
    "rows of another width": (
        in_each_step(lambda run, rows, last: run.gather(rows[:, : 3 - last])),
        r"rank 0 has \[3\] float32, rank \d has \[2\] float32: give it rows of the same shape and type",
    ),
    "another queue": (
        in_each_step(lambda run, rows, last: None, register_a_queue),
        r"run.register\(queue=...\): the Module has other values on rank \d than on rank 0: create it alike",
    ),
    "a sampler of fewer samples than ranks": (
        in_each_step(lambda run, rows, last: None, data=too_few),
        r"1 samples but \d ranks: use -np 1 or fewer",
    ),
    "a schedule of one process": (
        one_cycle_of_one_process,
        r"OneCycleLR is made for 6 steps, and this run has \d steps in 1 epochs over all ranks",
    ),
}


def test_the_optimizer_of_a_horovod_script_is_refused(engine):
    if engine.name != "horovod":
        pytest.skip("only the engine horovod runs Horovod, which makes this optimizer")
    import horovod.torch as hvd

    net = nn.Linear(3, 1)
    with (
        pytest.raises(UserError, match="a DistributedOptimizer would reduce gradients, too"),
        a_run(engine) as run,
    ):
        run.prepare(net, hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters()))


def test_sparse_gradients_of_a_parameter_are_refused(engine):
    """Of layers with sparse=True, run.prepare refuses them."""

    class Bag(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.ones(4, 2))

        def forward(self, rows):
            return F.embedding(rows, self.table, sparse=True)

    said = "^table has sparse gradients, which are not reduced: leave sparse=True out"
    with pytest.raises(UserError, match=said), a_run(engine) as run:
        model, _ = run.prepare(net := Bag(), torch.optim.SGD(net.parameters(), lr=0.1))
        for _ in run.epochs(1):
            for step in run.steps(torch.arange(N) % 4):
                for (rows,) in step.batches():
                    step.backward(model(rows).square().mean())
                step.update()


def test_an_average_of_a_replica_is_refused(engine):
    """Horovod returns the model itself."""
    if engine.name != "ddp":
        pytest.skip("a model in DistributedDataParallel: needs --engine ddp")
    net = nn.Linear(3, 1)
    said = r"run.register\(average=...\) holds a DistributedDataParallel.*: make it of the model that you gave"
    with pytest.raises(UserError, match=said), a_run(engine) as run:
        model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        run.register(average=torch.optim.swa_utils.AveragedModel(model))


def test_batch_norm_synchronized_by_the_other_engine_is_refused(engine):
    """Under Horovod, torch's normalizes each rank's samples alone, without a word."""
    import horovod.torch as hvd

    kind = nn.SyncBatchNorm if engine.name == "horovod" else hvd.SyncBatchNorm
    net = nn.Sequential(nn.Linear(3, 2), kind(2))
    said = f"{kind.__module__.split('.')[0]}.*: use .*SyncBatchNorm, or --engine"
    with pytest.raises(UserError, match=said), a_run(engine) as run:
        run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))


@pytest.mark.parametrize("within", ["rank", "host"])
def test_synchronized_batch_norm_is_refused_beside_local_steps(engine, within):
    net = nn.Sequential(nn.Linear(3, 2), nn.SyncBatchNorm(2))
    local = ("--sync-every", "4", "--sync-within", within)
    said = "wait in every step: use nn.BatchNorm, or leave --sync-every out"
    with pytest.raises(UserError, match=said), a_run(engine, *local) as run:
        run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.wave = nn.Parameter(torch.ones(3, 1, dtype=torch.complex64))

    def forward(self, x):
        return (x + 0j) @ self.wave


def test_complex_parameters_are_trained_or_refused_in_one_line(engine):
    def program():
        with a_run(engine) as run:
            model, _ = run.prepare(net := Complex(), torch.optim.SGD(net.parameters(), lr=0.1))
            fit(run, [X], lambda step, x: model(x).abs().square().mean())
        return net.wave.tolist()

    if engine.name == "horovod":
        with pytest.raises(UserError, match=r"^wave is complex, which Horovod does not reduce: use --engine ddp"):
            program()
    else:
        assert len(set(map(str, engine.all_gather_object(str(program()), "ends")))) == 1


@pytest.mark.parametrize("case", MISTAKES)
def test_ranks_that_differ_are_told_in_one_line(engine, case):
    if engine.size == 1:
        pytest.skip("ranks that differ: needs two")
    program, complaint = MISTAKES[case]
    with pytest.raises(UserError, match=complaint) as caught, a_run(engine) as run:
        program(run)
    assert caught.value.everywhere
