"""Streams: a DataLoader over an IterableDataset, or another loader with a state.

Each rank has a stream of its own, which need not be as long as the others. An epoch ends when all have ended: a rank whose
stream has ended takes part with its first batch, and weight 0. So every sample counts once, as with other data.

The position in a stream is saved for each rank. It is the state of the loader, or of each worker's data set or its iterator:
what has `state_dict` and `load_state_dict`. It holds for as many ranks and workers as there were.

At an epoch's end, a data set keeps its state, such as a number of epochs that it counts itself: the object does, without
workers; with persistent workers, and at a resume, its state is given to what begins the next epoch.
"""

import contextlib
import copy
import functools
import itertools
import json
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from hvdtrain.engines.accelerators import Copies, to_device
from hvdtrain.engines.base import Engine
from hvdtrain.engines.errors import UserError
from hvdtrain.engines.portable import from_json, to_json
from hvdtrain.inputs import loading
from hvdtrain.inputs.dataloaders import (
    given_to,
    is_stateful,
    is_stream,
    iterate,
    own_randomness,
    require_batch_size,
    require_usable,
)
from hvdtrain.inputs.fetching import may_leave_out, rows_in, samples_in
from hvdtrain.inputs.inputs import Batch, Input, InputKind
from hvdtrain.inputs.packing import Travels
from hvdtrain.inputs.sameness import batch_hash
from hvdtrain.inputs.sharding import PlannedBatch, PlannedStep, mixed_seed, seed_generators
from hvdtrain.loop.state import Initial, TrainState

Position = dict[str, Any]  # JSON: where a reader is in its stream
NextBatch = tuple[Any, int] | None  # a batch and its number of samples; None at the end
Seed = tuple[object, ...]
BEGINNING: Position = {"drawn": 0, "ended": False, "state": None}
END: Any = object()
NO_INDICES = torch.empty(0, dtype=torch.int64)


class Item(NamedTuple):
    """A batch from a worker; of a stream that has ended, none."""

    batch: Any = None
    samples: int = 0
    position: str = ""  # of the worker after this batch, as JSON


class WorkerPart(Travels, IterableDataset[Item]):
    """What one worker of a rank reads, in complete batches. Without workers, the rank itself iterates over it.

    When its stream has ended, it yields empty items for ever, and the workers take turns up to the end: which batch comes
    next does not depend on their speed. Before each batch, the generators of torch, Python and numpy are seeded.
    """

    def __init__(self, given: DataLoader[Any], seed: Seed, turn: int, positions: Sequence[Position], *, keeps: bool):
        """turn: the worker whose batch is next. positions: one for each worker. keeps: whether states are saved."""
        self.dataset, self._collate, self._batch_size = given.dataset, given.collate_fn, given.batch_size
        self._drops_last = given.drop_last
        self._seed, self._turn, self._positions, self._keeps = seed, turn, list(positions), keeps
        self._holder: Any = None  # of the state
        self._drawn, self._ended, self._left = (positions[turn][name] for name in BEGINNING)  # up to the first batch

    def position(self) -> Position:
        """Return the position after the last batch. Raises UserError for a state that cannot be saved."""
        state = stream_state(self._holder) if self._keeps and self._holder is not None else self._left
        return {"drawn": self._drawn, "ended": self._ended, "state": state}

    def _position_as_text(self) -> str:
        """Return the position as JSON, or why it cannot be saved."""
        try:
            return json.dumps(self.position())
        except UserError as error:
            return json.dumps({"error": str(error)})  # an exception of a worker would come with its traceback

    def __iter__(self) -> Iterator[Item]:
        info = get_worker_info()
        worker = 0 if info is None else info.id
        if worker < self._turn:  # it has had its turn in this round
            yield Item()
        held = self._positions[worker]
        self._drawn, self._ended = held["drawn"], held["ended"]
        seed_generators(mixed_seed(*self._seed, worker))
        self._left = held["state"] if self._ended else None
        samples = iter(()) if self._ended else self._samples(held["state"], begins=not self._drawn)
        while True:
            seed_generators(mixed_seed(*self._seed, worker, self._drawn))
            batch, count = None, 0
            while not count and not self._ended:  # a collate_fn may leave out all samples of a batch
                batch, taken, count = self._next(samples)
                self._drawn += taken > 0
                # A short batch is the last one. The state may already be that of the beginning of the next epoch.
                self._ended = taken < (self._batch_size or 1)
            yield Item(batch, count, "" if info is None else self._position_as_text())

    def _samples(self, state: Any, *, begins: bool) -> Iterator[Any]:
        """Return an iterator over the samples, or complete batches, from `state` on.

        begins: `state` is that of the end of the epoch before, which an iterator of it does not get.
        """
        dataset: Any = self.dataset
        fresh = None
        if state is not None and is_stateful(dataset):
            fresh = dataset.state_dict() if begins else None
            dataset.load_state_dict(from_json(state))
        samples: Iterator[Any] = iter(dataset)
        if is_stateful(dataset):
            self._holder = dataset
            if state is not None and begins:
                return or_else(samples, functools.partial(begun_anew, dataset, fresh))
        elif begins:
            self._holder = samples if is_stateful(samples) else None
        elif is_stateful(samples):
            self._holder = samples
            if state is not None:
                self._holder.load_state_dict(from_json(state))
        return samples

    def _next(self, samples: Iterator[Any]) -> tuple[Any, int, int]:
        """Return the next batch, the number of samples taken from the stream for it, 0 at the end, and of those in it."""
        if self._batch_size is None:
            batch = next(samples, END)
            if batch is END:
                return None, 0, 0
            batch = self._collate(batch)
            return batch, 1, rows_in(batch)
        some = list(itertools.islice(samples, self._batch_size))
        if not some or (self._drops_last and len(some) < self._batch_size):
            return None, 0, 0
        batch = self._collate(some)
        return batch, len(some), samples_in(batch, some, len(some)) if may_leave_out(self._collate) else len(some)


def or_else(items: Iterator[Any], other: Callable[[], Iterator[Any]]) -> Iterator[Any]:
    """Yield `items`, or, if there is none, those of `other`: of a data set whose state at the end has nothing after it."""
    empty = True
    for item in items:
        empty = False
        yield item
    if empty:
        yield from other()


def begun_anew(dataset: Any, fresh: Any) -> Iterator[Any]:
    """Return an iterator over a data set with the state that it had when it was made."""
    dataset.load_state_dict(fresh)
    return iter(dataset)


def at_beginning(end: Position) -> Position:
    """Return where an epoch begins whose data set has the state of the end of the epoch before."""
    if "parts" in end:
        return {"turn": 0, "parts": [at_beginning(part) for part in end["parts"]]}
    return BEGINNING | {"state": end["state"]}


def stream_state(what: Any) -> Any:
    """Return the state of a loader, data set or iterator, as JSON. Raises UserError."""
    state = what.state_dict()
    try:
        return to_json(state)
    except TypeError as error:
        remedy = "keep to numbers, text, tensors, and lists and dictionaries of these"
        raise UserError(
            f"the state_dict of {type(what).__name__} cannot be saved (it holds a {error}): {remedy}"
        ) from error


def without_state(position: Position) -> bool:
    """Return whether the rank with this position cannot continue there, because nothing has a state."""
    parts = position.get("parts", [position])
    return any(part["drawn"] and not part["ended"] and part["state"] is None for part in parts)


class Workers:
    """Reads a DataLoader over an IterableDataset with its workers, which take turns, or without."""

    def __init__(self, engine: Engine, given: DataLoader[Any], seed: Seed, held: Position | None, *, keeps: bool):
        self._workers = given.num_workers
        held = held or {"turn": 0, "parts": [BEGINNING] * max(1, self._workers)}
        self._turn, self._positions = held["turn"], list(held["parts"])
        self._part = WorkerPart(given, seed, self._turn, self._positions, keeps=keeps)
        self._items = iterate(engine, given, self._part) if self._workers else iter(self._part)
        for _ in range(self._turn):
            next(self._items)

    def draw(self) -> NextBatch:
        """Return the next batch and its number of samples; None at the end."""
        for _ in range(max(1, self._workers)):
            with own_randomness(self._workers):
                item = next(self._items)
            if self._workers:
                self._positions[self._turn] = position = json.loads(item.position)
                if "error" in position:
                    raise UserError(position["error"])
                self._turn = (self._turn + 1) % self._workers
            if item.samples:
                return item.batch, item.samples
        return None

    def position(self) -> Position:
        """Return the position after the last batch."""
        return {"turn": self._turn, "parts": [*self._positions] if self._workers else [self._part.position()]}


class Whole:
    """Reads a loader that has a state itself, such as torchdata's StatefulDataLoader, as it is."""

    def __init__(self, given: Any, seed: Seed, held: Position | None):
        self._workers, self._seed, self._held = getattr(given, "num_workers", 0), seed, held or BEGINNING
        self._drawn, self._ended = self._held["drawn"], self._held["ended"]
        if isinstance(given, DataLoader):
            given = copy.copy(given)
            given.generator = given.generator or torch.Generator().manual_seed(mixed_seed(*seed))
            if given.num_workers:
                for name, value in loading.worker_options(given).items():
                    setattr(given, name, value)
        self._given = given
        anew = copy.copy(given)
        if self._held["state"] is not None:
            given.load_state_dict(from_json(self._held["state"]))
        self._items = iter(()) if self._ended else loading.while_workers_live(iter(given))
        if self._held["state"] is not None and not self._drawn:
            self._items = or_else(self._items, functools.partial(self._begun_anew, anew))

    def _begun_anew(self, given: Any) -> Iterator[Any]:
        self._given = given
        return loading.while_workers_live(iter(given))

    def draw(self) -> NextBatch:
        """See `Workers`."""
        with own_randomness(self._workers):
            if not self._workers:
                seed_generators(mixed_seed(*self._seed, self._drawn))
            batch = END if self._ended else next(self._items, END)
        self._ended = batch is END
        self._drawn += not self._ended
        return None if self._ended else (batch, rows_in(batch))

    def position(self) -> Position:
        """See `Workers`."""
        state = stream_state(self._given) if self._drawn > self._held["drawn"] else self._held["state"]
        return {"drawn": self._drawn, "ended": self._ended, "state": state}


Reader = Workers | Whole  # of one rank's stream of one epoch


def opened_stream(engine: Engine, given: Any, seed: int, epoch: int, held: Position | None, *, keeps: bool) -> Reader:
    """Return the reader of this rank's stream. held: where to continue. keeps: whether positions are saved."""
    dataset = getattr(given, "dataset", given)
    if hasattr(dataset, "set_epoch"):
        dataset.set_epoch(epoch)
    seeds = (seed, "stream", epoch, engine.rank)
    return Whole(given, seeds, held) if is_stateful(given) else Workers(engine, given, seeds, held, keeps=keeps)


def stream_evaluation(engine: Engine, given: Any, seed: int) -> Iterator[Batch]:
    """Yield this rank's batches of a stream for an evaluation."""
    reader = opened_stream(engine, given, seed, 0, None, keeps=False)
    while (drawn := reader.draw()) is not None:
        yield Batch(to_device(drawn[0], engine.device), NO_INDICES, drawn[1])


class Stream(Input):
    """The streams of all ranks. A step takes as many batches over all ranks as when the run began.

    Raises UserError for a DataLoader with options that do not fit.
    """

    samples = per_epoch = 0

    def __init__(self, engine: Engine, given: Any, seed: int, batch_size: int, output: Any):
        if isinstance(given, DataLoader):
            require_usable(given)
            require_batch_size(given, batch_size)
        self._engine, self._seed, self._output = engine, seed, output
        self._given = given_to(engine, given)
        self._name = type(getattr(given, "dataset", given)).__name__
        self._copies = Copies(engine.device)
        self._workers = getattr(given, "num_workers", 0)
        # By rank, of those of this process. held: a position in the epoch to resume, or where the next one begins.
        self._readers: dict[int, Reader] = {}
        self._held: dict[int, Position | None] = {}
        persistent = bool(getattr(given, "persistent_workers", False)) and not is_stateful(given)
        self._carries = persistent and is_stateful(given.dataset)  # the state of workers into the next epoch
        self._lasts = persistent or not self._workers  # what has a state is there in the next epoch
        self._finished = False  # that epoch has no steps left
        self._first: dict[int, tuple[Any, int]] = {}  # of this epoch
        self._midway: set[int] = set()  # ranks that go on within it: their first batch is read again where it is needed
        self._drawn: list[Any] = []  # for the next micro-batches
        self._ahead: dict[int, tuple[NextBatch | Exception, Position]] = {}  # what a checkpoint drew, and where it is
        self._seen: dict[int, int] = {}  # digest of a batch -> rank: of the first batches of an epoch
        self._announced = False

    def begin(self, engine: Engine, flags: Namespace, initial: Initial, state: TrainState, epochs: int) -> int:
        self._state, self._per_step = state, initial.ranks * initial.accumulate  # batches, over all ranks
        self._keeps = flags.output_dir is not None  # whether positions are saved
        return 0

    # ---- the position

    def position(self) -> Position:
        rank = self._engine.rank
        if not self._readers:
            return {"workers": self._workers, "finished": True, "reader": self._held.get(rank)}
        reader, finished = self._readers[rank].position(), self._finished
        states = [part["state"] for part in reader.get("parts", [reader])]
        if not finished and rank not in self._ahead and any(state is not None for state in states):
            # Only the next batch tells whether the epoch is over: where its state is that of its last sample, a data set
            # may begin anew.
            try:
                drawn: NextBatch | Exception = self._draw(rank)
            except Exception as error:  # of the next step, which raises it
                drawn = error
            self._ahead[rank] = drawn, self._readers[rank].position() if drawn is None else reader
        if rank in self._ahead:
            drawn, reader = self._ahead[rank]
            finished = drawn is None
        return {"workers": self._workers, "finished": finished, "reader": reader}

    def restore(self, positions: Callable[[], list[Any] | None], state: TrainState) -> str | None:
        held = [one for one in positions() or () if one is not None and "reader" in one] or None  # others: of a sampler
        if held is not None and all(one["finished"] for one in held):
            self._finished = state.samples_of_epoch > 0
            self._held = {rank: self._end_of(held, rank) for rank in self._engine.own}
            return None
        if not state.samples_of_epoch:
            return None
        own = [self._why_anew(held, rank) for rank in self._engine.own]
        why = self._engine.all_gather_object(own, "stream.position")
        if reason := next((one for theirs in why for one in theirs if one), None):
            taken, state.samples_of_epoch = state.samples_of_epoch, 0
            return f"epoch {state.epoch + 1} of the stream begins anew, after {taken:,} samples: {reason}"
        assert held is not None
        self._held = {rank: held[rank]["reader"] for rank in self._engine.own}
        return None

    def _end_of(self, positions: Sequence[Position], rank: int) -> Position | None:
        """Return where a rank's next epoch begins, after one that ended at these positions; None: as if it was the first.

        With another number of ranks, each takes a state only if it was the same on all.
        """
        alike = all(one == positions[0] for one in positions)
        mine = positions[rank if len(positions) == self._engine.size else 0]
        usable = len(positions) == self._engine.size or alike
        if not self._lasts or not usable or mine["workers"] != self._workers or mine["reader"] is None:
            return None
        return at_beginning(mine["reader"])

    def _why_anew(self, positions: Sequence[Position] | None, rank: int) -> str | None:
        """Return why an epoch cannot be resumed, or None."""
        if positions is None:
            return "the checkpoint has no position in a stream"
        if len(positions) != self._engine.size:
            return f"it was saved on {len(positions)} ranks, and there are {self._engine.size} now"
        mine = positions[rank]
        if mine["workers"] != self._workers:
            return f"it was saved with num_workers={mine['workers']}, which is {self._workers} now"
        return f"{self._name} has no state_dict" if without_state(mine["reader"]) else None

    def at_end(self, samples_of_epoch: int) -> bool:
        return self._finished

    # ---- the steps

    def load(self, planned: PlannedBatch) -> Batch:
        batch = self._copies.to_device(self._drawn.pop(0))
        return Batch(batch, planned.indices, planned.local_count, planned.weight, planned.first)

    def steps(self, epoch: int) -> Iterator[PlannedStep]:
        """Yield this process's part of each remaining step of `epoch`. A collective for each."""
        if self._finished and self._state.samples_of_epoch:  # resumed where it had ended
            return
        # Else a second loop over epochs goes on within this one, in which a limit of steps ended the first.
        if not (self._readers and self._state.samples_of_epoch):
            self._begin_epoch(epoch)
        self._seen, engine, own, size = {}, self._engine, self._engine.own, self._engine.size
        for number in itertools.count():
            engine.activity.begin_step(self._state.step)
            self._drawn.clear()
            # Batches go round the ranks, also where these are not as many as at the beginning: streams are read alike.
            begins = [(one - self._state.step * self._per_step) % size for one in range(size)]
            takes = [[begin + at < self._per_step for at in range(0, self._per_step, size)] for begin in begins]
            with engine.activity.during("reading data"):
                drawn = {rank: [self._draw(rank) if mine else None for mine in takes[rank]] for rank in own}
            compared = number < max(1, self._workers) and (size > 1 or self._workers > 1)
            summaries = [
                torch.tensor([[one[1], batch_hash(one[0]) if compared else 0] if one else [0, 0] for one in of_rank])
                for of_rank in drawn.values()
            ]
            everyone = engine.all_gather_ranks(summaries, "stream")  # [size, passes, 2]
            counts = everyone[:, :, 0]
            self._require_different(everyone[:, :, 1].tolist())
            self._require_samples([mine[0] for mine in takes], counts)
            if not counts.any():
                break
            if not self._announced:
                self._say_what_holds()
            total, planned = int(counts.sum()), []
            for rank in own:
                for at in counts.sum(0).nonzero()[:, 0].tolist():
                    count, together = int(counts[rank, at]), int(counts[:, at].sum())
                    before = int(counts[:rank, at].sum()) if count else 0
                    planned.append(PlannedBatch(NO_INDICES, count * size / total, count, together, before))
                    self._drawn.append(one[0] if (one := drawn[rank][at]) else self._filler(epoch, rank))
            yield PlannedStep(planned, total)
        self._finished = True

    def _begin_epoch(self, epoch: int) -> None:
        self._finished, self._first = False, {}
        if self._readers and self._carries:
            self._held = {rank: at_beginning(reader.position()) for rank, reader in self._readers.items()}
        self._ahead, held = {}, {rank: one for rank, one in self._held.items() if one}
        parts = {rank: one.get("parts", [one]) for rank, one in held.items()}
        over = [rank for rank, of_rank in parts.items() if all(part["ended"] for part in of_rank)]
        self._held = {rank: at_beginning(held[rank]) for rank in over if self._lasts}  # for the next epoch
        self._midway = {rank for rank, of_rank in parts.items() if any(part["drawn"] for part in of_rank)}
        self._readers = {rank: self._open(epoch, rank, held.get(rank)) for rank in self._engine.own}

    def _open(self, epoch: int, rank: int, held: Position | None, given: Any = None) -> Reader:
        with self._engine.numbered(rank):
            given = self._given[rank] if given is None else given
            return opened_stream(self._engine, given, self._seed, epoch, held, keeps=self._keeps or self._carries)

    def _draw(self, rank: int) -> NextBatch:
        if rank in self._ahead:
            if isinstance(ahead := self._ahead.pop(rank)[0], Exception):
                raise ahead
            return ahead
        with self._engine.numbered(rank):
            drawn = self._readers[rank].draw()
        if drawn is not None and rank not in self._midway:
            self._first.setdefault(rank, drawn)
        return drawn

    def _filler(self, epoch: int, rank: int) -> Any:
        """Return the first batch of this epoch, for a rank whose stream has ended. A resumed rank reads it again."""
        if rank not in self._first:
            given = copy.copy(self._given[rank])
            if not self._workers:  # else workers get a copy
                with contextlib.suppress(Exception):  # of a file, for instance
                    vars(given)["dataset"] = copy.deepcopy(given.dataset)
            with self._engine.numbered(rank):
                first = self._open(epoch, rank, None, given).draw()
            if first is None:
                raise UserError(f"rank {rank} has no samples in its stream any more: give it the same data")
            self._first[rank] = first
        return self._first[rank][0]

    def _require_samples(self, take: Sequence[bool], counts: Tensor) -> None:
        """Raise UserError on every rank if the stream of one is empty. take: whether each reads. counts: [size, passes]."""
        for rank, count in enumerate(counts.sum(1).tolist()):
            if take[rank] and not count and not self._state.samples_of_epoch:
                remedy = "give each rank samples, or use fewer ranks"
                message = f"the stream of rank {rank} has no samples in epoch {self._state.epoch + 1}"
                raise UserError(f"{message}: {remedy}", everywhere=True)

    def _require_different(self, digests: Sequence[Sequence[int]]) -> None:
        """Raise UserError on every rank if ranks, or workers of a rank, begin with the same batch: they would train on the
        same samples. digests: of each pass of each rank; 0: not compared."""
        for rank, of_rank in enumerate(digests):
            for digest in filter(None, of_rank):
                other = self._seen.get(digest)
                self._seen[digest] = rank
                if other is None or (other == rank and self._workers <= 1):
                    continue
                who, remedy = f"ranks {other} and {rank}", "give each rank its part, by run.rank and run.size"
                remedy += ", read in its __iter__" * self._engine.takes_turns
                if other == rank:
                    who = f"the workers of rank {rank}"
                    remedy = "give each worker its part, by torch.utils.data.get_worker_info()"
                raise UserError(f"{who} read the same samples of the stream: {remedy}", everywhere=True)

    def _say_what_holds(self) -> None:
        """Print once what is up to the data set. Raises UserError for a state that cannot be saved."""
        self._announced = True
        if self._engine.size > 1:  # with random augmentation, batches of the same samples differ, too
            remedy = "its data set must take its part, by run.rank and run.size"
            self._output.say(f"each rank reads a stream of its own: {remedy}")
        if self._keeps and without_state(self._readers[self._engine.own[0]].position()):
            lost = "a resumed run begins the epoch of this stream anew"
            self._output.say(f"{self._name} has no state_dict and load_state_dict: {lost}")


STREAM = InputKind(is_stream, Stream, stream_evaluation)
