"""Sharpness-aware minimization: each step climbs, and descends by the gradient found there."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

RHO = 0.05


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=32)
    flags = parser.parse_args()
    x = torch.randn(2_000, 8, generator=torch.Generator().manual_seed(1))
    y = (x[:, :4].prod(1) > 0).long()
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(flags.epochs):
        for indices in torch.randperm(len(x)).split(flags.batch_size):
            optimizer.zero_grad()
            F.cross_entropy(net(x[indices]), y[indices]).backward()
            with torch.no_grad():
                norm = torch.stack([p.grad.norm() for p in net.parameters()]).norm()
                climbs = [RHO * p.grad / norm for p in net.parameters()]
                torch._foreach_add_(list(net.parameters()), climbs)
            optimizer.zero_grad()
            loss = F.cross_entropy(net(x[indices]), y[indices])
            loss.backward()
            with torch.no_grad():
                torch._foreach_sub_(list(net.parameters()), climbs)
            optimizer.step()
        print(f"epoch {epoch + 1}  loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
