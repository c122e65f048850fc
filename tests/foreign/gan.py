"""A Horovod script as users have it: a GAN with two models and two DistributedOptimizers, on blobs drawn at random.

horovodrun -np 2 python tests/foreign/gan.py --steps 60
"""

import argparse

import torch
import torch.nn as nn

import horovod.torch as hvd


def generator_of(latent):
    return nn.Sequential(
        nn.Linear(latent, 64 * 7 * 7),
        nn.BatchNorm1d(64 * 7 * 7),
        nn.ReLU(True),
        nn.Unflatten(1, (64, 7, 7)),
        nn.ConvTranspose2d(64, 32, 4, 2, 1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(True),
        nn.ConvTranspose2d(32, 1, 4, 2, 1),
        nn.Tanh(),
    )


def discriminator_of():
    return nn.Sequential(
        nn.Conv2d(1, 32, 4, 2, 1),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(32, 64, 4, 2, 1, bias=False),
        nn.BatchNorm2d(64),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Flatten(),
        nn.Linear(64 * 7 * 7, 1),
    )


def blobs(n):
    """Return n images, 1 x 28 x 28, each with one round spot."""
    at = torch.rand(n, 2, 1, 1) * 14 + 7
    y, x = torch.meshgrid(torch.arange(28.0), torch.arange(28.0), indexing="ij")
    return (2 * torch.exp(-((y - at[:, 0]) ** 2 + (x - at[:, 1]) ** 2) / 18) - 1).unsqueeze(1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--latent", type=int, default=32)
    parser.add_argument("--lr", type=float, default=2e-4)
    args = parser.parse_args()

    hvd.init()
    torch.manual_seed(1 + hvd.rank())
    netG, netD = generator_of(args.latent), discriminator_of()
    hvd.broadcast_parameters(netG.state_dict(), root_rank=0)
    hvd.broadcast_parameters(netD.state_dict(), root_rank=0)
    optimizerG = torch.optim.Adam(netG.parameters(), lr=args.lr, betas=(0.5, 0.999))
    optimizerD = torch.optim.Adam(netD.parameters(), lr=args.lr, betas=(0.5, 0.999))
    named = [("G." + name, p) for name, p in netG.named_parameters()]
    optimizerG = hvd.DistributedOptimizer(optimizerG, named_parameters=named)
    named = [("D." + name, p) for name, p in netD.named_parameters()]
    optimizerD = hvd.DistributedOptimizer(optimizerD, named_parameters=named, backward_passes_per_step=2)
    criterion = nn.BCEWithLogitsLoss()

    for step in range(1, args.steps + 1):
        real, noise = blobs(args.batch_size), torch.randn(args.batch_size, args.latent)
        ones, zeros = torch.ones(args.batch_size, 1), torch.zeros(args.batch_size, 1)

        optimizerD.zero_grad()
        lossD_real = criterion(netD(real), ones)
        lossD_real.backward()
        fake = netG(noise)
        lossD_fake = criterion(netD(fake.detach()), zeros)
        lossD_fake.backward()
        optimizerD.step()

        for p in netD.parameters():  # the generator's backward pass must not fire the discriminator's hooks
            p.requires_grad_(False)
        optimizerG.zero_grad()
        lossG = criterion(netD(fake), ones)
        lossG.backward()
        optimizerG.step()
        for p in netD.parameters():
            p.requires_grad_(True)

        if step % 20 == 0 and hvd.rank() == 0:
            print(f"step {step}: D {lossD_real.item() + lossD_fake.item():.4f}  G {lossG.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
