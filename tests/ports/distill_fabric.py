"""Distil a frozen teacher into a small student, and average the student's weights: ported to Lightning Fabric.

fabric run --accelerator cpu --strategy ddp --devices 2 tests/ports/distill_fabric.py

It does not promise an exact resume: a killed run starts anew, and other numbers of ranks or workers give other
weights. Where ranks do not divide the samples, some are trained on twice in an epoch. Batch norm's running statistics
are those of rank 0's samples. Every rank evaluates all test samples.
"""

import argparse

import torch
from lightning_fabric import Fabric
from torch import nn
from torch.nn.functional import kl_div, log_softmax
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset


def network(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 5))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=32)
    flags = parser.parse_args()
    fabric = Fabric()
    fabric.seed_everything(1, workers=True)
    x, test = torch.randn(2_000, 8), fabric.to_device(torch.randn(500, 8))
    teacher = fabric.to_device(network(64).eval().requires_grad_(False))
    net = fabric.to_device(network(16))
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    averaged = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.99), use_buffers=True)
    train = DataLoader(TensorDataset(x), batch_size=flags.batch_size, shuffle=True)
    student, optimizer = fabric.setup(net, optimizer)
    train = fabric.setup_dataloaders(train)
    for epoch in range(flags.epochs):
        for (batch,) in train:
            optimizer.zero_grad()
            targets = log_softmax(teacher(batch), 1)
            loss = kl_div(log_softmax(student(batch), 1), targets, reduction="batchmean", log_target=True)
            fabric.backward(loss)
            optimizer.step()
            averaged.update_parameters(net)
        averaged.eval()
        with torch.inference_mode():
            agree = averaged(test).argmax(1) == teacher(test).argmax(1)
        loss = fabric.all_reduce(loss.detach())
        fabric.print(f"epoch {epoch + 1}  loss {loss.item():.4f}  agreement {agree.float().mean():.4f}")


if __name__ == "__main__":
    main()
