"""A small regression and its run, for tests of the loop."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hvdtrain import training
from hvdtrain.flags import Flags
from hvdtrain.loop.run import Run
from hvdtrain.loop.step import Step

N = 40
X = torch.randn(N, 3, generator=torch.Generator().manual_seed(1))
Y = X.sum(1, keepdim=True).sin()


class Killed(Exception):
    """What ends a training in a test, in place of SIGKILL. A checkpoint that is being written is written to its end."""


def kill_at(number: int | None) -> Callable[[Step], None]:
    """Return what ends the training after the update of this step, before it is saved."""

    def each(step: Step) -> None:
        if step.number == number:
            raise Killed

    return each


def flags_for(*argv: str, epochs: int = 2, batch_size: int = 8) -> Flags:
    """Return the flags of a run of the serial engine."""
    parser = training.parser("test", None, epochs=epochs, batch_size=batch_size)
    return parser.parse(["--engine", "serial", "--no-progress", "--threads", "1", *argv])


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 1))


def fit(
    run: Run, data: Sequence[Any], loss_of: Callable[..., Tensor], *,
    epochs: int | None = None, steps: int | None = None, each: Callable[[Step], object] = lambda step: None,
    count: float | None = None,
) -> list[float]:  # fmt: skip
    """The loop as its author writes it; return the loss of each step's last micro-batch.

    loss_of: the loss of a micro-batch, given the step and the parts of the batch. each: is called after each update.
    count: of each micro-batch.
    """
    losses = []
    for _ in run.epochs(epochs or (None if steps else run.flags.epochs), steps=steps):
        for step in run.steps(*data):
            for batch in step.batches():
                loss = loss_of(step, *(batch if isinstance(batch, (tuple, list)) else [batch]))
                step.backward(loss, count=count)
            step.update()
            losses.append(loss.item())
            each(step)
    return losses


def train(run: Run, model: nn.Module, **how: Any) -> list[float]:
    """Fit the regression."""
    return fit(run, [X, Y], lambda step, x, y: F.mse_loss(model(x), y), **how)
