"""Sharpness-aware minimization: each step climbs, and descends by the gradient found there."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn


class SAM(torch.optim.SGD):
    """SGD whose updates climb by `rho` and descend from where they began, in turn."""

    def __init__(self, params, rho=0.05, **options):
        super().__init__(params, **options)
        self.rho = rho

    @torch.no_grad()
    def step(self, closure=None):
        trained = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        if any("climb" in self.state[p] for p in trained):
            for p in trained:
                p.sub_(self.state[p].pop("climb"))
            super().step(closure)
        else:
            norm = torch.stack([p.grad.norm() for p in trained]).norm()
            for p in trained:
                self.state[p]["climb"] = self.rho * p.grad / norm
                p.add_(self.state[p]["climb"])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=32)
    flags = parser.parse_args()
    x = torch.randn(2_000, 8, generator=torch.Generator().manual_seed(1))
    y = (x[:, :4].prod(1) > 0).long()
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 2))
    optimizer = SAM(net.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(flags.epochs):
        for indices in torch.randperm(len(x)).split(flags.batch_size):
            for _ in range(2):
                optimizer.zero_grad()
                loss = F.cross_entropy(net(x[indices]), y[indices])
                loss.backward()
                optimizer.step()
        print(f"epoch {epoch + 1}  loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
