"""A small regression and its run, for tests of the loop in one process."""

import torch
from torch import nn

from hvdtrain import training
from hvdtrain.cli import Flags

N = 40
X = torch.randn(N, 3, generator=torch.Generator().manual_seed(1))
Y = X.sum(1, keepdim=True).sin()


def flags_for(*argv: str, epochs: int = 2, batch_size: int = 8) -> Flags:
    """Return the flags of a run of the serial engine."""
    parser = training.parser("test", None, epochs=epochs, batch_size=batch_size)
    return parser.parse(["--engine", "serial", "--no-progress", "--threads", "1", *argv])


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 1))
