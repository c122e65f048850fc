"""The order of a user's sampler or batch sampler: drawn once per epoch, under the seed and the epoch, alike on all ranks."""

import contextlib
import hashlib
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from hvdtrain.checkpoint.checkpoint import understood
from hvdtrain.checkpoint.randomness import reseed
from hvdtrain.engines.base import Engine
from hvdtrain.engines.errors import UserError
from hvdtrain.inputs.dataloaders import Loader, in_batches, loaded, nested_samplers, require_usable
from hvdtrain.inputs.inputs import Batch, InputKind
from hvdtrain.inputs.sharding import PlannedBatch, kept, mixed_seed, seed_generators, shard
from hvdtrain.loop.state import TrainState

ENDLESS = 100_000  # draws, of a small data set
NONE_DRAWN = torch.empty(0, dtype=torch.int64)
# Samplers that are known to draw the same again with the same seed.
OF_TORCH = (RandomSampler, SequentialSampler, WeightedRandomSampler)


class DrawnBatches(Sequence[Tensor]):
    """Batches of indices, each int64 [b], one after the other in one tensor: a million small ones take seconds and a GB.

    order: int64 [n]. lengths: of the batches, int64 [k].
    """

    def __init__(self, order: Tensor, lengths: Tensor):
        self.order, self.lengths, self.ends = order, lengths, lengths.cumsum(0)

    @classmethod
    def one(cls, order: Tensor) -> "DrawnBatches":
        """Return the batch with this order; none, if that is empty."""
        return cls(order, torch.tensor([len(order)] if len(order) else [], dtype=torch.int64))

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return self.at(torch.arange(len(self))[at])
        end = int(self.ends[at])
        return self.order[end - int(self.lengths[at]) : end]

    def __iter__(self) -> Iterator[Tensor]:
        begin = 0
        for end in self.ends.tolist():
            yield self.order[begin:end]
            begin = end

    def at(self, places: Tensor) -> "DrawnBatches":
        """Return those at these places, int64 [m]."""
        chosen = DrawnBatches(self.order, self.lengths[places])
        moved = (self.ends[places] - chosen.ends).repeat_interleave(chosen.lengths)
        chosen.order = self.order[moved + torch.arange(len(moved))]
        return chosen


class Drawn:
    """The batches of indices that a sampler draws in each epoch; of a plain sampler, one batch.

    The constructor is a collective. Raises UserError for a sampler whose order differs between ranks, or could not be drawn
    again after a restart. engine: None in a loop without one, where ranks can't be compared. count: number of samples of
    the data set.
    """

    def __init__(self, engine: Engine | None, sampler: Any, seed: int, count: int, *, in_batches: bool):
        self._sampler, self._seed, self._count, self._in_batches = sampler, seed, count, in_batches
        self._kind = type(sampler).__name__
        self._drawn: dict[int, DrawnBatches] = {}
        self._engine = engine
        self._counts = dict[tuple[int, str], tuple[int, int]]()  # by sampler and name: at first, and what a draw adds
        # Else ranks would wait for one whose sampler alone is refused.
        with engine.raising_together("sampler") if engine else contextlib.nullcontext():
            first = self._checked()
        if engine:  # which begins the epoch at once
            self._drawn[0] = first
        self.samples = len(first.order)  # per epoch
        self.require_equal(digest_of_indices(first))

    def _checked(self) -> DrawnBatches:
        """Return the batches of the first epoch. Raises UserError for a sampler that cannot be used."""
        for part in nested_samplers(self._sampler):
            if isinstance(part, DistributedSampler):
                kind = type(part).__name__
                raise UserError(f"the DataLoader has a {kind}: leave it out, the samples are sharded for you")
            if isinstance(part, WeightedRandomSampler) and len(part.weights) != self._count:
                remedy = "give it one for each sample, as in weights[labels]"
                raise UserError(
                    f"the WeightedRandomSampler has {len(part.weights)} weights for {self._count} samples: {remedy}"
                )
        before = self._numbers()
        first = self._draw(0)
        now = self._numbers()
        self._counts = {at: (held, now[at] - held) for at, held in before.items() if now.get(at, held) != held}
        inner = self._sampler.sampler if type(self._sampler) is BatchSampler else self._sampler
        if type(inner) in OF_TORCH:
            return first
        # Drawn twice: after a restart, the rest of an epoch must come in the same order.
        again = self._draw(0)
        if not (torch.equal(first.order, again.order) and torch.equal(first.lengths, again.lengths)):
            raise UserError(
                f"the DataLoader's {self._kind} draws another order each time, also with the same seed of torch, Python and "
                "numpy: draw with these or a generator that set_epoch(epoch) seeds, and keep nothing for the next draw"
            )
        return first

    def _numbers(self) -> dict[tuple[int, str], int]:
        """Return the whole numbers that the samplers hold, such as a count of their own draws."""
        parts = enumerate(nested_samplers(self._sampler))
        held = (((at, name), value) for at, part in parts for name, value in getattr(part, "__dict__", {}).items())
        return {place: value for place, value in held if type(value) is int}

    def digest(self, epoch: int) -> int:
        """Return a hash of what is drawn in `epoch`. Raises UserError."""
        return digest_of_indices(self.batches(self._seed, epoch))

    def require_equal(self, digest: int) -> None:
        """Raise UserError on every rank if they have drawn other orders. A collective."""
        remedy = "draw with torch's, Python's or numpy's generators, and from data that are the same on all ranks"
        if self._engine:
            # As samplers for DistributedDataParallel are made, each for its rank.
            held = {(name.strip("_"), value) for (_, name), value in self._numbers().items()}
            if held & {("rank", self._engine.rank), ("rank_id", self._engine.rank)}:
                remedy = "leave its rank and the number of ranks out: what it draws for one process is divided for you"
            self._engine.require_equal(f"the order that {self._kind} draws", digest, remedy)

    def batches(self, seed: int, epoch: int) -> DrawnBatches:
        """Return the batches of `epoch`, each int64 [b]. seed: ignored; the one given to the constructor is used."""
        if epoch not in self._drawn:  # the epoch of the step, and the next one, for which workers read ahead
            drawn = self._draw(epoch)
            if (count := len(drawn.order)) != self.samples:
                message = f"draws {count} samples in epoch {epoch + 1}, and {self.samples} in the first"
                remedy = "draw as many in each" + (", or write run.steps(..., changes=True)" if self._engine else "")
                raise UserError(f"the DataLoader's {self._kind} {message}: {remedy}", everywhere=True)
            self._drawn = {known: held for known, held in self._drawn.items() if known >= epoch - 1}
            self._drawn[epoch] = drawn
        return self._drawn[epoch]

    def hold(self, epoch: int, batches: DrawnBatches) -> str | None:
        """Take these as what was drawn for `epoch`. Return a line if the sampler draws others now."""
        others = digest_of_indices(self._draw(epoch)) != digest_of_indices(batches)
        self._drawn, self.samples = {epoch: batches}, len(batches.order)
        when = f"draws another order than when epoch {epoch + 1} began: that one is kept to its end"
        later = "if set_epoch(epoch) sets what changes it, or run.register saves it"
        return f"the {self._kind} {when}; later ones are as without a resume {later}" if others else None

    def order(self, seed: int, epoch: int) -> Tensor:
        """Return the order of the samples in `epoch`, int64 [n]."""
        return self.batches(seed, epoch).order

    def _draw(self, epoch: int) -> DrawnBatches:
        seed = mixed_seed(self._seed, "sampler", epoch)
        with kept():
            seed_generators(seed)
            for number, part in enumerate(nested_samplers(self._sampler)):
                for (at, name), (first, added) in self._counts.items():
                    if at == number:  # a count of its own: as in the epoch of a loop that draws once in each
                        setattr(part, name, first + epoch * added)
                if hasattr(part, "set_epoch"):
                    part.set_epoch(epoch)
                # A sampler may draw with a generator of its own, which seeds of the global ones do not reach.
                for value in list(getattr(part, "__dict__", {}).values()):
                    reseed(value, mixed_seed(seed, number))
            order, lengths = array("q"), array("q")
            for batch in self._to_the_end() if self._in_batches else [[*self._to_the_end()]]:
                try:
                    order.extend(map(int, batch))
                    lengths.append(len(batch))
                except (TypeError, ValueError, OverflowError) as error:
                    raise self._no_indices(batch, error) from error
        held = [torch.frombuffer(one, dtype=torch.int64) if one else NONE_DRAWN for one in (order, lengths)]
        batches = DrawnBatches(held[0], held[1][held[1] > 0])
        if len(wrong := batches.order[(batches.order < -self._count) | (batches.order >= self._count)]):
            message = f"draws the index {int(wrong[0])}, and the data set has {self._count} samples"
            raise UserError(f"the DataLoader's {self._kind} {message}: make it for this data set")
        return batches

    def _no_indices(self, batch: Any, error: Exception) -> UserError:
        what = "lists of indices" if self._in_batches else "indices"
        remedy = "write batch_sampler= for one that draws lists, and sampler= for one that draws indices"
        if isinstance(batch, (list, tuple)) and any(isinstance(one, (str, bytes, tuple)) for one in batch):
            remedy = "let it draw numbers from 0, and let the Dataset find by them what it looks up: a key, a size"
        return UserError(f"the DataLoader's {self._kind} draws something else than {what} ({error}): {remedy}")

    def _to_the_end(self) -> Iterator[Any]:
        """Yield what the sampler draws in an epoch. Raises UserError if it does not end."""
        try:
            length = len(self._sampler)
        except (TypeError, NotImplementedError):  # torch needs none, either
            length = 0
        most = max(ENDLESS, 10 * self._count, 10 * length)
        drawn = iter(self._sampler)
        yield from islice(drawn, most)
        if next(drawn, self) is not self:
            message = f"draws more than {most:,} times in an epoch of {self._count:,} samples, as one without an end"
            steps = ", and give the number of steps to run.epochs(steps=NUMBER)" if self._engine else ""
            remedy = f"let it end after an epoch{steps}"
            raise UserError(f"the DataLoader's {self._kind} {message}: {remedy}")


def digest_of_indices(batches: DrawnBatches) -> int:
    """Return 63 bits of a hash of batches of indices: of each, its length, big-endian, and then these."""
    count, heads = len(batches), batches.ends - batches.lengths + torch.arange(len(batches))
    content = torch.empty(count + len(batches.order), dtype=torch.int64)
    is_index = torch.ones(len(content), dtype=torch.bool)
    is_index[heads] = False
    content[heads], content[is_index] = torch.from_numpy(batches.lengths.numpy().byteswap()), batches.order
    return int.from_bytes(hashlib.blake2b(content.numpy().data, digest_size=8).digest()) >> 1


def numbered(batches: DrawnBatches, count: int) -> DrawnBatches:
    """Return the drawn batches of an epoch with k * `count` added to an index that was drawn k times before, so that its
    augmentation is another one. The index of `value` is value % count."""
    order = batches.order.remainder(count)
    # Stable, so that equal indices are counted in the order in which they were drawn.
    values, places = order.sort(stable=True)
    order[places] += count * (torch.arange(len(order)) - torch.searchsorted(values, values))
    return DrawnBatches(order, batches.lengths)


class SampledLoader(Loader):
    """A DataLoader with a sampler or batch sampler of the user's own. A checkpoint has the order of its epoch."""

    shares_position = True
    _saved: Mapping[str, Any] = {"epoch": None}  # and its order, and the lengths of its batches, int32
    _of_epoch: tuple[DrawnBatches | None, DrawnBatches | None] = None, None  # what was drawn last, and that `numbered`

    def _read_sampler(self) -> None:
        self._drawn = drawn(self._engine, self._given, self._seed)
        self.per_epoch = self._drawn.samples
        # What is drawn may depend on what was learnt so far,
        # such as weights by the loss of each sample: the order itself is saved.
        self.position = self._order_of_epoch
        if self._given.batch_size is None:
            self.batches = self._numbered

    def _order_of_epoch(self) -> Any:
        if self._engine.rank != 0:  # it is the same on all
            return None
        if self._saved["epoch"] != self._epoch:
            batches = self._drawn.batches(self._seed, self._epoch)
            # As int32, half as much to save: there are fewer samples than 2**31.
            lengths = batches.lengths if len(batches) else torch.zeros(int(self._given.batch_size is not None))
            self._saved = {"epoch": self._epoch, "order": batches.order.int(), "lengths": lengths.int()}
        return self._saved

    def restore(self, positions: Callable[[], list[Any] | None], state: TrainState) -> str | None:
        held = (positions() or [None])[0]
        if not isinstance(held, dict) or held.get("epoch") != state.epoch or not state.samples_of_epoch:
            return None
        with understood():
            order, lengths = held["order"].long(), held["lengths"].long()
        if len(order) and not -self.samples <= int(order.min()) <= int(order.max()) < self.samples:
            return None  # of another data set, which --resume PATH allows
        line = self._drawn.hold(state.epoch, DrawnBatches(order, lengths))
        self.per_epoch = self._drawn.samples
        return line

    def require_unchanged(self, epoch: int) -> None:
        super().require_unchanged(epoch)
        with self._engine.raising_together("sampler"):
            digest = self._drawn.digest(epoch)
        self._drawn.require_equal(digest)

    def order(self, seed: int, epoch: int) -> Tensor:
        return self._numbered(seed, epoch).order

    def load(self, planned: PlannedBatch) -> Batch:
        batch = super().load(planned)
        batch.indices = batch.indices % self.samples
        return batch

    def _numbered(self, seed: int, epoch: int) -> DrawnBatches:
        drawn, numbers = self._drawn.batches(seed, epoch), self._of_epoch[1]
        if numbers is None or drawn is not self._of_epoch[0]:
            self._of_epoch = drawn, (numbers := numbered(drawn, self.samples))
        return numbers


def has_own_sampler(data: Any) -> bool:
    """Return whether `data` is a DataLoader whose order is another one than that of shuffle=True and False."""
    if not isinstance(data, DataLoader) or not hasattr(data.dataset, "__len__"):
        return False
    if data.batch_size is None:
        return data.batch_sampler is not None
    sampler: Any = data.sampler
    count = len(data.dataset)
    # Not of a subclass, which may have an order of its own.
    if type(sampler) is SequentialSampler and len(sampler) == count:
        return False
    plain = type(sampler) is RandomSampler and not sampler.replacement
    return not (plain and len(sampler) == len(sampler.data_source) == count)


def drawn(engine: Engine | None, given: DataLoader[Any], seed: int) -> Drawn:
    """Return the order that the DataLoader's sampler or batch sampler draws. A collective. Raises UserError."""
    whole = given.batch_size is None
    count = len(given.dataset)  # type: ignore[arg-type] # map-style: it has a length
    return Drawn(engine, given.batch_sampler if whole else given.sampler, seed, count, in_batches=whole)


def sampler_evaluation(engine: Engine, given: DataLoader[Any], seed: int) -> Iterator[Batch]:
    """Yield this rank's batches of a test set, in the order of the sampler. Over all ranks, each sample is yielded once."""
    require_usable(given)
    order = drawn(engine, given, seed)
    if given.batch_size is None:
        batches = order.batches(seed, 0)
        yield from loaded(engine, given, seed, batches[shard(len(batches), engine.rank, engine.size)])
    else:
        yield from in_batches(engine, given, seed, order.order(seed, 0))


SAMPLED = InputKind(has_own_sampler, SampledLoader, sampler_evaluation)
