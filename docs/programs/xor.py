"""Classify points of the plane by the product of their coordinates."""

import torch
import torch.nn.functional as F
from hvdtrain import training
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    flags = training.parser("xor", __doc__, epochs=5, batch_size=64).parse_args()
    points = torch.rand(12_000, 2, generator=torch.Generator().manual_seed(1)) - 0.5
    labels = (points.prod(1) > 0).long()
    train = DataLoader(TensorDataset(points[:10_000], labels[:10_000]), flags.batch_size, shuffle=True)
    test = DataLoader(TensorDataset(points[10_000:], labels[10_000:]), 500)
    with training.start(flags, metrics={"accuracy": "max"}) as run:
        net = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2))
        net, _ = run.prepare(net, torch.optim.Adam(net.parameters(), lr=0.01))
        for epoch in run.epochs(flags.epochs):
            for step in run.steps(train):
                for x, y in step.batches():
                    step.backward(F.cross_entropy(net(x), y))
                step.update()
            with run.evaluating(test) as mine:
                for x, y in mine:
                    run.record(accuracy=net(x).argmax(1) == y)
    return run.exit_code


if __name__ == "__main__":
    training.main(main)
