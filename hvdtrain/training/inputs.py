"""The sources of a step's samples: indices, tensors, a DataLoader, or hvdtrain's image loaders, all in the same order.

The order, the position in it and the seed of each sample are determined by `loading.Plan`. They depend neither on the number
of ranks nor on the number of DataLoader workers.
"""

import contextlib
import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler

from hvdtrain.cli import Flags
from hvdtrain.data import loading
from hvdtrain.data.loading import Plan, Source
from hvdtrain.data.sharding import PlannedBatch, PlannedStep, epoch_order, kept, mixed_seed, shard
from hvdtrain.engines.accelerators import CPU, Copies, to_device
from hvdtrain.engines.base import Engine
from hvdtrain.engines.errors import UserError
from hvdtrain.training.fetching import COMPARISON, Fetched, Samples, may_leave_out
from hvdtrain.training.sameness import SPLIT, require_same, some_of, split_of, told_of
from hvdtrain.training.samplers import Drawn, numbered, parts_of
from hvdtrain.training.state import Initial, TrainState

FILLERS = 8  # batches of which one has a sample that a collate_fn leaves in
DRAWN_SPLIT = "which samples the subset has"
SAME_NUMBER = "keep as many in each epoch, or begin another training.start() with the others"


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
    may_leave_out = False  # batches may have fewer samples than planned
    may_wait = True  # `load` may take long: for workers, a disk, a network
    indices_on = CPU  # where the indices are needed: reading them from an accelerator would stop the host
    batches: Callable[[int, int], list[Tensor]] | None = None  # of (seed, epoch), if batches stay whole on a rank
    _plan: Plan

    @abstractmethod
    def load(self, planned: PlannedBatch) -> Batch:
        """Return the next micro-batch of the plan."""

    def close(self) -> None:  # noqa: B027 - not all inputs have workers
        """End the workers."""

    def order(self, seed: int, epoch: int) -> Tensor:
        """Return the order of the samples in `epoch` (from 0), int64 [n], the same on every rank."""
        return epoch_order(self.samples, seed, epoch)

    def plan(self, engine: Engine, flags: Flags, initial: Initial, state: TrainState, epochs: int) -> Plan:
        """Return the plan of this rank's remaining samples. Raises UserError if there are fewer than ranks."""
        if self.per_epoch < engine.size:
            few = f"{self.per_epoch} samples but {engine.size} ranks: use -np {self.per_epoch} or fewer"
            raise UserError(few if self.per_epoch else "there are no samples", everywhere=True)
        return Plan(
            self.samples, self.per_epoch, flags.seed, epochs, engine.rank, engine.size, flags.batch_size,
            flags.accumulate, initial.global_batch, state.epoch, state.samples_of_epoch, self.indices_on, self.order,
            self.batches, initial.ranks * initial.accumulate,
        )  # fmt: skip

    def begin(self, engine: Engine, flags: Flags, initial: Initial, state: TrainState, epochs: int) -> int:
        """Plan the remaining samples. Return the number of steps per epoch; 0: not known."""
        self._plan = self.plan(engine, flags, initial, state, epochs)
        return self._plan.steps_per_epoch()

    def require_unchanged(self, epoch: int) -> None:  # noqa: B027 - some inputs cannot change
        """Raise UserError on every rank if the data are others than when training began, so that the plan does not fit. A
        collective, before `epoch`."""

    def read(self, jobs: Iterable[tuple[int, PlannedBatch]]) -> None:  # noqa: B027 - not all inputs read ahead
        """Begin to read these micro-batches: (epoch, batch) of the rest of an epoch."""

    def steps(self, epoch: int) -> Iterator[PlannedStep]:
        """Begin to read `epoch`, and return this rank's remaining steps of it. A collective."""
        self.require_unchanged(epoch)
        self.read(self._plan.of_epoch(epoch))
        return self._plan.epoch(epoch)

    def at_end(self, samples_of_epoch: int) -> bool:
        """Return whether the epoch has ended with this number of samples, over all ranks."""
        return samples_of_epoch == self.per_epoch

    def restore(self, positions: Callable[[], list[Any] | None], state: TrainState) -> str | None:
        """Continue where a checkpoint was saved. A collective. Return a line if samples of this epoch are repeated.

        positions: a collective that returns what `position` returned on each rank; None if that was nothing.
        """
        return None

    def position(self) -> Any:
        """Return what this rank needs besides the number of samples to continue here, as JSON; None: nothing."""
        return None

    def settle(self) -> dict[str, object]:
        """Exchange events since the last call between ranks. Return fields for the record. A collective."""
        return {}

    def summary(self) -> dict[str, object]:
        """Return fields for summary.json."""
        return {}


class Indices(Input):
    """A number of samples; the script loads them itself by index."""

    may_wait = False

    def __init__(self, samples: int):
        self.samples = self.per_epoch = samples

    def load(self, planned: PlannedBatch) -> Batch:
        return Batch(None, planned.indices, planned.local_count, planned.weight, planned.first)


class Tensors(Input):
    """Tensors of equal length, each [n, ...]. Batches are gathered on the tensors' device; use `Run.to_device` before."""

    may_wait = False

    def __init__(self, engine: Engine, tensors: Sequence[Tensor]):
        device = engine.device
        self.tensors, self._engine, self._compared = tensors, engine, False
        self._copies = None if device.type == "cpu" else Copies(device)
        self.samples = self.per_epoch = len(tensors[0])
        if all(tensor.device == tensors[0].device for tensor in tensors):
            self.indices_on = tensors[0].device

    def require_unchanged(self, epoch: int) -> None:
        if not self._compared and self._engine.size > 1:
            numbers = some_of(self.order(self._plan.seed, epoch))
            told = told_of(numbers, lambda number: [tensor[number] for tensor in self.tensors])
            require_same(self._engine, numbers, told)
        self._compared = True

    def load(self, planned: PlannedBatch) -> Batch:
        data = []
        for tensor in self.tensors:
            # Several times faster than tensor[indices], which copies value by value.
            data.append(tensor.index_select(0, planned.indices.to(tensor.device)))
        moved = tuple(data) if self._copies is None else self._copies.to_device(tuple(data))
        return Batch(moved, planned.indices, planned.local_count, planned.weight, planned.first)


class Loader(Input):
    """A DataLoader over a map-style data set. Its collate function and workers are used, and the order of its sampler.

    As torch does it, each epoch has new workers, with the data set as it is then, unless they are persistent. Raises
    UserError for a DataLoader whose order cannot be controlled. A collective.
    """

    def __init__(self, engine: Engine, given: DataLoader[Any], seed: int, batch_size: int):
        require_usable(given)
        self._engine, self._given, self._seed = engine, given, seed
        self._copies = Copies(engine.device)
        self._epoch, self._compared = 0, engine.size == 1
        self._jobs = Jobs()
        self._loader: DataLoader[Any] | None = None  # with persistent workers
        self._batches: Iterator[Any] | None = None
        self.samples = self.per_epoch = len(given.dataset)  # type: ignore[arg-type] # map-style: it has a length
        self.split = self._first_split = self._split_now()
        engine.require_equal(DRAWN_SPLIT, self.split, SPLIT)
        self._drawn = drawn(engine, given, seed)
        require_batch_size(given, batch_size)
        self.may_leave_out = may_leave_out(given.collate_fn)
        if self._drawn is not None:
            self.per_epoch = self._drawn.samples
            if given.batch_size is None:
                self.batches = self._numbered

    def plan(self, engine: Engine, flags: Flags, initial: Initial, state: TrainState, epochs: int) -> Plan:
        if self._given.drop_last and self.per_epoch >= engine.size:  # else there are too few samples in any case
            self.per_epoch -= self.per_epoch % initial.global_batch
            if not self.per_epoch:
                said = f"drop_last=True leaves no step: there are fewer samples than the {initial.global_batch} of one"
                raise UserError(f"{said}: leave it out", everywhere=True)
        return super().plan(engine, flags, initial, state, epochs)

    def require_unchanged(self, epoch: int) -> None:
        self._epoch = epoch
        with self._engine.raising_together("data set"):
            if (now := len(self._given.dataset)) != self.samples:  # type: ignore[arg-type] # as above
                raise UserError(f"run.steps() got {now} samples, and {self.samples} in the epoch before: {SAME_NUMBER}")
            digest = 0 if self._drawn is None else self._drawn.digest(epoch)
            split = self._split_now()
        self._engine.require_equal(DRAWN_SPLIT, split, SPLIT)
        self.split = self.split if split == self._first_split else None
        if self._drawn is not None:
            self._drawn.require_equal(digest)

    def _split_now(self) -> int | None:
        sampler = self._given.sampler if self._given.batch_size is not None else self._given.batch_sampler
        return split_of(self._given.dataset, *parts_of(sampler))

    def order(self, seed: int, epoch: int) -> Tensor:
        if self._drawn is not None:
            return torch.cat(self._numbered(seed, epoch)) if self._drawn.samples else torch.empty(0, dtype=torch.int64)
        in_order = isinstance(self._given.sampler, SequentialSampler)
        return torch.arange(self.samples) if in_order else super().order(seed, epoch)

    def _numbered(self, seed: int, epoch: int) -> list[Tensor]:
        assert self._drawn is not None
        return numbered(self._drawn.batches(seed, epoch), self.samples)

    def read(self, jobs: Iterable[tuple[int, PlannedBatch]]) -> None:
        batches = ((epoch, batch.indices.tolist()) for epoch, batch in jobs)
        numbers = [] if self._compared else some_of(self.order(self._seed, self._epoch))
        self._jobs.begin(chain([(COMPARISON, numbers)] if numbers else [], batches))
        self._batches = None  # ends the workers of the epoch before
        loader = self._loader
        if loader is None:
            seed = mixed_seed(self._seed, "workers", self._engine.rank, self._epoch)
            samples, persistent = Samples(self._given, self._seed), self._given.persistent_workers
            loader = opened(self._engine, self._given, samples, self._jobs, seed=seed, persistent=persistent)
            self._loader = loader if persistent else None
        self._batches = begun(loader)
        if numbers:  # by a worker: the data set may open files that must not be open in the rank
            with own_randomness(self._given.num_workers):
                told = next(self._batches).batch
            self._jobs.are_done()
            require_same(self._engine, [number % self.samples for number in numbers], told)
            self._compared = True

    def load(self, planned: PlannedBatch) -> Batch:
        assert self._batches is not None
        with own_randomness(self._given.num_workers):
            fetched: Fetched = next(self._batches)
        if self._jobs.are_done():
            self._batches = None
        count = min(planned.local_count, fetched.samples)
        data = fetched.batch if fetched.samples else self._filler(planned)
        weight = planned.weight * count / planned.local_count if count < planned.local_count else planned.weight
        indices = planned.indices if self._drawn is None else planned.indices % self.samples
        return Batch(self._copies.to_device(data), indices, count, weight, planned.first)

    def close(self) -> None:
        self._batches = self._loader = None

    def _filler(self, planned: PlannedBatch) -> Any:
        """Return a batch in place of one without samples. It has weight 0, and takes part in every collective."""
        samples = Samples(self._given, self._seed)
        with kept():
            for some in torch.arange(self.samples).split(len(planned.indices))[:FILLERS]:
                if (fetched := samples[0, some.tolist()]).samples:
                    return fetched.batch
        raise UserError("the DataLoader's collate_fn returned None: let it return the batch")


class Jobs:
    """What the workers of a rank are asked for in an epoch: (epoch, indices) of each micro-batch."""

    def begin(self, of_epoch: Iterator[tuple[int, list[int]]]) -> None:
        """Begin an epoch."""
        self._of_epoch, self._open, self._ended = of_epoch, 0, False

    def __iter__(self) -> Iterator[tuple[int, list[int]]]:
        for job in self._of_epoch:
            self._open += 1
            yield job
        self._ended = True

    def are_done(self) -> bool:
        """Note that one more is done. Return whether these are all, so that workers can be ended at once: where Python's
        garbage collector ends them, with their queues, torch waits for five seconds."""
        self._open -= 1
        return self._ended and not self._open

    def __len__(self) -> int:  # of persistent workers: torch asks, and makes a note
        return 0


class Images(Input):
    """hvdtrain's image folders and shards, which skip unreadable samples."""

    def __init__(self, engine: Engine, source: Source, say: Any):
        self._engine, self._source, self._output, self._copies = engine, source, say, Copies(engine.device)
        self.samples = source.train_count
        self.per_epoch = min(source.per_epoch or self.samples, self.samples)
        self._batches: Iterator[loading.Loaded] | None = None

    def order(self, seed: int, epoch: int) -> Tensor:
        return self._source.order(seed, epoch) if self._source.order else super().order(seed, epoch)

    def read(self, jobs: Iterable[tuple[int, PlannedBatch]]) -> None:
        if self._batches is None:  # all epochs: the images do not change, and are read across the end of an epoch
            self._batches = iter(self._source.train(self._plan))

    def load(self, planned: PlannedBatch) -> Batch:
        assert self._batches is not None
        loaded = next(self._batches)
        self._source.corrupt.note(loaded.corrupt)
        # Unreadable samples contribute nothing; the other samples keep their weight.
        count = min(planned.local_count, loaded.samples)
        weight = planned.weight * count / max(planned.local_count, 1)
        return Batch(self._copies.to_device((loaded.images, loaded.labels)), planned.indices, count, weight)

    def settle(self) -> dict[str, object]:
        self._source.corrupt.settle(self._engine, self._output)
        return self.summary()

    def summary(self) -> dict[str, object]:
        return {"corrupt": self._source.corrupt.total()}


def open_input(engine: Engine, data: tuple[Any, ...], seed: int, batch_size: int, output: Any) -> Input:
    """Return the input for the arguments of `run.steps`. Raises UserError for unsupported data."""
    what = data[0] if len(data) == 1 else data
    if isinstance(what, int) and not isinstance(what, bool):
        return Indices(what)
    if isinstance(what, Source):
        return Images(engine, what, output)
    if is_stream(what):
        from hvdtrain.training.streams import Stream

        return Stream(engine, what, seed, batch_size, output)
    if isinstance(what, DataLoader):
        return Loader(engine, what, seed, batch_size)
    if isinstance(what, Mapping) and what:
        from hvdtrain.training.beside import Several

        return Several(engine, what, seed, batch_size)
    if data and all(isinstance(part, Tensor) and part.ndim > 0 for part in data):
        if len({len(part) for part in data}) > 1:
            lengths = ", ".join(str(len(part)) for part in data)
            raise UserError(f"run.steps got tensors of {lengths} samples: give equal lengths")
        for tensor in data:
            if tensor.device.type not in ("cpu", engine.device.type):
                how = "use run.to_device(...)"
                raise UserError(f"run.steps got a tensor on {tensor.device}, and ranks are on {engine.device}: {how}")
        return Tensors(engine, data)
    kinds = ", ".join(type(part).__name__ for part in data) or "nothing"
    how = "give it tensors, a number of samples, or a DataLoader"
    if isinstance(what, (list, tuple)) and any(isinstance(part, DataLoader) for part in what):
        how = 'several data sets go in a dictionary, run.steps({"a": ..., "b": ...})'
    raise UserError(f"run.steps got {kinds}: {how}")


def same(one: Any, other: Any) -> bool:
    """Return whether `run.steps` was given the same again: the same object, the same number, or a tuple or dictionary of
    these."""
    if type(one) is type(other) is dict:
        return list(one) == list(other) and same(tuple(one.values()), tuple(other.values()))
    if type(one) is type(other) is tuple:
        return len(one) == len(other) and all(map(same, one, other))
    return one is other or (isinstance(one, int) and one == other)


def is_stateful(what: object) -> bool:
    """Return whether the position of `what` can be saved and restored."""
    return hasattr(what, "state_dict") and hasattr(what, "load_state_dict")


def is_stream(what: object) -> bool:
    """Return whether `what` is a loader whose samples have no index."""
    if isinstance(what, DataLoader):
        return isinstance(what.dataset, IterableDataset)
    return hasattr(what, "__iter__") and is_stateful(what)


def require_usable(given: DataLoader[Any]) -> None:
    """Raise UserError for a DataLoader whose own way of iterating would not be used, or which does not load batches."""
    for name in ("__iter__", "_get_iterator"):
        if getattr(type(given), name) is not getattr(DataLoader, name) and not is_stateful(given):
            how = "use DataLoader, with its work in collate_fn or in the loop over step.batches()"
            raise UserError(f"the DataLoader is a {type(given).__name__}, whose own {name} is not called: {how}")
    if is_stream(given):
        return
    if not hasattr(given.dataset, "__len__"):
        raise UserError(f"the DataLoader's {type(given.dataset).__name__} has no length: give it __len__")
    if given.batch_size is None and given.batch_sampler is None:
        raise UserError("the DataLoader has batch_size=None: give it batch_size=flags.batch_size, or a batch_sampler")


def require_batch_size(given: DataLoader[Any], batch_size: int) -> None:
    """Raise UserError if the DataLoader has another batch size than --batch-size."""
    if given.batch_size not in (None, batch_size):
        said = f"the DataLoader has batch_size={given.batch_size}, --batch-size is {batch_size}"
        raise UserError(f"{said}: write DataLoader(..., batch_size=flags.batch_size)")


def drawn(engine: Engine, given: DataLoader[Any], seed: int) -> Drawn | None:
    """Return the order that the user's sampler or batch sampler draws; None for shuffle=True and False. A collective.

    Raises UserError."""
    sampler, count = given.sampler, len(given.dataset)  # type: ignore[arg-type] # map-style: it has a length
    if given.batch_size is None:
        return Drawn(engine, given.batch_sampler, seed, count, in_batches=True)
    # Not of a subclass, which may have an order of its own.
    if type(sampler) is SequentialSampler and len(sampler) == count:
        return None
    if type(sampler) is RandomSampler and not sampler.replacement and len(sampler) == len(sampler.data_source) == count:
        return None
    return Drawn(engine, sampler, seed, count, in_batches=False)


def iterate(
    engine: Engine, given: DataLoader[Any], batches: Dataset[Any], jobs: Iterable[Any] | None = None
) -> Iterator[Any]:
    """Return an iterator over `batches`, with the workers of `given`. Raises UserError.

    batches: by the items of `jobs`, or iterable.
    """
    return begun(opened(engine, given, batches, jobs))


def opened(
    engine: Engine, given: DataLoader[Any], batches: Dataset[Any], jobs: Iterable[Any] | None,
    *, seed: int | None = None, persistent: bool = False,
) -> DataLoader[Any]:  # fmt: skip
    """Return the loader to iterate over. seed: of what torch seeds the workers with. persistent: they are used again."""
    options: dict[str, Any] = {"timeout": given.timeout, "seed": seed}
    if given.num_workers:
        loading.start_workers_early([])
        options |= {
            "prefetch_factor": given.prefetch_factor,
            "worker_init": given.worker_init_fn,
            "persistent": persistent,
        }
    return loading.loader(batches, given.num_workers, engine.device, jobs, **options)


def begun(loader: DataLoader[Any]) -> Iterator[Any]:
    """Return an iterator of a loader, which starts its workers. Raises UserError."""
    try:
        return iter(loader)
    except BrokenPipeError as error:
        how = "use num_workers=0 to see the error in the rank"
        raise UserError(f"a DataLoader worker has ended while it started (what it printed is above): {how}") from error
    except (EOFError, ConnectionError) as error:
        raise UserError(
            "the process that starts DataLoader workers has ended while it imported the program: keep what trains, or "
            'uses MPI or other ranks, under `if __name__ == "__main__":`, or use num_workers=0'
        ) from error
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UserError(
            f"the Dataset cannot be sent to workers ({error}): define its class, and the functions that it holds, at the "
            "top level of a module, or use num_workers=0"
        ) from error


def evaluation_batches(engine: Engine, given: DataLoader[Any], seed: int) -> Iterator[Batch]:
    """Yield this rank's batches of a test set. Over all ranks, each sample is yielded once."""
    if is_stream(given):
        from hvdtrain.training.streams import evaluated

        yield from evaluated(engine, given, seed)
        return
    require_usable(given)
    order = drawn(engine, given, seed)
    if given.batch_size is None and order is not None:
        batches_of_all = order.batches(seed, 0)
        parts = batches_of_all[shard(len(batches_of_all), engine.rank, engine.size)]
    else:
        count = len(given.dataset)  # type: ignore[arg-type] # map-style: it has a length
        whole = torch.arange(count) if order is None else order.order(seed, 0)
        if given.drop_last and given.batch_size:  # as torch leaves out the last batch
            whole = whole[: len(whole) - len(whole) % given.batch_size]
        mine = whole[shard(len(whole), engine.rank, engine.size)]
        parts = [part for part in mine.split(given.batch_size or 1) if len(part)]
    batches = iterate(engine, given, Samples(given, seed), ((0, part.tolist()) for part in parts))
    for part in parts:
        with own_randomness(given.num_workers):
            fetched: Fetched = next(batches)
        yield Batch(to_device(fetched.batch, engine.device), part, fetched.samples)


def own_randomness(workers: int) -> contextlib.AbstractContextManager[None]:
    """Context manager for loading samples: without workers, that reseeds the global generators of this process."""
    return contextlib.nullcontext() if workers else kept()
