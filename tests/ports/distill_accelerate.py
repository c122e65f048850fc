"""Distil a frozen teacher into a small student, and average the student's weights: ported to Hugging Face accelerate.

accelerate launch --cpu --num_processes 2 tests/ports/distill_accelerate.py

It does not promise an exact resume: a killed run starts anew, and other numbers of ranks or workers give other
weights. Where ranks do not divide the samples, some are trained on twice in an epoch. Batch norm's running statistics
are those of rank 0's samples. Every rank evaluates all test samples.
"""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
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
    accelerator = Accelerator()
    set_seed(1)
    x, test = torch.randn(2_000, 8), torch.randn(500, 8).to(accelerator.device)
    teacher = network(64).eval().requires_grad_(False).to(accelerator.device)
    net = network(16).to(accelerator.device)
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    averaged = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.99), use_buffers=True)
    train = DataLoader(TensorDataset(x), batch_size=flags.batch_size, shuffle=True)
    student, optimizer, train = accelerator.prepare(net, optimizer, train)
    for epoch in range(flags.epochs):
        for (batch,) in train:
            optimizer.zero_grad()
            targets = log_softmax(teacher(batch), 1)
            loss = kl_div(log_softmax(student(batch), 1), targets, reduction="batchmean", log_target=True)
            accelerator.backward(loss)
            optimizer.step()
            averaged.update_parameters(net)
        averaged.eval()
        with torch.inference_mode():
            agree = averaged(test).argmax(1) == teacher(test).argmax(1)
        loss = accelerator.reduce(loss.detach(), "mean")
        accelerator.print(f"epoch {epoch + 1}  loss {loss.item():.4f}  agreement {agree.float().mean():.4f}")


if __name__ == "__main__":
    main()
