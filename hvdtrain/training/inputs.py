"""The sources of a step's samples: indices, tensors, a DataLoader, or hvdtrain's image loaders, all in the same order.

The order, the position in it and the seed of each sample are determined by `loading.Plan`. They depend neither on the number
of ranks nor on the number of DataLoader workers.
"""

import contextlib
import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler

from hvdtrain.cli import Flags
from hvdtrain.data import loading
from hvdtrain.data.loading import Plan, Source
from hvdtrain.data.sharding import PlannedBatch, epoch_order, kept, mixed_seed, seed_generators, shard
from hvdtrain.engines.accelerators import CPU, Copies, to_device
from hvdtrain.engines.base import Engine
from hvdtrain.engines.errors import UserError
from hvdtrain.training.samplers import Drawn, numbered
from hvdtrain.training.state import Initial, TrainState


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

    samples: int  # number of samples in the data set
    may_wait = True  # `load` may take long: for workers, a disk, a network
    indices_on = CPU  # where the indices are needed: reading them from an accelerator would stop the host

    @abstractmethod
    def load(self, planned: PlannedBatch) -> Batch:
        """Return the next micro-batch of the plan."""

    def plan(
        self, engine: Engine, flags: Flags, initial: Initial, state: TrainState, epochs: int | None, steps: int | None
    ) -> Plan:
        """Return the plan of this rank's remaining samples. epochs or steps: total number. Raises UserError if there are too
        few samples."""
        count = self.epoch_samples()
        if count < engine.size:
            said = (
                f"{count} samples but {engine.size} ranks: use -np {count} or fewer"
                if count
                else "there are no samples"
            )
            raise UserError(said, everywhere=True)
        if epochs is None:
            assert steps is not None
            epochs = state.epoch + 1 + -(-steps * initial.global_batch // count)
        return Plan(
            self.samples, count, flags.seed, epochs, engine.rank, engine.size, flags.batch_size, flags.accumulate,
            initial.global_batch, state.epoch, state.samples_of_epoch, self.indices_on, self.order,
        )  # fmt: skip

    def order(self, seed: int, epoch: int) -> Tensor:
        """Return the order of the samples in `epoch` (from 0), int64 [n], the same on every rank."""
        return epoch_order(self.samples, seed, epoch)

    def epoch_samples(self) -> int:
        """Return the number of samples per epoch, over all ranks."""
        return self.samples

    def steps_per_epoch(self, initial: Initial) -> int:
        """Return the number of steps per epoch, over all ranks."""
        return -(-self.epoch_samples() // initial.global_batch)

    def begin(self, plan: Iterable[tuple[int, PlannedBatch]]) -> None:  # noqa: B027 - not all inputs read ahead
        """Prepare for loading. Called before the first micro-batch of `plan`: (epoch, batch) of all remaining epochs."""

    def at_end(self, samples_of_epoch: int) -> bool:
        """Return whether the epoch has ended with this number of samples, over all ranks."""
        return samples_of_epoch == self.epoch_samples()

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
        self.samples = samples

    def load(self, planned: PlannedBatch) -> Batch:
        return Batch(None, planned.indices, planned.local_count, planned.weight, planned.first)


class Tensors(Input):
    """Tensors of equal length, each [n, ...]. Batches are gathered on the tensors' device; use `Run.to_device` before."""

    may_wait = False

    def __init__(self, tensors: Sequence[Tensor], device: torch.device):
        self.tensors = tensors
        self._copies = None if device.type == "cpu" else Copies(device)
        self.samples = len(tensors[0])
        if all(tensor.device == tensors[0].device for tensor in tensors):
            self.indices_on = tensors[0].device

    def load(self, planned: PlannedBatch) -> Batch:
        data = []
        for tensor in self.tensors:
            # Several times faster than tensor[indices], which copies value by value.
            data.append(tensor.index_select(0, planned.indices.to(tensor.device)))
        moved = tuple(data) if self._copies is None else self._copies.to_device(tuple(data))
        return Batch(moved, planned.indices, planned.local_count, planned.weight, planned.first)


class Loader(Input):
    """A DataLoader over a map-style data set. Its collate function and workers are used, and the order of its sampler.

    Raises UserError for a DataLoader whose order cannot be controlled. A collective.
    """

    def __init__(self, engine: Engine, given: DataLoader[Any], seed: int, batch_size: int):
        self._engine, self._given, self._seed = engine, given, seed
        self._copies = Copies(engine.device)
        require_batches(given)
        self._batches: Iterator[Any] | None = None
        self.samples = len(given.dataset)  # type: ignore[arg-type] # map-style: it has a length
        self._drawn = drawn(engine, given, seed)
        self._whole = self._drawn if given.batch_size is None else None  # batches stay whole
        if self._whole is None:
            require_batch_size(given, batch_size)

    def order(self, seed: int, epoch: int) -> Tensor:
        if self._drawn is not None:
            return torch.cat(self._numbered(seed, epoch)) if self._drawn.samples else torch.empty(0, dtype=torch.int64)
        in_order = isinstance(self._given.sampler, SequentialSampler)
        return torch.arange(self.samples) if in_order else super().order(seed, epoch)

    def _numbered(self, seed: int, epoch: int) -> list[Tensor]:
        assert self._drawn is not None
        return numbered(self._drawn.batches(seed, epoch), self.samples)

    def epoch_samples(self) -> int:
        return self.samples if self._drawn is None else self._drawn.samples

    def steps_per_epoch(self, initial: Initial) -> int:
        if self._whole is None:
            return super().steps_per_epoch(initial)
        return -(-len(self._whole.batches(self._seed, 0)) // (initial.ranks * initial.accumulate))

    def plan(
        self, engine: Engine, flags: Flags, initial: Initial, state: TrainState, epochs: int | None, steps: int | None
    ) -> Plan:
        if self._whole is None:
            return super().plan(engine, flags, initial, state, epochs, steps)
        if epochs is None and steps is not None:
            epochs = state.epoch + 1 + steps  # at least a step in each
        plan = super().plan(engine, flags, initial, state, epochs, steps)
        return replace(plan, batches=self._numbered, batches_per_step=initial.ranks * initial.accumulate)

    def begin(self, plan: Iterable[tuple[int, PlannedBatch]]) -> None:
        jobs = ((epoch, batch.indices.tolist()) for epoch, batch in plan)
        self._batches = iterate(self._engine, self._given, Samples(self._given, self._seed), jobs)

    def load(self, planned: PlannedBatch) -> Batch:
        assert self._batches is not None
        with own_randomness(self._given.num_workers):
            data = self._copies.to_device(next(self._batches))
        if data is None:
            raise UserError("the DataLoader's collate_fn returned None: let it return the batch")
        indices = planned.indices if self._drawn is None else planned.indices % self.samples
        return Batch(data, indices, planned.local_count, planned.weight, planned.first)


class Images(Input):
    """hvdtrain's image folders and shards, which skip unreadable samples."""

    def __init__(self, engine: Engine, source: Source, say: Any):
        self._engine, self._source, self._output, self._copies = engine, source, say, Copies(engine.device)
        self.samples = source.train_count
        self._batches: Iterator[loading.Loaded] | None = None

    def order(self, seed: int, epoch: int) -> Tensor:
        return self._source.order(seed, epoch) if self._source.order else super().order(seed, epoch)

    def epoch_samples(self) -> int:
        return min(self._source.per_epoch or self.samples, self.samples)

    def begin(self, plan: Iterable[tuple[int, PlannedBatch]]) -> None:
        assert isinstance(plan, Plan)
        self._batches = iter(self._source.train(plan))

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

        return Several(parts_of_step(engine, what, seed, batch_size))
    if data and all(isinstance(part, Tensor) and part.ndim > 0 for part in data):
        if len({len(part) for part in data}) > 1:
            raise UserError(
                f"run.steps got tensors of {', '.join(str(len(t)) for t in data)} samples: give equal lengths"
            )
        for tensor in data:
            if tensor.device.type not in ("cpu", engine.device.type):
                how = "use run.to_device(...)"
                raise UserError(f"run.steps got a tensor on {tensor.device}, and ranks are on {engine.device}: {how}")
        return Tensors(data, engine.device)
    kinds = ", ".join(type(part).__name__ for part in data) or "nothing"
    how = "give it tensors, a number of samples, or a DataLoader"
    if isinstance(what, (list, tuple)) and any(isinstance(part, DataLoader) for part in what):
        how = 'several data sets go in a dictionary, run.steps({"a": ..., "b": ...})'
    raise UserError(f"run.steps got {kinds}: {how}")


def parts_of_step(engine: Engine, data: Mapping[str, Any], seed: int, batch_size: int) -> dict[str, tuple[Input, int]]:
    """Return the inputs of several data sets, with the number of samples for each sample of the first. Raises UserError."""
    parts: dict[str, tuple[Input, int]] = {}
    for name, what in data.items():
        given = what if isinstance(what, tuple) else (what,)
        if is_stream(what):
            raise UserError(
                f"run.steps: {name!r} is a stream, and goes with other data in a step: make one stream of both"
            )
        if isinstance(what, DataLoader):
            if what.batch_size is None:
                how = "give it a sampler, or batch_size"
                raise UserError(f"run.steps: {name!r} has no batch_size, and goes with other data in a step: {how}")
            if parts and what.batch_size % batch_size:
                how = f"give it a multiple of --batch-size {batch_size}"
                raise UserError(f"run.steps: {name!r} has batch_size={what.batch_size}: {how}")
            ratio = what.batch_size // batch_size if parts else 1
            part: Input = Loader(engine, what, seed, batch_size * ratio)
        elif all(isinstance(one, Tensor) and one.ndim for one in given):
            part, ratio = open_input(engine, given, seed, batch_size, None), 1  # of equal lengths
        else:
            raise UserError(
                f"run.steps: {name!r} is a {type(what).__name__}: give it a DataLoader, or tensors in a tuple"
            )
        if not part.epoch_samples():
            raise UserError(f"run.steps: {name!r} has no samples", everywhere=True)
        parts[name] = part, ratio
    return parts


def same_data(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Return whether `run.steps` was given the same arguments again: the same objects, or the same number."""
    if len(one) != len(other):
        return False
    return all(same(a, b) for a, b in zip(one, other, strict=True))


def same(one: Any, other: Any) -> bool:
    """Return whether both are the same object, the same number, or contain the same objects."""
    if type(one) is dict and type(other) is dict:
        return list(one) == list(other) and same_data(tuple(one.values()), tuple(other.values()))
    if type(one) is tuple and type(other) is tuple:
        return same_data(one, other)
    return one is other or (isinstance(one, int) and one == other)


def is_stateful(what: object) -> bool:
    """Return whether the position of `what` can be saved and restored."""
    return hasattr(what, "state_dict") and hasattr(what, "load_state_dict")


def is_stream(what: object) -> bool:
    """Return whether `what` is a loader whose samples have no index."""
    if isinstance(what, DataLoader):
        return isinstance(what.dataset, IterableDataset)
    return hasattr(what, "__iter__") and is_stateful(what)


def require_batches(given: DataLoader[Any]) -> None:
    """Raise UserError if the DataLoader loads samples by index, and not in batches, or iterates in a way of its own."""
    require_torchs_iterator(given)
    if not hasattr(given.dataset, "__len__"):
        raise UserError(f"the DataLoader's {type(given.dataset).__name__} has no length: give it __len__")
    if given.batch_size is None and given.batch_sampler is None:
        raise UserError("the DataLoader has batch_size=None: give it batch_size=flags.batch_size, or a batch_sampler")


def require_torchs_iterator(given: DataLoader[Any]) -> None:
    """Raise UserError for a subclass of DataLoader that does something in its iterator, which is not called."""
    for name in ("__iter__", "_get_iterator"):
        if getattr(type(given), name) is not getattr(DataLoader, name) and not is_stateful(given):
            how = "use DataLoader, with its work in collate_fn or in the loop over step.batches()"
            raise UserError(f"the DataLoader is a {type(given).__name__}, whose own {name} is not called: {how}")


def require_batch_size(given: DataLoader[Any], batch_size: int) -> None:
    """Raise UserError if the DataLoader has another batch size than --batch-size, or drops samples."""
    if given.batch_size != batch_size:
        raise UserError(
            f"the DataLoader has batch_size={given.batch_size}, --batch-size is {batch_size}: "
            "write DataLoader(..., batch_size=flags.batch_size)"
        )
    if given.drop_last:
        raise UserError("the DataLoader has drop_last=True: leave it out, an uneven last step is weighted instead")


def drawn(engine: Engine, given: DataLoader[Any], seed: int) -> Drawn | None:
    """Return the order that the user's sampler or batch sampler draws; None for shuffle=True and False. A collective."""
    sampler, count = given.sampler, len(given.dataset)  # type: ignore[arg-type] # map-style: it has a length
    if given.batch_size is None:
        return Drawn(engine, given.batch_sampler, seed, count, in_batches=True)
    shuffles = isinstance(sampler, RandomSampler) and not sampler.replacement and sampler.num_samples == count
    if shuffles or isinstance(sampler, SequentialSampler):
        return None
    return Drawn(engine, sampler, seed, count, in_batches=False)


class Samples(Dataset[Any]):
    """Batches of a map-style data set: item (epoch, indices) is the collated batch of those samples.

    Before each sample, the generators of torch, Python and numpy are seeded from seed, epoch and index, and from how often
    a sampler has drawn it before (see `numbered`). Random augmentation therefore does not depend on the worker or rank that
    loads the sample.
    """

    def __init__(self, given: DataLoader[Any], seed: int):
        self.dataset, self.collate, self.seed = given.dataset, given.collate_fn, seed
        self.count = len(given.dataset)  # type: ignore[arg-type] # map-style: it has a length

    def __getitem__(self, job: tuple[int, list[int]]) -> Any:
        epoch, indices = job
        samples = []
        for number in indices:
            again, index = divmod(number, self.count)
            seed_generators(mixed_seed(self.seed, epoch, index, *([again] if again else [])))
            samples.append(self.dataset[index])
        return self.collate(samples)


def iterate(
    engine: Engine,
    given: DataLoader[Any],
    batches: Dataset[Any],
    jobs: Iterator[Any] | None,
    worker_init: Callable[[int], None] | None = None,
) -> Iterator[Any]:
    """Return an iterator over `batches`, with the workers of `given`. Raises UserError.

    batches: by the items of `jobs`, or iterable. worker_init: default: that of `given`.
    """
    options: dict[str, Any] = {"timeout": given.timeout}
    if given.num_workers:
        loading.start_workers_early([])
        options |= {"prefetch_factor": given.prefetch_factor, "worker_init": worker_init or given.worker_init_fn}
    try:
        return iter(loading.loader(batches, given.num_workers, engine.device, jobs, **options))
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
    require_batches(given)
    order = drawn(engine, given, seed)
    if given.batch_size is None and order is not None:
        batches_of_all = order.batches(seed, 0)
        parts = batches_of_all[shard(len(batches_of_all), engine.rank, engine.size)]
    else:
        count = len(given.dataset)  # type: ignore[arg-type] # map-style: it has a length
        whole = torch.arange(count) if order is None else order.order(seed, 0)
        mine = whole[shard(len(whole), engine.rank, engine.size)]
        parts = [part for part in mine.split(given.batch_size or 1) if len(part)]
    batches = iterate(engine, given, Samples(given, seed), ((0, part.tolist()) for part in parts))
    for part in parts:
        with own_randomness(given.num_workers):
            data = to_device(next(batches), engine.device)
        yield Batch(data, part, len(part))


def own_randomness(workers: int) -> contextlib.AbstractContextManager[None]:
    """Context manager for loading samples: without workers, that reseeds the global generators of this process."""
    return contextlib.nullcontext() if workers else kept()
