"""Which kind of data a program gives to `run.steps` and `run.evaluating`."""

from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from hvdtrain.engines.accelerators import Copies
from hvdtrain.engines.base import Engine
from hvdtrain.engines.errors import UserError
from hvdtrain.inputs.inputs import CHANGES, Batch, Input, Kind
from hvdtrain.inputs.sharding import kept

if TYPE_CHECKING:
    from hvdtrain.loop.loop import Loop


def open_input(
    kinds: Sequence[Kind], engine: Engine, data: tuple[Any, ...], seed: int, batch_size: int, output: Any
) -> Input:
    """Return the input for the arguments of `run.steps`, by the first kind that takes them. Raises UserError."""
    what = data[0] if len(data) == 1 else data
    for kind in kinds if not (len(data) == 1 and isinstance(what, tuple)) else ():
        if kind.takes(what):
            return kind.opened(engine, what, seed, batch_size, output)
    names = ", ".join(type(part).__name__ for part in data) or "nothing"
    remedy = "give it tensors, a number of samples, or a DataLoader"
    if isinstance(what, (list, tuple)) and any(isinstance(part, DataLoader) for part in what):
        remedy = 'several data sets go in a dictionary, run.steps({"a": ..., "b": ...})'
    raise UserError(f"run.steps got {names}: {remedy}")


def evaluation_batches(kinds: Sequence[Kind], engine: Engine, data: Any, seed: int) -> Iterator[Batch]:
    """Return this rank's batches of a test set. Over all ranks, each sample is there once. Raises UserError."""
    for kind in kinds:
        if kind.evaluated is not None and kind.takes(data):
            return kind.evaluated(engine, data, seed)
    raise UserError(f"run.evaluating() got a {type(data).__name__}: give it a number of samples, or a DataLoader")


class Data:
    """What this rank reads in steps and in evaluations. flags used: seed, batch_size."""

    def __init__(self, kinds: Callable[[], Sequence[Kind]], engine: Engine, flags: Namespace, output: Any):
        """kinds: returns the kinds of data, which are imported when the first is opened."""
        self._kinds, self._engine, self._flags, self._output = kinds, engine, flags, output
        self._copies = Copies(engine.device)
        self._given: tuple[Any, ...] = ()  # the arguments of `run.steps`
        self.input: Input | None = None  # what they were opened as, once training has begun

    def open(self, data: tuple[Any, ...]) -> Input:
        """Return a new input for the arguments of `run.steps`. A collective. Raises UserError."""
        flags = self._flags
        return open_input(self._kinds(), self._engine, data, flags.seed, flags.batch_size, self._output)

    def evaluated(self, data: Any) -> Iterator[Batch]:
        """Return this rank's batches of a test set."""
        require_default_device()
        return evaluation_batches(self._kinds(), self._engine, data, self._flags.seed)

    def is_same(self, data: tuple[Any, ...]) -> bool:
        """Return whether `run.steps` was given the same again."""
        return self.input is not None and same(data, self._given)

    def take(self, data: tuple[Any, ...], opened: Input) -> None:
        """Read from now on what `data` was opened as."""
        self._given, self.input = data, opened

    def to_device(self, tensors: tuple[Tensor, ...]) -> Any:
        """Return the tensors on this rank's device."""
        return self._copies.to_device(tensors)


def require_default_device() -> None:
    """Raise UserError if new tensors are not on the CPU: indices, counts and messages between ranks are made there."""
    if (device := torch.get_default_device()).type != "cpu":
        remedy = "leave it out: run.prepare and run.to_device move models and data"
        raise UserError(f"torch.set_default_device({str(device)!r}) was called: {remedy}", everywhere=True)


def of_epoch(run: "Loop", data: tuple[Any, ...], changes: bool) -> Input:
    """Return the input for the arguments of `run.steps` in this epoch. In the first one, training begins. A collective."""
    require_default_device()
    if run.data.input is not None and run.data.is_same(data) and not changes:
        return run.data.input
    with kept():  # a DataLoader draws a seed for its workers when it begins
        return _opened(run, data, changes)


def _opened(run: "Loop", data: tuple[Any, ...], changes: bool) -> Input:
    before, state = run.data.input, run.state
    opened = run.data.open(data)
    opened.changes = changes
    remedy = "give every rank all samples, each takes its part of them"
    run.engine.require_equal("the number of samples of run.steps()", opened.samples, remedy)
    if before is not None and before.samples != opened.samples and not changes:
        raise UserError(
            f"run.steps() got {opened.samples} samples, and {before.samples} in the epoch before: {CHANGES}"
        )
    if before is None:
        run.checkpoints.require_all(opened)
        if line := opened.restore(run.checkpoints.positions, state):
            run.say(line)
    if state.samples_of_epoch > opened.per_epoch > 0:
        done = f"{state.samples_of_epoch} samples of this epoch are done, and it has {opened.per_epoch}"
        raise UserError(f"the checkpoint does not match the data: {done}: give the same data", everywhere=True)
    epochs = run.length.epochs
    if epochs is None:
        epochs = state.epoch + 1 + (run.length.steps or 0)  # at least a step in each
    per_epoch = opened.begin(run.engine, run.flags, run.initial, state, epochs)
    run.metrics_logger.steps = run.length.steps or (0 if changes else epochs * per_epoch)  # 0: not known
    run.data.take(data, opened)
    run.checkpoints.begin_training()
    run.stopping.begin(state.step)
    return opened


def same(one: Any, other: Any) -> bool:
    """Return whether `run.steps` was given the same again: the same object, the same number, or a tuple or dictionary of
    these."""
    if type(one) is type(other) is dict:
        return list(one) == list(other) and same(tuple(one.values()), tuple(other.values()))
    if type(one) is type(other) is tuple:
        return len(one) == len(other) and all(map(same, one, other))
    return one is other or (isinstance(one, int) and one == other)
