"""A small regression and its run, for tests of the loop."""

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
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


def kill_at(number: object) -> Callable[[Step], None]:
    """Return what ends the training after the update of this step, before it is saved."""

    def each(step: Step) -> None:
        if step.number == number:
            raise Killed

    return each


def saving(kill: object) -> tuple[str, str]:
    """Return flags with which the step before `kill` is saved, and few others: each save takes as long as two steps."""
    return "--checkpoint-steps", str(max(1, kill - 1) if isinstance(kill, int) else 99)


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


class Stateful:
    """Its attributes are its state."""

    def __init__(self, **attributes: Any):
        vars(self).update(attributes)

    def state_dict(self) -> dict[str, Any]:
        return vars(self).copy()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


def alone(*argv: str, metrics: Any = None, **defaults: int) -> contextlib.AbstractContextManager[Run]:
    return training.start(flags_for(*argv, **defaults), metrics=metrics)


def nothing(*_: object) -> None:
    pass


def mse(t: "Trained", x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(t.model(x), y)


def squares(t: "Trained", x: Tensor, *rest: Tensor) -> Tensor:
    return t.model(x).square().mean()


class Trained:
    """A training from its start to its end, as its author would write it. What is not given is the regression's.

    net: makes the model, or is it. optimizer: of the parameters. data: of run.steps, or what gives it. The other functions
    get this object, with what there is by then as attributes: run, net, model, optimizer, what was registered, step, batch.
    head and tail are called at the ends of an epoch, with its number; at_step before a step's batches, each after its
    update, end after training. kill: the step after which it is killed. start: of flags, another one than on one process.
    """

    def __init__(
        self, *argv: str, out: Path | None = None, net: Any = network, lr: Any = 0.1, optimizer: Any = None,
        data: Any = (X, Y), loss: Callable[..., Any] = mse, registered: Callable[..., Any] = lambda t: {},
        before: Callable[..., Any] = nothing, head: Callable[..., Any] = nothing, at_step: Callable[..., Any] = nothing,
        each: Callable[..., Any] = nothing, tail: Callable[..., Any] = nothing, end: Callable[..., Any] = nothing,
        kill: object = None, epochs: int = 2, batch_size: int = 8, steps: int | None = None, metrics: Any = None,
        stop_at: Any = None, count: Any = None, restart: bool = False, changes: bool = False,
        clip_norm: float | None = None, seed: Any = None,
        start: Callable[..., contextlib.AbstractContextManager[Run]] = alone, **prepare: Any,
    ):  # fmt: skip
        words = (*argv, "--output-dir", str(out)) if out else argv
        self.losses: list[float] = []  # of each step's last micro-batch
        with start(*words, epochs=epochs, batch_size=batch_size, metrics=metrics) as self.run:
            if seed is not None:
                torch.manual_seed(seed)
            self.net = net if isinstance(net, nn.Module) else net()
            make = optimizer or (lambda parameters: torch.optim.SGD(parameters, lr=lr))
            self.model, self.optimizer = self.run.prepare(self.net, make(self.net.parameters()), **prepare)
            objects = registered(self)
            self.run.register(**objects)
            vars(self).update(objects)
            before(self)
            for epoch in self.run.epochs(None if steps else epochs, steps=steps, stop_at=stop_at):
                head(self, epoch)
                for step in self.run.steps(*(data(self) if callable(data) else data), restart=restart, changes=changes):
                    self.step = step
                    at_step(self)
                    for batch in step.batches():
                        self.batch = batch
                        value = loss(self, *(batch if isinstance(batch, (tuple, list)) else [batch]))
                        step.backward(value, count=count(*batch) if callable(count) else count)
                    step.update(clip_norm=clip_norm)
                    self.losses.append(value.item())
                    each(self)
                    kill_at(kill)(step)
                tail(self, epoch)
            end(self)

    def weights(self) -> Tensor:
        return torch.cat([parameter.detach().reshape(-1) for parameter in self.net.parameters()])

    def rate(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])


def killed(program: Callable[..., object], *arguments: Any, **options: Any) -> None:
    with pytest.raises(Killed):
        program(*arguments, **options)


def resumed(program: Callable[..., Any], directory: Path, *stops: object) -> tuple[Any, Any]:
    """Return what a program returns in one go, and what it does after it was killed at each of `stops`.

    program: of a directory, and of where it is to be killed, or None.
    """
    whole = program(directory / "whole", None)
    for stop in stops:
        killed(program, directory / "apart", stop)
    return whole, program(directory / "apart", None)
