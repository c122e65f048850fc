"""Learn a ring of eight clouds with a GAN, two models and two optimizers."""

import argparse

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus


def ring(count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    angle = torch.randint(8, (count,), generator=generator) * torch.pi / 4
    return torch.stack([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(count, 2, generator=generator)


def distance(points: Tensor) -> Tensor:
    """Return the distance of each point to the center of the nearest cloud."""
    angle = torch.arange(8, device=points.device) * torch.pi / 4
    return torch.cdist(points, torch.stack([angle.cos(), angle.sin()], 1)).amin(1)


def network(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, outputs))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=64)
    flags = parser.parse_args()
    torch.manual_seed(1)
    data, noise = ring(4_000, 1), torch.randn(1_000, 8)
    generator, critic = network(8, 2), network(2, 1)
    g_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
    c_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.9))
    for epoch in range(flags.epochs):
        for indices in torch.randperm(len(data)).split(flags.batch_size):
            real = data[indices]
            c_optimizer.zero_grad()
            fake = generator(torch.randn(len(real), 8, device=real.device))
            loss = softplus(critic(fake.detach())).mean() + softplus(-critic(real)).mean()
            loss.backward()
            c_optimizer.step()

            g_optimizer.zero_grad()
            fake = generator(torch.randn(len(real), 8, device=real.device))
            loss = softplus(-critic(fake)).mean()
            loss.backward()
            g_optimizer.step()
        with torch.no_grad():
            print(f"epoch {epoch + 1}  distance {distance(generator(noise)).mean():.4f}")


if __name__ == "__main__":
    main()
