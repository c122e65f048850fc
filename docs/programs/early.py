"""Classify points on two rings, with mixed samples: stop early, and keep the epoch that was the best."""

import random

import torch
import torch.nn.functional as F
from hvdtrain import training
from torch import Tensor, nn


def rings(count: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(2, (count,), generator=generator)
    angles = 6.283 * torch.rand(count, generator=generator)
    radii = 1 + labels + 0.4 * torch.randn(count, generator=generator)
    return torch.stack([radii * angles.cos(), radii * angles.sin()], 1), labels


def main():
    parser = training.parser("early", __doc__, epochs=20, batch_size=64)
    parser.add_argument("--patience", type=int, default=3)
    flags = parser.parse_args()
    points, labels = rings(4_000, 1)
    test_points, test_labels = rings(1_000, 2)
    with training.start(flags, metrics={"accuracy": "max"}) as run:
        net = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2))
        net, _ = run.prepare(net, torch.optim.Adam(net.parameters(), lr=0.01))
        mixing = random.Random(1)
        run.register(mixing=mixing)
        for epoch in run.epochs(flags.epochs):
            for step in run.steps(points, labels):
                share = mixing.betavariate(0.2, 0.2)
                for x, y in step.batches():
                    other = torch.randperm(len(x))
                    logits = net(share * x + (1 - share) * x[other])
                    loss = share * F.cross_entropy(logits, y) + (1 - share) * F.cross_entropy(logits, y[other])
                    step.backward(loss)
                step.update()
            with run.evaluating(len(test_points)) as mine:
                run.record(accuracy=net(test_points[mine]).argmax(1) == test_labels[mine])
            if epoch - run.best.epoch >= flags.patience:
                break
    return run.exit_code


if __name__ == "__main__":
    training.main(main)
