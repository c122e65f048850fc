"""Classify points of the plane by the product of their coordinates."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=64)
    flags = parser.parse_args()
    points = torch.rand(12_000, 2, generator=torch.Generator().manual_seed(1)) - 0.5
    labels = (points.prod(1) > 0).long()
    train = DataLoader(TensorDataset(points[:10_000], labels[:10_000]), flags.batch_size, shuffle=True)
    test = DataLoader(TensorDataset(points[10_000:], labels[10_000:]), 500)
    net = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for epoch in range(flags.epochs):
        for x, y in train:
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimizer.step()
        with torch.no_grad():
            right = sum(int((net(x).argmax(1) == y).sum()) for x, y in test)
        print(f"epoch {epoch + 1}  accuracy {right / len(test.dataset):.4f}")


if __name__ == "__main__":
    main()
