"""What a plain torch program of one process does with the same model, optimizer and data, every engine does on all ranks."""

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, SubsetRandomSampler, TensorDataset

from tests.parallel.test_loop import N, X, Y, a_run, fit


@pytest.mark.parametrize("how", ["subset", "batches"])
def test_an_evaluation_uses_the_samples_of_its_sampler(engine, how):
    data = TensorDataset(X, Y)
    loader = (
        DataLoader(data, 4, sampler=SubsetRandomSampler(range(8, N)))
        if how == "subset"
        else DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), 4, False))
    )
    with a_run(engine, epochs=1) as run:
        net = nn.Linear(3, 1)
        model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        fit(run, [X, Y], lambda step, x, y: (model(x) - y).square().mean())
        with run.evaluating(loader) as mine:
            for x, y in mine:
                run.record(loss=(model(x) - y).square())
    tested = slice(8, N) if how == "subset" else slice(0, N)
    assert run.evaluation["count"] == len(X[tested])
    assert run.evaluation["loss"] == pytest.approx(float((net(X[tested]) - Y[tested]).square().mean()))
