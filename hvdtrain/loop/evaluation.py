"""Evaluations: each rank's part of a test set, and means over the samples of all ranks; and the buffers that ranks have in
common meanwhile.

Each rank changes its own buffers in its forward passes. Batch norm's running statistics are averaged. Of any other buffer
that differs, such as a codebook that follows the samples of its rank, every rank takes rank 0's, as
DistributedDataParallel does in every forward pass.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from hvdtrain.checkpoint.sums import checksums
from hvdtrain.engines.accelerators import read_scalars, recorded
from hvdtrain.engines.base import Engine
from hvdtrain.engines.errors import UserError
from hvdtrain.engines.modules import (
    COUNTER,
    NamedBuffer,
    buffers_of_models,
    kind_of,
    named_buffers,
    running_statistics,
    statistics_of_layer,
)
from hvdtrain.inputs.inputs import Batch
from hvdtrain.inputs.sameness import SPLIT, alike_samples, first_samples, split_of
from hvdtrain.inputs.sharding import kept, mixed_seed, seed_generators, shard
from hvdtrain.program.means import Means, require_sum


class CutShort(BaseException):
    """Raised to end an evaluation early on this rank after a stop request. `Run.evaluating` catches it."""


@dataclass
class Recorded:
    """What one rank has recorded, by name."""

    sums: dict[str, Tensor] = field(default_factory=dict)
    counts: dict[str, Tensor | float] = field(default_factory=dict)  # the sum of `count`, if that was given
    rows: dict[str, int] = field(default_factory=dict)  # the number of values that were given one for each sample
    rows_in_sums: dict[str, int] = field(default_factory=dict)  # samples in batches of which a sum was given
    samples: int = 0  # in the batches yielded so far

    def counted(self, name: str) -> int:
        """Return by how many samples the sum of a metric is divided: as many as there are values of it, where a collate_fn
        makes several of a sample. Raises UserError."""
        if name not in self.rows:
            return self.samples
        rows = self.rows[name] + self.rows_in_sums.get(name, 0)
        if rows % self.samples if self.samples else rows:
            remedy = "give a value for each sample, or their sum, or count=, the number of values"
            if not self.samples:
                remedy = "loop over what `with run.evaluating(test) as mine:` gives, `for x, y in mine:`"
            raise UserError(f"run.record({name}=...) got {rows} values for {self.samples} samples: {remedy}")
        return rows


class Part(Iterator[Any]):
    """A rank's batches of a test set, of which programs ask how many they are."""

    def __init__(self, batches: Iterator[Any], number: Callable[[], int]):
        self._batches, self._number = batches, number

    def __next__(self) -> Any:
        return next(self._batches)

    def __len__(self) -> int:
        try:
            return self._number()
        except (TypeError, NotImplementedError):  # a stream, a sampler without a length, or one of batches
            raise TypeError("the number of batches of this test set is not known: count them") from None


class Taken:
    """Which samples the ranks had in an evaluation."""

    def __init__(self) -> None:
        self.indices: list[Tensor] = []  # of each batch of this rank, in the data set; none of a stream
        self.samples: list[int] = []  # of each rank
        self.order: Tensor | None = None  # of the rows of all ranks in the data set, once it is asked for


class Evaluation:
    """The state of one `Run.evaluating` block.

    data: see there. batches: returns those of `data` of a rank. heartbeat: called for each batch. means: notices those
    that are given without their count. seeds: of the random numbers, with the rank.
    """

    def __init__(
        self, engine: Engine, data: Any, batches: Callable[[Any], Iterator[Batch]], heartbeat: Callable[[], None],
        means: Means, seeds: tuple[object, ...] = (),
    ):  # fmt: skip
        self._engine, self._data, self._load, self._heartbeat = engine, data, batches, heartbeat
        self._means, self._seeds = means, seeds
        # Whether the script has one part of a number of samples, not batches.
        self.whole = isinstance(data, int) and not isinstance(data, bool)
        self._recorded = {rank: Recorded() for rank in engine.own}
        self.taken = Taken()
        self._in_batch = 0  # samples in the current batch
        self._has_ended = False  # whether all batches were taken: what follows is recorded of all samples
        self._indices: Tensor | None = None  # of the current batch, if there is one

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Context manager for the evaluation. The program goes on with the random numbers that it had before, so that how
        often it evaluates does not change its training."""
        with kept(self._engine.device):
            # An evaluation that is repeated after a resume draws the same numbers again.
            seed_generators(mixed_seed(*self._seeds, self._engine.rank), self._engine.device)
            with contextlib.suppress(CutShort):
                yield
            self._begin_turn(None)  # a collective, if ranks take turns: all have the same buffers again

    def mine(self) -> Any:
        """Return this rank's part of the data: a slice, or an iterator over batches."""
        engine = self._engine
        if not self.whole:
            batches = self._batches(self._loaded(engine.rank))
            return Part(batches, self._number) if isinstance(self._data, DataLoader) else batches
        # The script computes its one part at once. Where this process has several ranks, that is all samples.
        part = slice(0, self._data) if engine.takes_turns else slice(engine.rank, self._data, engine.size)
        self._recorded[engine.rank].samples = len(range(self._data)[part])
        self.taken.indices = [torch.arange(self._data)[part]]
        return part

    def _number(self) -> int:
        """Return the number of batches of this process's ranks. Raises TypeError if it is not known."""
        samples, size = len(self._data.sampler), int(self._data.batch_size)
        samples -= samples % size if self._data.drop_last else 0
        parts = [range(samples)[shard(samples, rank, self._engine.size)] for rank in self._engine.own]
        return sum(-(-len(part) // size) for part in parts)

    def _batches_of_all(self) -> int:
        """Return the number of batches of the whole test set; 0: it is not known, as of a stream."""
        try:
            return len(self._data) if isinstance(self._data, DataLoader) else 0
        except (TypeError, NotImplementedError):
            return 0

    def _loaded(self, rank: int) -> Iterator[Batch]:
        """Return the batches of one of this process's ranks, whose turn begins."""
        self._begin_turn(rank)
        return self._load(self._data)

    def _begin_turn(self, rank: int | None) -> None:
        if self._engine.takes_turns:
            self._engine.take_turn(rank)
            seed_generators(mixed_seed(*self._seeds, "all" if rank is None else rank), self._engine.device)

    def _batches(self, of_first: Iterator[Batch]) -> Iterator[Any]:
        self._has_ended = False
        for turn, rank in enumerate(self._engine.own):
            for batch in self._loaded(rank) if turn else of_first:
                self._heartbeat()
                self._recorded[rank].samples += batch.count
                self._in_batch = batch.count
                self._indices = batch.indices
                self.taken.indices.append(batch.indices)
                yield batch.data
        self._has_ended = True

    def rows(self) -> Tensor:
        """Return the indices of the samples of the current batch, int64 [b]; of a number of samples, all of this rank's."""
        if self.whole:
            return torch.arange(self._data)[self.mine()]
        if self._indices is None:
            raise UserError("run.predict() before the first batch: call it in the loop over the batches")
        return self._indices

    def add(self, values: Mapping[str, Any], count: Tensor | float | None) -> None:
        """Add values: sums over samples, or one value per sample. count: the number of items in each of these sums."""
        self._heartbeat()
        tally = self._recorded[self._engine.rank]
        for name, value in values.items():
            if name in tally.sums and (count is not None) != (name in tally.counts):
                raise UserError("run.record(count=...) in one batch and not in another: give it in all, or in none")
            given = recorded("run.record", name, value)
            samples = tally.samples if self.whole or self._has_ended else self._in_batch
            has_rows = given.ndim > 1 or (given.ndim == 1 and (len(given) != 1 or self._in_batch == 1))
            if not has_rows and samples > 1:
                require_sum(
                    self._means, name, value, samples, count, first=name not in tally.sums, ended=self._has_ended,
                    batches=self._batches_of_all(),
                )  # fmt: skip
            if has_rows:
                tally.rows[name] = tally.rows.get(name, 0) + len(given)
            else:
                tally.rows_in_sums[name] = tally.rows_in_sums.get(name, 0) + self._in_batch
            # Sums over a large test set would lose digits in float32.
            given = given.to(torch.float64)
            if given.ndim > 1 and given.numel() and count is None:  # of a sample's pixels, tokens or labels: their mean
                given = given.flatten(1).mean(1)
            total = given.sum()
            tally.sums[name] = tally.sums[name] + total if name in tally.sums else total
            if count is not None:
                tally.counts[name] = tally.counts.get(name, 0) + count  # never the program's own tensor
        # A program records the same in each batch, so that the first one has told.
        # The mode slows down every call of torch.
        self._means.stop()

    def means(self) -> dict[str, float]:
        """Return the means over the samples of all ranks, and `count`, that of the first. A collective. Raises UserError on
        every rank."""
        names, counted = self._names()
        if not names:  # what was gathered is recorded after the block
            samples = torch.tensor([[float(one.samples)] for one in self._recorded.values()])
            return {"count": self._engine.sum_of_ranks(samples, "evaluate").item()}
        recorded_by = list(self._recorded.values())
        if self.whole and self._engine.takes_turns and 0 not in self._recorded:
            recorded_by = [Recorded()] * len(recorded_by)  # each process has computed all: those of the first count
        with self._engine.raising_together("evaluate.rows"):
            rows = [[0 if name in counted else tally.counted(name) for name in names] for tally in recorded_by]
        of_ranks = [
            read_scalars(
                [tally.sums.get(name, 0.0) for name in names] + [tally.counts.get(name, 0.0) for name in counted]
            )
            for tally in recorded_by
        ]
        own = torch.tensor([sums + counts for sums, counts in zip(of_ranks, rows, strict=True)], dtype=torch.float64)
        sums = self._engine.sum_of_ranks(own, "evaluate").tolist()
        counts = dict(zip(names, sums[-len(names) :], strict=True))
        counts |= dict(zip(counted, sums[len(names) : -len(names)], strict=True))
        totals = [counts[name] for name in names]
        if min(totals) <= 0:
            raise UserError("the test set has no readable samples: give run.evaluating() some", everywhere=True)
        means = {name: value / total for name, value, total in zip(names, sums, totals, strict=False)}
        return means | {"count": totals[0]}

    def _names(self) -> tuple[list[str], list[str]]:
        """Return the names of all sums, and of those with a `count`: a rank without samples has recorded nothing. A
        collective. Raises UserError on every rank."""
        dataset = None if self.whole else getattr(self._data, "dataset", None)
        split, first = split_of(dataset), first_samples(dataset)
        mine = [[list(one.sums), list(one.counts), split, first, one.samples] for one in self._recorded.values()]
        everyone = [one for own in self._engine.all_gather_object(mine, "evaluate.names") for one in own]
        self.taken.samples = [samples for *_, samples in everyone]
        # Subsets that each rank has drawn by itself overlap: some samples would count twice, others never.
        if any(theirs[2] != split for theirs in everyone):
            raise UserError(
                f"ranks disagree about which samples the subset of the test set has: {SPLIT}", everywhere=True
            )
        for rank, theirs in enumerate(everyone):
            if not alike_samples(everyone[0][3], theirs[3]):
                remedy = "give run.evaluating() the whole test set on every rank: it is divided for you"
                raise UserError(f"rank {rank} has another test set than rank 0: {remedy}", everywhere=True)
        names, counted = (list(dict.fromkeys(n for theirs in everyone for n in theirs[part])) for part in (0, 1))
        if not names and not any(samples for *_, samples in everyone):
            raise UserError("run.evaluating(): the test set has no samples", everywhere=True)
        for rank, (own, *_, samples) in enumerate(everyone):
            missing = [name for name in names if name not in own and name not in counted]
            if samples and missing:
                remedy = "record it on every rank, or give the number of its values as count="
                raise UserError(
                    f"run.record({missing[0]}=...) was not called on rank {rank}: {remedy}", everywhere=True
                )
        return names, counted


@contextlib.contextmanager
def evaluation_modes(models: Sequence[nn.Module]) -> Iterator[None]:
    """Context manager in which the models are in evaluation mode.

    A module whose own `train` does more than set the mode is asked for it again: an adapter takes itself out of the weights.
    """
    modes = [(module, module.training) for model in models for module in model.modules()]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for module, training in modes:  # the outer ones first: their `train` sets the modes of the inner ones, too
            if module.training != training and type(module).train is not nn.Module.train:
                module.train(training)
            module.training = training


# ---- the buffers, of which each rank has its own

NONE: Mapping[str, nn.Module] = {}
BUFFER_ALIKE = "make it alike on every rank, or register_buffer(..., persistent=False), which no checkpoint holds"


class SharedBuffers:
    """The buffers of a run's models."""

    def __init__(self, engine: Engine, models: Sequence[nn.Module], say: Callable[[str], None]):
        self._engine, self._models, self._say = engine, models, say
        self._shared_at: object = None
        self._own: dict[int, tuple[Tensor, Tensor]] = {}  # by id: buffers, and copies of what this rank had in them
        self._compared = self._warned = False

    def share(self, position: object, registered: Mapping[str, nn.Module]) -> None:
        """Make the buffers the same on all ranks, for an evaluation. A collective.

        position: in training; a resume repeats all evaluations of the same one. See `restore_own`. registered: modules with
        statistics of their own, such as averaged weights.
        """
        if position != self._shared_at:
            self._shared_at, self._own = position, {}
        self._keep(running_statistics([*self._models, *registered.values()]))
        self.make_alike(registered)

    def make_alike(self, registered: Mapping[str, nn.Module] = NONE) -> None:
        """Average running statistics that differ between ranks, and copy rank 0's of other buffers that do. A collective.

        Of a layer that has counted other batches than on rank 0, as after update_bn on one rank alone, rank 0's statistics
        are taken.
        """
        buffers, differing = self.compare(registered)
        # Kept before they are overwritten: `restore_own` gives them back for a checkpoint.
        self._keep([buffers[name].tensor for name in differing])
        counted_otherwise = {buffers[name].layer for name in differing if name.endswith(COUNTER)}
        # Those that are equal keep their bits: three equal numbers, added up and divided by three, may give another one.
        means = [
            name for name in differing if buffers[name].is_statistic and buffers[name].layer not in counted_otherwise
        ]
        self._engine.average_([buffers[name].tensor for name in means])
        for name in differing:
            if name not in means:
                self._engine.broadcast_(buffers[name].tensor, f"buffers.{name}")

    def _named(self, registered: Mapping[str, nn.Module], *, all_saved: bool) -> dict[str, NamedBuffer]:
        """Return each buffer that ranks should have in common, once: of the models all, of registered modules the
        statistics, and of how many batches these are; or all_saved: also others of these."""
        named = buffers_of_models(self._models)
        own = {id(buffer.tensor) for buffer in named.values()}
        for name, buffer in named_buffers((f"{name}.", module) for name, module in registered.items()).items():
            shared = buffer.is_statistic or (name.endswith(COUNTER) and statistics_of_layer(buffer.layer))
            shared = shared or (all_saved and buffer.saved)
            if shared and id(buffer.tensor) not in own:
                named[name] = buffer
        return named

    def compare(
        self, registered: Mapping[str, nn.Module] = NONE, *, all_saved: bool = False
    ) -> tuple[dict[str, NamedBuffer], list[str]]:
        """Return this rank's buffers by name, and the names of those that differ between ranks. A collective.

        Buffers that no checkpoint has may be missing on a rank, or have other shapes, such as tables as long as the longest
        sequence so far: they stay as they are. Raises UserError on every rank for others.
        """
        if self._engine.size == 1:
            return {}, []
        named = self._named(registered, all_saved=all_saved)
        # Checksums are exchanged, not the buffers: most are the same on all ranks.
        sums = checksums([buffer.tensor for buffer in named.values()]).tolist() if named else []
        mine = {
            name: [kind_of(buffer.tensor), each, buffer.saved]
            for (name, buffer), each in zip(named.items(), sums, strict=True)
        }
        everyone = self._engine.all_gather_object(mine, "buffers")
        differing = []
        for name in dict.fromkeys(name for theirs in everyone for name in theirs):
            kinds = [theirs[name][0] if name in theirs else "nothing" for theirs in everyone]
            other = next((rank for rank, kind in enumerate(kinds) if kind != kinds[0]), None)
            if other is None:
                if any(theirs[name][1] != everyone[0][name][1] for theirs in everyone):
                    differing.append(name)
            elif any(theirs[name][2] for theirs in everyone if name in theirs):
                message = f"the buffer {name} is {kinds[0]} on rank 0, and {kinds[other]} on rank {other}"
                raise UserError(f"{message}: {BUFFER_ALIKE}", everywhere=True)
        unlike = [name for name in differing if not named[name].is_statistic]
        common = self._named(registered, all_saved=False) if all_saved else named
        self._warn(
            unlike, "rank 0's is evaluated and saved" if {*unlike} & {*common} else "each has seen other samples"
        )
        return named, differing

    def compare_once(self, registered: Mapping[str, nn.Module]) -> None:
        """Compare them, also in a training without evaluations; and those of registered modules, of which each rank has its
        own. A collective, before a save."""
        if not self._compared:
            self._compared = True
            self.compare(registered, all_saved=True)

    def _warn(self, unlike: Sequence[str], what: str) -> None:
        """Tell the author, once, about buffers that differ between ranks and are no statistics."""
        if unlike and not self._warned:
            self._warned = True
            more = f" and {len(unlike) - 1} others differ" if len(unlike) > 1 else " differs"
            message = f"the buffer {unlike[0]}{more} between ranks, and {what}"
            self._say(f"warning: {message}: let it follow the rows of all ranks, run.gather(rows)")

    def _keep(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            # Of several evaluations at one position, the first one finds the buffers of the training.
            self._own.setdefault(id(tensor), (tensor, tensor.clone()))

    def restore_own(self) -> None:
        """Restore this rank's buffers of before the evaluations at this position, for a checkpoint from which these are
        repeated."""
        for tensor, own in self._own.values():
            # A resumed run repeats the evaluation and averages again:
            # a mean of means may have other bits, as sums are rounded.
            tensor.copy_(own)
