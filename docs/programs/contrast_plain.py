"""Contrastive learning with a momentum encoder and a queue of keys, as in MoCo."""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

QUEUE = 512


def encoder() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))


def view(x: Tensor) -> Tensor:
    return x + 0.2 * torch.randn_like(x)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=32)
    flags = parser.parse_args()
    torch.manual_seed(1)
    x = torch.randn(2_000, 16)
    net = encoder()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    slow = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.99))
    queue = nn.Module()
    queue.register_buffer("keys", F.normalize(torch.randn(QUEUE, 8), dim=1))
    for epoch in range(flags.epochs):
        for indices in torch.randperm(len(x)).split(flags.batch_size):
            batch = x[indices]
            optimizer.zero_grad()
            queries = F.normalize(net(view(batch)), dim=1)
            with torch.no_grad():
                keys = F.normalize(slow(view(batch)), dim=1)
            logits = torch.cat([(queries * keys).sum(1, keepdim=True), queries @ queue.keys.T], 1) / 0.1
            loss = F.cross_entropy(logits, torch.zeros(len(batch), dtype=torch.int64))
            loss.backward()
            optimizer.step()
            slow.update_parameters(net)
            queue.keys = torch.cat([keys, queue.keys])[:QUEUE]
        print(f"epoch {epoch + 1}  loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
