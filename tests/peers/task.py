"""The training that every program here does: data, model, optimizer. Nothing of any trainer is in this file."""

import os
import sys

import torch
from torch import nn
from torch.utils.data import Dataset

CHECKPOINTS = os.path.join(sys.argv[-1], "checkpoints")
WORLD = int(os.environ.get("WORLD_SIZE", os.environ.get("OMPI_COMM_WORLD_SIZE", 1)))
RANK = int(os.environ.get("RANK", 0))
EPOCHS, SEED, SAVE_EVERY = 3, 1, int(os.environ.get("SAVE_EVERY", 5))
BATCH = int(os.environ.get("BATCH", 16 // WORLD))  # 16 over all ranks
STEPS = 13  # of an epoch: 200 samples, the last batch has 8


class Data(Dataset):
    def __init__(self, count, seed, augment):
        self.x = torch.randn(count, 32, generator=torch.Generator().manual_seed(seed))
        self.labels = (self.x[:, :8].sum(1) > 0).long()
        self.augment = augment

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        x = self.x[index] + torch.rand(32) if self.augment else self.x[index]
        return {"x": x, "labels": self.labels[index]}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(SEED)
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 2))

    def forward(self, x, labels):
        return {"loss": nn.functional.cross_entropy(self.layers(x), labels)}


train_data, test_data = Data(200, 1, augment=True), Data(64, 2, augment=False)


def optimizer_of(net):
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * STEPS)
