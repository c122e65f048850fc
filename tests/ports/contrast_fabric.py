"""Contrastive learning with a momentum encoder and a queue of keys, as in MoCo: ported to Lightning Fabric.

fabric run --accelerator cpu --strategy ddp --devices 2 tests/ports/contrast_fabric.py

It does not promise an exact resume: a killed run starts anew, and other numbers of ranks or workers give other
weights. Where ranks do not divide the samples, some are trained on twice in an epoch. Every rank draws the same noise
for its views.
"""

import argparse

import torch
import torch.nn.functional as F
from lightning_fabric import Fabric
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

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
    fabric = Fabric()
    fabric.seed_everything(1, workers=True)
    x = torch.randn(2_000, 16)
    net = fabric.to_device(encoder())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    slow = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.99))
    queue = nn.Module()
    queue.register_buffer("keys", fabric.to_device(F.normalize(torch.randn(QUEUE, 8), dim=1)))
    train = DataLoader(TensorDataset(x), batch_size=flags.batch_size, shuffle=True)
    model, optimizer = fabric.setup(net, optimizer)
    train = fabric.setup_dataloaders(train)
    for epoch in range(flags.epochs):
        for (batch,) in train:
            optimizer.zero_grad()
            queries = F.normalize(model(view(batch)), dim=1)
            with torch.no_grad():
                keys = F.normalize(slow(view(batch)), dim=1)
            logits = torch.cat([(queries * keys).sum(1, keepdim=True), queries @ queue.keys.T], 1) / 0.1
            loss = F.cross_entropy(logits, torch.zeros(len(batch), dtype=torch.int64, device=fabric.device))
            fabric.backward(loss)
            optimizer.step()
            slow.update_parameters(net)
            queue.keys = torch.cat([fabric.all_gather(keys).reshape(-1, 8), queue.keys])[:QUEUE]
        loss = fabric.all_reduce(loss.detach())
        fabric.print(f"epoch {epoch + 1}  loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
