"""Classify clouds of which some are rare: a weighted sampler, and a one-cycle schedule."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

RARITY = torch.tensor([1.0, 0.2, 0.05])  # of each class


def clouds(count: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.multinomial(RARITY, count, replacement=True, generator=generator)
    centers = torch.tensor([[0.0, 0.0], [2.0, 0.0], [0.0, 2.0]])
    return TensorDataset(centers[labels] + torch.randn(count, 2, generator=generator), labels)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=32)
    flags = parser.parse_args()
    torch.manual_seed(1)
    data = clouds(2_000, 1)
    sampler = WeightedRandomSampler(1 / RARITY[data.tensors[1]], len(data))
    train = DataLoader(data, batch_size=flags.batch_size, sampler=sampler)
    net = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 3))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scheduler = OneCycleLR(optimizer, 0.2, total_steps=flags.epochs * len(train))
    for epoch in range(flags.epochs):
        for points, labels in train:
            optimizer.zero_grad()
            loss = F.cross_entropy(net(points), labels)
            loss.backward()
            optimizer.step()
            scheduler.step()
        print(f"epoch {epoch + 1}  loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
