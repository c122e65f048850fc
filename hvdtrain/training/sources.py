"""Which kind of data a program gives to `run.steps` and `run.evaluating`."""

from collections.abc import Iterator, Sequence
from typing import Any

from torch.utils.data import DataLoader

from hvdtrain.engines.base import Engine
from hvdtrain.engines.errors import UserError
from hvdtrain.training.inputs import Batch, Input, Kind


def open_input(
    kinds: Sequence[Kind], engine: Engine, data: tuple[Any, ...], seed: int, batch_size: int, output: Any
) -> Input:
    """Return the input for the arguments of `run.steps`, by the first kind that takes them. Raises UserError."""
    what = data[0] if len(data) == 1 else data
    for kind in kinds if not (len(data) == 1 and isinstance(what, tuple)) else ():
        if kind.takes(what):
            return kind.opened(engine, what, seed, batch_size, output)
    names = ", ".join(type(part).__name__ for part in data) or "nothing"
    how = "give it tensors, a number of samples, or a DataLoader"
    if isinstance(what, (list, tuple)) and any(isinstance(part, DataLoader) for part in what):
        how = 'several data sets go in a dictionary, run.steps({"a": ..., "b": ...})'
    raise UserError(f"run.steps got {names}: {how}")


def evaluation_batches(kinds: Sequence[Kind], engine: Engine, data: Any, seed: int) -> Iterator[Batch]:
    """Return this rank's batches of a test set. Over all ranks, each sample is there once. Raises UserError."""
    for kind in kinds:
        if kind.evaluated is not None and kind.takes(data):
            return kind.evaluated(engine, data, seed)
    raise UserError(f"run.evaluating() got a {type(data).__name__}: give it a number of samples, or a DataLoader")


def same(one: Any, other: Any) -> bool:
    """Return whether `run.steps` was given the same again: the same object, the same number, or a tuple or dictionary of
    these."""
    if type(one) is type(other) is dict:
        return list(one) == list(other) and same(tuple(one.values()), tuple(other.values()))
    if type(one) is type(other) is tuple:
        return len(one) == len(other) and all(map(same, one, other))
    return one is other or (isinstance(one, int) and one == other)
