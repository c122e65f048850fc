"""Classify points on two rings, with mixed samples: stop early, and keep the epoch that was the best."""

import argparse
import copy
import random

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def rings(count: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(2, (count,), generator=generator)
    angles = 6.283 * torch.rand(count, generator=generator)
    radii = 1 + labels + 0.4 * torch.randn(count, generator=generator)
    return torch.stack([radii * angles.cos(), radii * angles.sin()], 1), labels


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--patience", type=int, default=3)
    flags = parser.parse_args()
    torch.manual_seed(1)
    points, labels = rings(4_000, 1)
    test_points, test_labels = rings(1_000, 2)
    net = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    mixing = random.Random(1)
    best, best_epoch, weights = -1.0, 0, None
    for epoch in range(flags.epochs):
        for indices in torch.randperm(len(points)).split(flags.batch_size):
            optimizer.zero_grad()
            share = mixing.betavariate(0.2, 0.2)
            x, y = points[indices], labels[indices]
            other = torch.randperm(len(x))
            logits = net(share * x + (1 - share) * x[other])
            loss = share * F.cross_entropy(logits, y) + (1 - share) * F.cross_entropy(logits, y[other])
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            accuracy = (net(test_points).argmax(1) == test_labels).float().mean().item()
        print(f"epoch {epoch + 1}  accuracy {accuracy:.4f}")
        if accuracy > best:
            best, best_epoch, weights = accuracy, epoch, copy.deepcopy(net.state_dict())
        if epoch - best_epoch >= flags.patience:
            break
    net.load_state_dict(weights)


if __name__ == "__main__":
    main()
