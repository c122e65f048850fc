"""Several data sets in one step: `run.steps({"labelled": a, "unlabelled": b})`.

The first one determines the epochs. Where a pass takes n of its samples, over all ranks, it takes n times R of another one:
R is the ratio of their batch sizes. Each rank takes the same share of both, so one weight holds for the sum of their losses.
The position in each follows from the number of samples of the first one that are done.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from hvdtrain.cli import Flags
from hvdtrain.data.loading import Plan
from hvdtrain.data.sharding import PlannedBatch, mixed_seed
from hvdtrain.engines.base import Engine
from hvdtrain.engines.errors import UserError
from hvdtrain.training.inputs import Batch, Input
from hvdtrain.training.state import Initial, TrainState

Part = tuple[Input, int]  # a data set of the step, and its number of samples for each sample of the first one


class Beside:
    """The samples of this rank from another data set than the first. Iterating over it yields (epoch, batch), as a Plan.

    plan: of the first one. done: samples of the first one that are done. seed: of the order.
    """

    def __init__(self, plan: Plan, part: Part, done: int, seed: int):
        self._plan, self._done, self._seed = plan, done, seed
        self._input, self._ratio = part
        self._orders: dict[int, Tensor] = {}

    def _order(self, epoch: int) -> Tensor:
        if epoch not in self._orders:
            self._orders = {known: held for known, held in self._orders.items() if known >= epoch - 1}
            self._orders[epoch] = self._input.order(self._seed, epoch)
        return self._orders[epoch]

    def _taken(self, position: int, count: int) -> Tensor:
        """Return `count` indices from `position` on, counted from the beginning of training through all epochs."""
        length, parts = self._input.epoch_samples(), []
        while count:
            epoch, first = divmod(position, length)
            part = self._order(epoch)[first : first + count]
            parts.append(part)
            position, count = position + len(part), count - len(part)
        return torch.cat(parts)

    def __iter__(self) -> Iterator[tuple[int, PlannedBatch]]:
        position, ratio = self._done * self._ratio, self._ratio
        for _, batch in self._plan:
            together = self._taken(position, batch.together * ratio)
            groups = together.view(-1, ratio)  # one for each sample of the first data set in this pass
            mine = groups[self._plan.rank :: self._plan.size] if batch.local_count else groups[:1]
            epoch = position // self._input.epoch_samples()
            yield epoch, PlannedBatch(mine.reshape(-1), batch.weight, batch.local_count * ratio)
            position += len(together)


class Together(dict[str, Any]):
    """The micro-batches of several data sets, by the names that the script gave to `run.steps`."""

    def __missing__(self, name: str) -> Any:
        raise UserError(f"step.batches() has {', '.join(self)}, and not {name}: use the names given to run.steps()")


class Several(Input):
    """Several inputs in one step, by name. Batches are dictionaries with a part for each."""

    def __init__(self, parts: Mapping[str, Part]):
        self._parts = dict(parts)
        self._first, *self._others = self._parts
        self.samples = self._parts[self._first][0].samples
        self._done = 0
        self._planned: dict[str, Iterator[tuple[int, PlannedBatch]]] = {}

    def order(self, seed: int, epoch: int) -> Tensor:
        return self._parts[self._first][0].order(seed, epoch)

    def epoch_samples(self) -> int:
        return self._parts[self._first][0].epoch_samples()

    def plan(
        self, engine: Engine, flags: Flags, initial: Initial, state: TrainState, epochs: int | None, steps: int | None
    ) -> Plan:
        self._done = state.samples
        return super().plan(engine, flags, initial, state, epochs, steps)

    def begin(self, plan: Iterable[tuple[int, PlannedBatch]]) -> None:
        assert isinstance(plan, Plan)
        self._parts[self._first][0].begin(plan)
        for name in self._others:
            beside = Beside(plan, self._parts[name], self._done, mixed_seed(plan.seed, name) >> 1)
            self._parts[name][0].begin(beside)
            self._planned[name] = iter(beside)

    def load(self, planned: PlannedBatch) -> Batch:
        batch = self._parts[self._first][0].load(planned)
        data = Together({self._first: batch.data})
        for name in self._others:
            _, beside = next(self._planned[name])
            data[name] = self._parts[name][0].load(beside).data
        batch.data = data
        return batch
