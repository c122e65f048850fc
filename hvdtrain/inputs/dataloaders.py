"""A DataLoader over a map-style data set, in the order of its shuffle=True or False. Its collate function and workers are
used."""

import contextlib
import copy
import pickle
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from multiprocessing import reduction
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, Sampler, SequentialSampler, Subset

from hvdtrain.engines import lines
from hvdtrain.engines.accelerators import Copies, to_device
from hvdtrain.engines.base import Engine
from hvdtrain.engines.errors import UserError
from hvdtrain.inputs import loading
from hvdtrain.inputs.fetching import COMPARISON, Fetched, Samples, may_leave_out
from hvdtrain.inputs.inputs import CHANGES, Batch, Input, InputKind
from hvdtrain.inputs.plan import Plan
from hvdtrain.inputs.sameness import (
    DRIFTS,
    OF_INIT,
    OF_MAIN,
    SPLIT,
    Compared,
    compared_samples,
    difference_of_samples,
    require_same,
    rows_of_dataset,
    set_by_methods,
    split_of,
)
from hvdtrain.inputs.sharding import PlannedBatch, epoch_order, kept, mixed_seed, shard
from hvdtrain.launching.exit_codes import of_the_user
from hvdtrain.loop.state import Initial, TrainState

FILLERS = 8  # batches of which one has a sample that a collate_fn leaves in
PLAIN = (bool, int, float, str)
DRAWN_SPLIT = "which samples the subset has"


class Loader(Input):
    """A DataLoader over a map-style data set. Its collate function and workers are used, and the order of its sampler.

    As torch does it, each epoch has new workers, with the data set as it is then, unless they are persistent. Raises
    UserError for a DataLoader whose order cannot be controlled. A collective.
    """

    def __init__(self, engine: Engine, given: DataLoader[Any], seed: int, batch_size: int, output: Any):
        require_usable(given)
        self._engine, self._given, self._seed = engine, given, seed
        self._copies = Copies(engine.device)
        self._asks_rank = given.num_workers > 0 and engine.rank == 0
        self._keeps = output is not None and output.output_dir is not None  # on rank 0
        self._epoch, self._compared = 0, engine.size == 1 and not given.num_workers
        self._jobs = Jobs()
        self._loader: DataLoader[Any] | None = None  # with persistent workers
        self._sent: dict[str, Any] = {}  # what these have of the data set
        self._batches: Iterator[Any] | None = None
        self._draws = True  # reading in the rank seeds the generators of this process, and draws from them
        self.samples = self.per_epoch = len(given.dataset)  # type: ignore[arg-type] # map-style: it has a length
        self.split = self._first_split = self._split_now()
        engine.require_equal(DRAWN_SPLIT, self.split, SPLIT)
        self.rows = rows_of_dataset(given.dataset)
        self.set_by_epoch = set_by_methods(given.dataset, self.rows)
        self._read_sampler()
        require_batch_size(given, batch_size)
        self.may_leave_out = may_leave_out(given.collate_fn)
        sampler = given.sampler if given.batch_sampler is None else given.batch_sampler
        if any(
            type(part).__module__ == RandomSampler.__module__ and getattr(part, "generator", None)
            for part in nested_samplers(sampler)
        ):
            output.say_once(
                "samples: in an order by --seed and the epoch, also of a sampler with a generator= of its own"
            )

    def _read_sampler(self) -> None:
        """Take the order of a sampler of the user's own; here, there is none."""

    def plan(self, engine: Engine, flags: Namespace, initial: Initial, state: TrainState, epochs: int) -> Plan:
        if self._given.drop_last and self.per_epoch >= engine.size:  # else there are too few samples in any case
            self.per_epoch -= self.per_epoch % initial.global_batch
            if not self.per_epoch:
                message = (
                    f"drop_last=True leaves no step: there are fewer samples than the {initial.global_batch} of one"
                )
                raise UserError(f"{message}: leave it out", everywhere=True)
        return super().plan(engine, flags, initial, state, epochs)

    def require_unchanged(self, epoch: int) -> None:
        self._epoch = epoch
        with self._engine.raising_together("data set"):
            if (now := len(self._given.dataset)) != self.samples:  # type: ignore[arg-type] # as above
                raise UserError(f"run.steps() got {now} samples, and {self.samples} in the epoch before: {CHANGES}")
            split = self._split_now()
        self._engine.require_equal(DRAWN_SPLIT, split, SPLIT)
        self.split = self.split if split == self._first_split else None
        rows = rows_of_dataset(self._given.dataset)
        self.rows = {name: held for name, held in self.rows.items() if rows.get(name) == held}

    def _split_now(self) -> int | None:
        sampler = self._given.sampler if self._given.batch_size is not None else self._given.batch_sampler
        return split_of(self._given.dataset, *nested_samplers(sampler))

    def order(self, seed: int, epoch: int) -> Tensor:
        return plain_order(self._given, self.samples, seed, epoch)

    def read(self, jobs: Iterable[tuple[int, PlannedBatch]]) -> None:
        batches = ((epoch, batch.indices.tolist()) for epoch, batch in jobs)
        numbers = [] if self._compared else compared_samples(self.order(self._seed, self._epoch))
        self._jobs.begin(chain([(COMPARISON, numbers)] if numbers else [], batches))
        self._batches = None  # ends the workers of the epoch before
        loader = self._loader
        if loader is None:
            seed = mixed_seed(self._seed, "workers", self._engine.rank, self._epoch)
            samples = Samples(self._given, self._seed, watched=self._keeps)
            persistent, workers, device = self._given.persistent_workers, self._given.num_workers, self._engine.device
            self._draws = not workers and samples.moves_generators
            loader = loading.loader(
                samples, workers, device, self._jobs, given=self._given, seed=seed, persistent=persistent
            )
            self._loader, self._sent = loader if persistent else None, plain_attributes(self._given.dataset)
        elif self._engine.rank == 0:
            warn_of_change(self._sent, self._given.dataset)
        self._batches = begun(loader)
        if numbers:  # by a worker: the data set may open files that must not be open in the rank
            # While the workers start, whose own samples are to be the same.
            in_rank = compared_in_rank(self._given, self._seed, numbers) if self._asks_rank else []
            with own_randomness(self._given.num_workers):
                compared = next(self._batches).batch
            self._jobs.are_done()
            indices = [number % self.samples for number in numbers]
            require_same(self._engine, indices, compared)
            warn_of_main(indices, in_rank, compared, OF_INIT if self._given.worker_init_fn is not None else OF_MAIN)
            self._compared = True

    def load(self, planned: PlannedBatch) -> Batch:
        assert self._batches is not None
        try:
            with kept(seed=self.seed) if self._draws else contextlib.nullcontext():
                fetched = fetched_by(self._batches)
        except Exception as error:
            of_worker = str(error).startswith("Caught ") and of_the_user(str(error)) is None
            if of_worker and compared_in_rank(self._given, self._seed, planned.indices.tolist(), all_of_them=True):
                lines.warn_once(f"the rank can read the samples that a DataLoader worker could not: {OF_MAIN}")
            raise
        # Ended at once: where Python's garbage collector ends workers, with their queues, torch waits for five seconds.
        if self._jobs.are_done():
            self._batches = None
        if fetched.drifted:
            lines.warn_once(f"{fetched.drifted} changes when samples are read: {DRIFTS}")
        count = min(planned.local_count, fetched.samples)
        data = fetched.batch if fetched.samples else self._filler(planned)
        # Fewer samples than planned: the mean over them counts for so many less in the step's mean.
        weight = planned.weight * count / planned.local_count if count < planned.local_count else planned.weight
        return Batch(self._copies.to_device(data), planned.indices, count, weight, planned.first)

    def close(self) -> None:
        if self._loader is not None:
            loading.end_workers(self._loader)
        self._batches = self._loader = None

    def _filler(self, planned: PlannedBatch) -> Any:
        """Return a batch in place of one without samples. It has weight 0, and takes part in every collective."""
        samples = Samples(self._given, self._seed)
        with kept():
            for some in torch.arange(self.samples).split(len(planned.indices))[:FILLERS]:
                if (fetched := samples[0, some.tolist()]).samples:
                    return fetched.batch
        raise UserError("the DataLoader's collate_fn returned None: let it return the batch")


def plain_order(given: DataLoader[Any], count: int, seed: int, epoch: int) -> Tensor:
    """Return the order of shuffle=True or False in `epoch`, int64 [count]."""
    return torch.arange(count) if isinstance(given.sampler, SequentialSampler) else epoch_order(count, seed, epoch)


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
        """Note that one more is done. Return whether these are all, so that workers can be ended at once."""
        self._open -= 1
        return self._ended and not self._open

    def __len__(self) -> int:  # of persistent workers: torch asks, and makes a note
        return 0


def nested_samplers(sampler: Any) -> Iterator[Any]:
    """Yield a sampler and those that it holds, such as the sampler of a BatchSampler."""
    yield sampler
    held = getattr(sampler, "__dict__", {}).values()
    yield from chain.from_iterable(nested_samplers(value) for value in held if isinstance(value, Sampler))


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
            remedy = "use DataLoader, with its work in collate_fn or in the loop"
            raise UserError(f"the DataLoader is a {type(given).__name__}, whose own {name} is not called: {remedy}")
    if isinstance(given.dataset, IterableDataset):
        return
    if not hasattr(given.dataset, "__len__"):
        raise UserError(f"the DataLoader's {type(given.dataset).__name__} has no length: give it __len__")
    if given.batch_size is None and given.batch_sampler is None:
        raise UserError("the DataLoader has batch_size=None: give it batch_size=flags.batch_size, or a batch_sampler")


def require_batch_size(given: DataLoader[Any], batch_size: int) -> None:
    """Raise UserError if the DataLoader has another batch size than --batch-size."""
    if given.batch_size not in (None, batch_size):
        message = f"the DataLoader has batch_size={given.batch_size}, --batch-size is {batch_size}"
        raise UserError(f"{message}: write DataLoader(..., batch_size=flags.batch_size)")


def iterate(
    engine: Engine, given: DataLoader[Any], batches: Dataset[Any], jobs: Iterable[Any] | None = None
) -> Iterator[Any]:
    """Return an iterator over `batches`, with the workers of `given`. Raises UserError.

    batches: by the items of `jobs`, or iterable.
    """
    return begun(loading.loader(batches, given.num_workers, engine.device, jobs, given=given))


def begun(loader: DataLoader[Any]) -> Iterator[Any]:
    """Return an iterator of a loader, which starts its workers. Raises UserError."""
    try:
        return iter(loader)
    except BrokenPipeError as error:
        remedy = "use num_workers=0 to see the error in the rank"
        raise UserError(
            f"a DataLoader worker has ended while it started (what it printed is above): {remedy}"
        ) from error
    except (EOFError, ConnectionError) as error:
        raise UserError(
            "the process that starts DataLoader workers has ended while it imported the program: keep what trains, or "
            'uses MPI or other ranks, under `if __name__ == "__main__":`, or use num_workers=0'
        ) from error
    except RuntimeError as error:
        if "fork context" not in str(error):
            raise
        raise UserError(
            "the Dataset holds a Value, a lock or a queue that workers cannot have, as they are not forked: make it by "
            'multiprocessing.get_context("forkserver"), or use num_workers=0'
        ) from error
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UserError(
            f"the Dataset cannot be sent to workers ({error}): define its class, and the functions that it holds, at the "
            "top level of a module, or use num_workers=0"
        ) from error


def own_randomness(workers: int) -> contextlib.AbstractContextManager[None]:
    """Context manager for loading samples: without workers, that reseeds the global generators of this process."""
    return contextlib.nullcontext() if workers else kept()


def fetched_by(batches: Iterator[Any]) -> Fetched:
    """Return the next batch. Raises UserError."""
    fetched: Fetched = next(batches)
    if fetched.problem:
        raise UserError(fetched.problem)
    return fetched


def compared_in_rank(
    given: DataLoader[Any], seed: int, numbers: Sequence[int], *, all_of_them: bool = False
) -> Compared:
    """Return what the rank itself reads of these samples; nothing if it cannot. all_of_them: however long it takes."""
    try:
        # Of a copy, as workers get it: what the data set opens in
        # the rank must not go to the workers of the next epoch.
        samples: Samples = reduction.ForkingPickler.loads(reduction.ForkingPickler.dumps(Samples(given, seed)))
        with kept():
            if all_of_them:
                samples.samples(0, numbers)
            return samples.compared(numbers)
    except (Exception, KeyboardInterrupt, SystemExit):
        # Such as a counter of multiprocessing, which only a new process can get; the last two come from the data set.
        return []


def warn_of_main(numbers: Sequence[int], in_rank: Compared, in_worker: Compared, remedy: str) -> None:
    """Warn if a worker reads other samples than the rank, because the data set uses what main() has set in the rank."""
    for number, one, other in zip(numbers, in_worker, in_rank, strict=False):
        line = f"sample {number} can be read in the rank, and not in a DataLoader worker" if one is None else None
        line = line or difference_of_samples(number, one or [], other or [], "in a DataLoader worker", "in the rank")
        if other is not None and line:
            lines.warn_once(f"{line}: {remedy}")
            return


def plain_attributes(dataset: object) -> dict[str, Any]:
    """Return the numbers and texts among the attributes of a data set, also of one in a Subset."""
    own = {name: value for name, value in getattr(dataset, "__dict__", {}).items() if type(value) in PLAIN}
    return own | (plain_attributes(dataset.dataset) if isinstance(dataset, Subset) else {})


def warn_of_change(sent: Mapping[str, Any], dataset: object) -> None:
    """Warn if a data set has changed since its persistent workers were started. A resumed run would have new ones."""
    for name, now in plain_attributes(dataset).items():
        # By `repr`, because NaN is not equal to itself.
        if repr(sent.get(name)) != repr(now):
            message = f"{name} of the data set is {now} now, and {sent.get(name)} in its workers"
            lines.warn_once(f"{message}, until a resume: leave persistent_workers out")
            return


def loader_evaluation(engine: Engine, given: DataLoader[Any], seed: int) -> Iterator[Batch]:
    """Yield this rank's batches of a test set. Over all ranks, each sample is yielded once."""
    require_usable(given)
    yield from in_batches(engine, given, seed, torch.arange(len(given.dataset)))  # type: ignore[arg-type] # map-style: it has a length


def in_batches(engine: Engine, given: DataLoader[Any], seed: int, order: Tensor) -> Iterator[Batch]:
    """Yield this rank's batches of a test set in this order, int64 [n]."""
    # As torch leaves out the last batch.
    if given.drop_last and given.batch_size and (rest := len(order) % given.batch_size):
        if engine.size > 1 and engine.rank == 0:
            sizes = f"drop_last=True, batch_size={given.batch_size}"
            message = f"the evaluation leaves out {rest} of {len(order)} samples: {sizes}"
            lines.warn_once(f"{message}, whatever the number of ranks; write drop_last=False to evaluate all")
        order = order[:-rest]
    mine = order[shard(len(order), engine.rank, engine.size)]
    yield from loaded(engine, given, seed, [part for part in mine.split(given.batch_size or 1) if len(part)])


def loaded(engine: Engine, given: DataLoader[Any], seed: int, parts: Sequence[Tensor]) -> Iterator[Batch]:
    """Yield the batches with these indices, each int64 [b]."""
    batches = iterate(engine, given, Samples(given, seed), ((0, part.tolist()) for part in parts))
    for part in parts:
        with own_randomness(given.num_workers):
            fetched = fetched_by(batches)
        yield Batch(to_device(fetched.batch, engine.device), part, fetched.samples)


LOADER = InputKind(lambda data: isinstance(data, DataLoader), Loader, loader_evaluation)


def given_to(engine: Engine, given: Any) -> dict[int, Any]:
    """Return what each rank of this process reads: the first one what was given, others copies. Raises UserError."""
    first, *others = engine.own
    each = {first: given}
    for rank in others:
        try:
            each[rank] = copy.copy(given) if isinstance(given, DataLoader) else copy.deepcopy(given)
            if isinstance(given, DataLoader):
                vars(each[rank])["dataset"] = copy.deepcopy(given.dataset)
        except Exception as error:  # any: these are objects of the author
            name = type(getattr(given, "dataset", given)).__name__
            message = f"--virtual-ranks cannot copy {name} for each rank ({error})"
            raise UserError(f"{message}: open files in its __iter__", everywhere=True) from error
    return each
