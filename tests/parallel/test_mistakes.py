"""Mistakes that only several ranks can make: every rank raises the same line, and none waits for another."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hvdtrain.engines.errors import UserError
from tests.parallel.test_loop import X, Y, a_run


def train(run, net, optimizer, x, y):
    model, _ = run.prepare(net, optimizer)
    for _ in run.epochs(1):
        for step in run.steps(x, y):
            for inputs, targets in step.batches():
                step.backward(F.mse_loss(model(inputs), targets))
            step.update()


def build(
    net_of, optimizer_of=lambda net, rank: torch.optim.SGD(net.parameters(), lr=0.1), samples=lambda rank: len(X)
):
    def program(run):
        last = run.rank == run.size - 1  # the rank that is unlike the others
        net = net_of(last)
        train(run, net, optimizer_of(net, last), X[: samples(last)], Y[: samples(last)])

    return program


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
}


def test_the_optimizer_of_a_horovod_script_is_refused(engine):
    if engine.name != "horovod":
        pytest.skip("only the engine horovod runs Horovod, which makes this optimizer")
    import horovod.torch as hvd

    net = nn.Linear(3, 1)
    with (
        pytest.raises(UserError, match="got a DistributedOptimizer, which would reduce gradients, too"),
        a_run(engine) as run,
    ):
        run.prepare(net, hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters()))


@pytest.mark.parametrize("case", MISTAKES)
def test_ranks_that_differ_are_told_in_one_line(engine, case):
    if engine.size == 1:
        pytest.skip("ranks that differ: needs two")
    program, complaint = MISTAKES[case]
    with pytest.raises(UserError, match=complaint) as caught, a_run(engine) as run:
        program(run)
    assert caught.value.everywhere
