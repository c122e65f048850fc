"""Several data sets in one step: `run.steps({"labelled": a, "unlabelled": b})`.

The first one determines the epochs. Where a pass takes n of its samples, over all ranks, it takes n times R of another one:
R is the ratio of their batch sizes. Each rank takes the same share of both, so one weight holds for the sum of their losses.
The position in each follows from the number of samples of the first one that are done: since the beginning of training, or
with `restart=True` since that of the epoch.
"""

import itertools
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from hvdtrain.engines.base import Engine
from hvdtrain.engines.errors import UserError
from hvdtrain.inputs.dataloaders import is_stream
from hvdtrain.inputs.inputs import Batch, Input, InputKind, are_tensors
from hvdtrain.inputs.plan import Plan
from hvdtrain.inputs.sharding import PlannedBatch, mixed_seed
from hvdtrain.inputs.sources import open_input
from hvdtrain.loop.state import Initial, TrainState

LoaderPart = tuple[Input, int]  # a data set of the step, and its number of samples for each sample of the first one


def of_other(plan: Plan, part: LoaderPart, position: int, seed: int) -> Iterator[tuple[int, PlannedBatch]]:
    """Yield (epoch, batch), as a Plan does: this process's samples of another data set than the first.

    plan: of the first one. position: in samples, since the beginning of training, through all epochs. seed: of the order.
    """
    source, ratio = part
    # Two orders: a pass may begin in one epoch of this data set and end in the next.
    order = lru_cache(2)(lambda epoch: source.order(seed, epoch))
    own = plan.own or (plan.rank,)
    for step in itertools.chain.from_iterable(map(plan.epoch, range(plan.first_epoch, plan.epochs))):
        passes = len(step.batches) // len(own)
        for turn, rank in enumerate(own):
            at = position
            for batch in step.batches[turn * passes : (turn + 1) * passes]:
                epoch, missing, taken = at // source.per_epoch, batch.together * ratio, list[Tensor]()
                while missing:
                    current, first = divmod(at, source.per_epoch)
                    taken.append(order(current)[first : first + missing])
                    at, missing = at + len(taken[-1]), missing - len(taken[-1])
                groups = torch.cat(taken).view(-1, ratio)  # one for each sample of the first data set in this pass
                # Each rank takes the same share of both data sets,
                # so that one weight holds for the sum of their losses.
                mine = groups[rank :: plan.size] if batch.local_count else groups[:1]
                yield epoch, PlannedBatch(mine.reshape(-1), batch.weight, batch.local_count * ratio)
        position = at


class Together(dict[str, Any]):
    """The micro-batches of several data sets, by the names that the script gave to `run.steps`."""

    def __missing__(self, name: str) -> Any:
        raise UserError(f"step.batches() has {', '.join(self)}, and not {name}: use the names given to run.steps()")


class Several(Input):
    """Several inputs in one step, by name. Batches are dictionaries with a part for each. Raises UserError."""

    restart = False

    def __init__(self, kinds: Sequence[InputKind], engine: Engine, data: Mapping[str, Any], seed: int, batch_size: int):
        """kinds: of the parts."""
        self._parts: dict[str, LoaderPart] = {}
        for name, what in data.items():
            self._parts[name] = part_of_step(kinds, engine, name, what, seed, batch_size, first=not self._parts)
        (self._name, (self._first, _)), *self._others = self._parts.items()
        self.samples, self.per_epoch = self._first.samples, self._first.per_epoch
        self.split = self._first.split
        self._planned: dict[str, Iterator[tuple[int, PlannedBatch]]] = {}

    def order(self, seed: int, epoch: int) -> Tensor:
        return self._first.order(seed, epoch)

    def plan(self, engine: Engine, flags: Namespace, initial: Initial, state: TrainState, epochs: int) -> Plan:
        plan = self._first.plan(engine, flags, initial, state, epochs)
        self.per_epoch = plan.per_epoch  # with drop_last=True, not all samples
        return plan

    def require_unchanged(self, epoch: int) -> None:
        for source, _ in self._parts.values():
            source.require_unchanged(epoch)

    def read(self, jobs: Iterable[tuple[int, PlannedBatch]]) -> None:
        self._first.read(jobs)
        for name, part in self._others:
            given = self._plan, part, self._position(part), mixed_seed(self._plan.seed, name) >> 1
            part[0].read(of_other(*given))
            self._planned[name] = of_other(*given)

    def _position(self, part: LoaderPart) -> int:
        """Return how many samples of another data set than the first come before the rest of this epoch."""
        source, ratio = part
        if not self.restart:
            return self._state.samples * ratio
        passes = -(-self.per_epoch * ratio // source.per_epoch)  # epochs of the other one, begun in each of the first
        return self._state.epoch * passes * source.per_epoch + self._state.samples_of_epoch * ratio

    def close(self) -> None:
        for source, _ in self._parts.values():
            source.close()

    def load(self, planned: PlannedBatch) -> Batch:
        self._first.seed = self.seed
        batch = self._first.load(planned)
        data = Together({self._name: batch.data})
        for name, (source, _) in self._others:
            source.seed = self.seed
            data[name] = source.load(next(self._planned[name])[1]).data
        batch.data = data
        return batch


def part_of_step(
    kinds: Sequence[InputKind], engine: Engine, name: str, what: Any, seed: int, batch_size: int, *, first: bool
) -> LoaderPart:
    """Return the input of one of several data sets. first: it determines the epochs. Raises UserError."""
    if is_stream(what):
        remedy = "make one stream of both"
        raise UserError(f"run.steps: {name!r} is a stream, and goes with other data in a step: {remedy}")
    ratio = 1
    if isinstance(what, DataLoader):
        if what.batch_size is None:
            remedy = "give it a sampler, or batch_size"
            raise UserError(f"run.steps: {name!r} has no batch_size, and goes with other data in a step: {remedy}")
        if not first and what.drop_last:
            remedy = "leave it out, its last batch is filled from its next epoch"
            raise UserError(f"run.steps: {name!r} has drop_last=True: {remedy}")
        if not first and what.batch_size % batch_size:
            remedy = f"give it a multiple of --batch-size {batch_size}"
            raise UserError(f"run.steps: {name!r} has batch_size={what.batch_size}: {remedy}")
        ratio = 1 if first else what.batch_size // batch_size
    elif not are_tensors(what):
        remedy = "give it a DataLoader, or tensors in a tuple"
        raise UserError(f"run.steps: {name!r} is a {type(what).__name__}: {remedy}")
    parts = what if isinstance(what, tuple) else (what,)
    source = open_input(kinds, engine, parts, seed, batch_size * ratio, None)
    if not source.per_epoch:
        raise UserError(f"run.steps: {name!r} has no samples", everywhere=True)
    return source, ratio


def several_of(kinds: Sequence[InputKind]) -> InputKind:
    """Return the kind of data that is a dictionary of these."""
    return InputKind(
        lambda data: isinstance(data, Mapping) and bool(data),
        lambda engine, data, seed, batch_size, _: Several(kinds, engine, data, seed, batch_size),
    )
