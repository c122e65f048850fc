"""Which kind of data a program gives to `run.steps` and `run.evaluating`."""

import json
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from hvdtrain.engines.accelerators import Copies
from hvdtrain.engines.base import Engine
from hvdtrain.engines.errors import UserError
from hvdtrain.flags import plain, refused
from hvdtrain.inputs.inputs import CHANGES, Batch, Input, InputKind
from hvdtrain.inputs.sharding import kept


class Begin(Protocol):
    """Begins to read."""

    def __call__(self, opened: Input, *, first: bool) -> None: ...


def open_input(
    kinds: Sequence[InputKind], engine: Engine, data: tuple[Any, ...], seed: int, batch_size: int, output: Any
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


class Data:
    """What this rank reads in steps and in evaluations. flags used: seed, batch_size."""

    def __init__(self, kinds: Callable[[], Sequence[InputKind]], engine: Engine, flags: Namespace, output: Any):
        """kinds: returns the kinds of data, which are imported when the first is opened."""
        self._kinds, self._engine, self._flags, self._output = kinds, engine, flags, output
        self._copies = Copies(engine.device)
        self.given: tuple[Any, ...] = ()  # the arguments of `run.steps`
        self.input: Input | None = None  # what they were opened as, once training has begun

    def open(self, data: tuple[Any, ...]) -> Input:
        """Return a new input for the arguments of `run.steps`. A collective. Raises UserError."""
        flags = self._flags
        return open_input(self._kinds(), self._engine, data, flags.seed, flags.batch_size, self._output)

    def evaluated(self, data: Any) -> Iterator[Batch]:
        """Return this rank's batches of a test set. Over all ranks, each sample is there once. Raises UserError."""
        require_default_device()
        for kind in self._kinds():
            if kind.evaluated is not None and kind.takes(data):
                return kind.evaluated(self._engine, data, self._flags.seed)
        raise UserError(f"run.evaluating() got a {type(data).__name__}: give it a number of samples, or a DataLoader")

    def of_epoch(self, data: tuple[Any, ...], changes: bool, restart: bool, begin: Begin) -> Input:
        """Return the input for the arguments of `run.steps` in this epoch. In the first one, training begins. A collective.

        begin: called with a new input.
        """
        require_default_device()
        before = self.input
        if before is not None and same_source(data, self.given) and bool(before.restart) == restart and not changes:
            return before
        with kept():  # a DataLoader draws a seed for its workers when it begins
            opened = self.open(data)
            opened.changes = changes
            if opened.restart is not None:
                opened.restart = restart
            elif restart:
                remedy = "leave it out, an epoch of one begins anew by itself"
                raise UserError(f"run.steps(..., restart=True) is for several data sets: {remedy}", everywhere=True)
            remedy = "give every rank all samples, each takes its part of them"
            self._engine.require_equal("the number of samples of run.steps()", opened.samples, remedy)
            if before is not None and before.samples != opened.samples and not changes:
                unlike = f"{opened.samples} samples, and {before.samples} in the epoch before"
                raise UserError(f"run.steps() got {unlike}: {CHANGES}")
            begin(opened, first=before is None)
        if before is not None:
            before.close()  # it would keep its workers
        self.given, self.input = data, opened
        return opened

    def to_device(self, tensors: tuple[Tensor, ...]) -> Any:
        """Return the tensors on this rank's device."""
        return self._copies.to_device(tensors)


def require_default_device() -> None:
    """Raise UserError if new tensors are not on the CPU."""
    # Indices, counts and messages between ranks are made on the CPU, without naming it.
    # `torch.get_default_device` of torch 2.3 to 2.6 fails after `set_default_device(None)`.
    if (device := torch.empty(0).device).type != "cpu":
        remedy = "leave it out: run.prepare and run.to_device move models and data"
        raise UserError(f"torch.set_default_device({str(device)!r}) was called: {remedy}", everywhere=True)


def same_source(one: Any, other: Any) -> bool:
    """Return whether `run.steps` was given the same again: the same object, the same number, or a tuple or dictionary of
    these."""
    if type(one) is type(other) is dict:
        return list(one) == list(other) and same_source(tuple(one.values()), tuple(other.values()))
    if type(one) is type(other) is tuple:
        return len(one) == len(other) and all(map(same_source, one, other))
    return one is other or (isinstance(one, int) and one == other)


MOST_FACTS = 2**16  # characters of JSON


def data_described(name: str, reason: str, facts: Mapping[str, object]) -> dict[str, Any]:
    """Return what is recorded and compared of the data that a program describes. Raises UserError."""
    for what, text in (("name", name), ("reason", reason)):
        if not isinstance(text, str) or len(text.splitlines()) != 1:
            raise UserError(
                f"run.describe_data() got {text!r} as the {what}: give it one line of text", everywhere=True
            )
    data: dict[str, Any] = {"dataset": name}
    for key, value in facts.items():
        try:
            data[key] = plain(value, refused)
        except ValueError as error:
            remedy = "give it numbers, text, or lists and dictionaries of these"
            raise UserError(f"run.describe_data({key}=...) got {error}: {remedy}", everywhere=True) from error
        if len(json.dumps(data[key])) > MOST_FACTS:
            remedy = "give it a checksum, as hashlib.sha256(...).hexdigest()"
            raise UserError(
                f"run.describe_data({key}=...) is longer than {MOST_FACTS:,} characters: {remedy}", everywhere=True
            )
        if key == "dataset" and value != name:
            raise UserError(
                "run.describe_data(dataset=...): the name of the data is its first argument", everywhere=True
            )
    return data
