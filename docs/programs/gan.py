"""Learn a ring of eight clouds with a GAN, two models and two optimizers."""

import torch
from hvdtrain import training
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
    flags = training.parser("gan", __doc__, epochs=4, batch_size=64).parse_args()
    with training.start(flags, metrics={"distance": "min"}) as run:
        data, noise = ring(4_000, 1), run.to_device(torch.randn(1_000, 8))
        generator, critic = network(8, 2), network(2, 1)
        g_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
        c_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.9))
        generator, critic, g_optimizer, c_optimizer = run.prepare(generator, critic, g_optimizer, c_optimizer)
        for epoch in run.epochs(flags.epochs):
            for step in run.steps(data):
                for (real,) in step.batches():
                    fake = generator(torch.randn(len(real), 8, device=real.device))
                    loss = softplus(critic(fake.detach())).mean() + softplus(-critic(real)).mean()
                    step.backward(loss, c_optimizer)
                step.update(c_optimizer)

                for (real,) in step.batches():
                    fake = generator(torch.randn(len(real), 8, device=real.device))
                    loss = softplus(-critic(fake)).mean()
                    step.backward(loss, g_optimizer)
                step.update(g_optimizer)
            with run.evaluating(len(noise)) as mine:
                run.record(distance=distance(generator(noise[mine])))
    return run.exit_code


if __name__ == "__main__":
    training.main(main)
