"""What the steps read: the interface of all kinds of data, and the two simplest: a number of samples, and tensors.

The order, the position in it and the seed of each sample are determined by a `Plan`. They depend neither on the number of
ranks nor on the number of DataLoader workers.
"""

import itertools
from abc import ABC, abstractmethod
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.data import TensorDataset

from hvdtrain.engines.accelerators import CPU, Copies
from hvdtrain.engines.base import Engine
from hvdtrain.engines.errors import UserError
from hvdtrain.inputs.plan import Plan
from hvdtrain.inputs.sameness import compared_of, compared_samples, require_same, rows_of_dataset
from hvdtrain.inputs.sharding import PlannedBatch, PlannedStep, epoch_order
from hvdtrain.loop.state import Initial, TrainState

CHANGES = "if the data of the epochs differ, write run.steps(..., changes=True)"


@dataclass(slots=True)
class Batch:
    """The samples of one rank for one forward and backward pass. Iterating over it yields the parts of `data`."""

    data: Any  # the loaded data, on the device; None if `Run.steps` was given a number
    # int64 [b], 1 <= b <= batch_size: indices in the data set. On the CPU, except for tensors on an accelerator.
    indices: Tensor
    count: int  # number of valid samples: b minus unreadable ones; 0 if there is no sample left for this rank
    # Factor for the mean loss of these samples, so that the sum over micro-batches, averaged over ranks, is the step's mean.
    weight: float = 1.0
    first: int = 0  # of the samples of all ranks in this pass, those of lower ranks: see `Run.gather`

    def __iter__(self) -> Iterator[Any]:
        if self.data is None:
            raise UserError(
                "run.steps(NUMBER) gives indices: write `for batch in step.batches()` and use batch.indices"
            )
        return iter(self.data)


class Input(ABC):
    """The samples of one `for step in run.steps(...)`, over all epochs."""

    samples: int  # in the data set; 0: a stream
    per_epoch: int  # over all ranks; 0: a stream, whose end is found when it is read
    split: int | None = None  # a hash of the indices that subsets have, if there are any, and they do not vary
    rows: Mapping[str, str] = {}  # a hash of each list of files or numbers in the data set, of those that do not vary
    set_by_epoch: frozenset[str] = frozenset()  # those of `rows` that a method of the data set sets, as set_epoch does
    changes = False  # another epoch may have other data
    may_be_new = False  # an epoch may be given other values, without a word
    restart: bool | None = None  # of several data sets: whether each epoch begins all of them anew; None: it is one
    may_leave_out = False  # batches may have fewer samples than planned
    may_wait = True  # `load` may take long: for workers, a disk, a network
    indices_on = CPU  # where the indices are needed: reading them from an accelerator would stop the host
    batches: Callable[[int, int], Sequence[Tensor]] | None = None  # of (seed, epoch), if batches stay whole on a rank
    # What this rank needs to continue here, as JSON, if the number of samples is not enough, as in a stream.
    position: Callable[[], Any] | None = None
    shares_position = False  # it is rank 0's for all
    seed: int | None = None  # of the generators while `load` is called; None: something may have drawn from them since
    _plan: Plan
    _state: TrainState

    @abstractmethod
    def load(self, planned: PlannedBatch) -> Batch:
        """Return the next micro-batch of the plan."""

    def close(self) -> None:  # noqa: B027 - not all inputs have workers
        """End the workers."""

    def order(self, seed: int, epoch: int) -> Tensor:
        """Return the order of the samples in `epoch` (from 0), int64 [n], the same on every rank."""
        return epoch_order(self.samples, seed, epoch)

    def plan(self, engine: Engine, flags: Namespace, initial: Initial, state: TrainState, epochs: int) -> Plan:
        """Return the plan of this rank's remaining samples. Raises UserError if there are fewer than ranks.

        flags used: seed, batch_size, accumulate.
        """
        if self.per_epoch < engine.size:
            flag = "--virtual-ranks" if engine.takes_turns else "-np"
            few = f"{self.per_epoch} samples but {engine.size} ranks: use {flag} {self.per_epoch} or fewer"
            raise UserError(
                few if self.per_epoch > 0 else "there are no samples: give run.steps() data that have some",
                everywhere=True,
            )
        return Plan(
            self.samples, self.per_epoch, flags.seed, epochs, engine.rank, engine.size, flags.batch_size,
            flags.accumulate, initial.global_batch, state.epoch, state.samples_of_epoch, self.indices_on, self.order,
            self.batches, initial.ranks * initial.accumulate, engine.own,
        )  # fmt: skip

    def begin(self, engine: Engine, flags: Namespace, initial: Initial, state: TrainState, epochs: int) -> int:
        """Plan the remaining samples. Return the number of steps per epoch; 0: not known."""
        self._state, self._plan = state, self.plan(engine, flags, initial, state, epochs)
        return self._plan.steps_per_epoch()

    def require_unchanged(self, epoch: int) -> None:  # noqa: B027 - some inputs cannot change
        """Raise UserError on every rank if the data are others than when training began, so that the plan does not fit. A
        collective, before `epoch`."""

    def read(self, jobs: Iterable[tuple[int, PlannedBatch]]) -> None:  # noqa: B027 - not all inputs read ahead
        """Begin to read these micro-batches: (epoch, batch) of the rest of an epoch."""

    def steps(self, epoch: int) -> Iterator[PlannedStep]:
        """Begin to read `epoch`, and return this rank's remaining steps of it. A collective."""
        self.require_unchanged(epoch)
        # Not only in a resumed run: a second loop over epochs goes on where a limit of steps ended the first.
        self._plan = self._plan.of_epoch(epoch, self._state.samples_of_epoch)
        planned, ahead = itertools.tee(self._plan.epoch(epoch))
        self.read((epoch, batch) for step in ahead for batch in step.batches)
        return planned

    def at_end(self, samples_of_epoch: int) -> bool:
        """Return whether the epoch has ended with this number of samples, over all ranks."""
        return samples_of_epoch == self.per_epoch

    def restore(self, positions: Callable[[], list[Any] | None], state: TrainState) -> str | None:
        """Continue where a checkpoint was saved. A collective. Return a line if samples of this epoch are repeated.

        positions: a collective that returns what `position` returned on each rank; None if that was nothing.
        """
        return None


class InputKind(NamedTuple):
    """A kind of data that `run.steps` and `run.evaluating` take. loop/start.py lists all."""

    takes: Callable[[Any], bool]
    opened: Callable[[Engine, Any, int, int, Any], Input]  # of engine, data, seed, batch size, output
    evaluated: Callable[[Engine, Any, int], Iterator[Batch]] | None = None  # this rank's part of a test set


# ---- the two simplest kinds


class Indices(Input):
    """A number of samples; the script loads them itself by index."""

    may_wait = False

    def __init__(self, samples: int):
        self.samples = self.per_epoch = samples

    def load(self, planned: PlannedBatch) -> Batch:
        return Batch(None, planned.indices, planned.local_count, planned.weight, planned.first)


class Tensors(Input):
    """Tensors of equal length, each [n, ...]. Batches are gathered on the tensors' device; use `Run.to_device` before."""

    may_wait, may_be_new = False, True

    def __init__(self, engine: Engine, tensors: Sequence[Tensor]):
        device = engine.device
        self.tensors, self._engine, self._compared = tensors, engine, False
        self._copies = None if device.type == "cpu" else Copies(device)
        self.samples = self.per_epoch = len(tensors[0])
        self.rows = rows_of_dataset(TensorDataset(*tensors))
        if all(tensor.device == tensors[0].device for tensor in tensors):
            self.indices_on = tensors[0].device

    def require_unchanged(self, epoch: int) -> None:
        if not self._compared and self._engine.size > 1:
            # In any order: only the data set that determines the epochs has a plan.
            numbers = compared_samples(self.order(0, epoch))
            compared = compared_of(numbers, lambda number: [tensor[number] for tensor in self.tensors])
            require_same(self._engine, numbers, compared)
        self._compared = True

    def load(self, planned: PlannedBatch) -> Batch:
        data = []
        for tensor in self.tensors:
            # Several times faster than tensor[indices], which copies value by value.
            data.append(tensor.index_select(0, planned.indices.to(tensor.device)))
        moved = tuple(data) if self._copies is None else self._copies.to_device(tuple(data))
        return Batch(moved, planned.indices, planned.local_count, planned.weight, planned.first)


def are_tensors(data: Any) -> bool:
    """Return whether `data` is a tensor, or a tuple of tensors, with rows."""
    parts = data if isinstance(data, tuple) else (data,)
    return bool(parts) and all(isinstance(part, Tensor) and part.ndim > 0 for part in parts)


def open_tensors(engine: Engine, data: Any, *_: object) -> Tensors:
    """Return the input for a tensor, or for a tuple of tensors. Raises UserError."""
    tensors = data if isinstance(data, tuple) else (data,)
    if len({len(part) for part in tensors}) > 1:
        lengths = ", ".join(str(len(part)) for part in tensors)
        raise UserError(f"run.steps got tensors of {lengths} samples: give equal lengths")
    for tensor in tensors:
        if tensor.device.type not in ("cpu", engine.device.type):
            remedy = "use run.to_device(...)"
            raise UserError(f"run.steps got a tensor on {tensor.device}, and ranks are on {engine.device}: {remedy}")
    return Tensors(engine, tensors)


NUMBER = InputKind(
    lambda data: isinstance(data, int) and not isinstance(data, bool), lambda engine, count, *_: Indices(count)
)
TENSORS = InputKind(are_tensors, open_tensors)
