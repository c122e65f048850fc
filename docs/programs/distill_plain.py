"""Distil a frozen teacher into a small student, and average the student's weights."""

import argparse

import torch
from torch import nn
from torch.nn.functional import kl_div, log_softmax
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


def network(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 5))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=32)
    flags = parser.parse_args()
    torch.manual_seed(1)
    x, test = torch.randn(2_000, 8), torch.randn(500, 8)
    teacher = network(64).eval().requires_grad_(False)
    student = network(16)
    optimizer = torch.optim.Adam(student.parameters(), lr=3e-3)
    averaged = AveragedModel(student, multi_avg_fn=get_ema_multi_avg_fn(0.99), use_buffers=True)
    for epoch in range(flags.epochs):
        for indices in torch.randperm(len(x)).split(flags.batch_size):
            batch = x[indices]
            optimizer.zero_grad()
            targets = log_softmax(teacher(batch), 1)
            loss = kl_div(log_softmax(student(batch), 1), targets, reduction="batchmean", log_target=True)
            loss.backward()
            optimizer.step()
            averaged.update_parameters(student)
        averaged.eval()
        with torch.inference_mode():
            agree = averaged(test).argmax(1) == teacher(test).argmax(1)
        print(f"epoch {epoch + 1}  loss {loss.item():.4f}  agreement {agree.float().mean():.4f}")


if __name__ == "__main__":
    main()
