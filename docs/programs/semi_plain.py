"""Learn from few labels and many unlabelled points: two loaders in one step."""

import argparse
import itertools

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def moons(count: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    angle = torch.rand(count, generator=generator) * torch.pi
    labels = torch.randint(2, (count,), generator=generator)
    x, y = angle.cos() + labels, angle.sin() * (1 - 2 * labels) + 0.3 * labels
    return TensorDataset(torch.stack([x, y], 1) + 0.1 * torch.randn(count, 2, generator=generator), labels)


def consistency(net: nn.Module, points: torch.Tensor) -> torch.Tensor:
    confidence, guesses = net(points).detach().softmax(1).max(1)
    losses = F.cross_entropy(net(points + 0.1 * torch.randn_like(points)), guesses, reduction="none")
    return (losses * (confidence > 0.9)).mean()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=16)
    flags = parser.parse_args()
    torch.manual_seed(1)
    labelled = DataLoader(moons(200, 1), batch_size=flags.batch_size, shuffle=True)
    unlabelled = DataLoader(moons(3_000, 2), batch_size=7 * flags.batch_size, shuffle=True)
    net = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    others = itertools.chain.from_iterable(itertools.repeat(unlabelled))
    for epoch in range(flags.epochs):
        for points, labels in labelled:
            optimizer.zero_grad()
            loss = F.cross_entropy(net(points), labels) + consistency(net, next(others)[0])
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch + 1}  loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
