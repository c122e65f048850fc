"""The order of a user's sampler or batch sampler: drawn once per epoch, under the seed and the epoch, alike on all ranks."""

import hashlib
import random
import sys
from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DistributedSampler, Sampler, WeightedRandomSampler

from hvdtrain.data.sharding import kept, mixed_seed, seed_generators
from hvdtrain.engines.base import Engine
from hvdtrain.engines.errors import UserError

ENDLESS = 100_000  # draws, of a small data set


class Drawn:
    """The batches of indices that a sampler draws in each epoch; of a plain sampler, one batch.

    The constructor is a collective. Raises UserError for a sampler whose order differs between ranks, or could not be drawn
    again after a restart. count: number of samples of the data set.
    """

    def __init__(self, engine: Engine, sampler: Any, seed: int, count: int, *, in_batches: bool):
        self._sampler, self._seed, self._count, self._in_batches = sampler, seed, count, in_batches
        self._kind = type(sampler).__name__
        self._drawn: dict[int, list[Tensor]] = {}
        with engine.raising_together("sampler"):  # else ranks would wait for one whose sampler alone is refused
            first = self._checked()
        self.samples = sum(map(len, first))  # per epoch
        self._engine = engine
        self.require_equal(digest_of(first))

    def _checked(self) -> list[Tensor]:
        """Return the batches of the first epoch. Raises UserError for a sampler that cannot be used."""
        for part in parts_of(self._sampler):
            if isinstance(part, DistributedSampler):
                kind = type(part).__name__
                raise UserError(f"the DataLoader has a {kind}: leave it out, the samples are sharded for you")
            if isinstance(part, WeightedRandomSampler) and len(part.weights) != self._count:
                how = "give it one for each sample, as in weights[labels]"
                raise UserError(
                    f"the WeightedRandomSampler has {len(part.weights)} weights for {self._count} samples: {how}"
                )
        first, again = self._draw(0), self._draw(0)
        if len(first) != len(again) or not all(map(torch.equal, first, again)):
            raise UserError(
                f"the DataLoader's {self._kind} draws another order each time, also with the same seed of torch, Python and "
                "numpy: draw with these, or from a generator that set_epoch(epoch) seeds"
            )
        return first

    def digest(self, epoch: int) -> int:
        """Return a hash of what is drawn in `epoch`. Raises UserError."""
        return digest_of(self.batches(self._seed, epoch))

    def require_equal(self, digest: int) -> None:
        """Raise UserError on every rank if they have drawn other orders. A collective."""
        how = "draw with torch's, Python's or numpy's generators, and from data that are the same on all ranks"
        self._engine.require_equal(f"the order that {self._kind} draws", digest, how)

    def batches(self, seed: int, epoch: int) -> list[Tensor]:
        """Return the batches of `epoch`, each int64 [b]. seed: ignored; the one given to the constructor is used."""
        if epoch not in self._drawn:  # the epoch of the step, and the next one, for which workers read ahead
            drawn = self._draw(epoch)
            if (count := sum(map(len, drawn))) != self.samples:
                said = f"draws {count} samples in epoch {epoch + 1}, and {self.samples} in the first"
                raise UserError(f"the DataLoader's {self._kind} {said}: draw as many in each", everywhere=True)
            self._drawn = {known: held for known, held in self._drawn.items() if known >= epoch - 1}
            self._drawn[epoch] = drawn
        return self._drawn[epoch]

    def order(self, seed: int, epoch: int) -> Tensor:
        """Return the order of the samples in `epoch`, int64 [n]."""
        return torch.cat(self.batches(seed, epoch)) if self.samples else torch.empty(0, dtype=torch.int64)

    def _draw(self, epoch: int) -> list[Tensor]:
        seed = mixed_seed(self._seed, "sampler", epoch)
        with kept():
            seed_generators(seed)
            for number, part in enumerate(parts_of(self._sampler)):
                if hasattr(part, "set_epoch"):
                    part.set_epoch(epoch)
                for value in list(getattr(part, "__dict__", {}).values()):
                    reseed(value, mixed_seed(seed, number))
            drawn = self._to_the_end()
        try:
            batches = drawn if self._in_batches else [drawn]
            found = [
                torch.tensor([int(index) for index in batch], dtype=torch.int64) for batch in batches if len(batch)
            ]
        except (TypeError, ValueError) as error:
            what = "lists of indices" if self._in_batches else "indices"
            how = "write batch_sampler= for one that draws lists, and sampler= for one that draws indices"
            raise UserError(
                f"the DataLoader's {self._kind} draws something else than {what} ({error}): {how}"
            ) from error
        for indices in found:
            if len(wrong := indices[(indices < -self._count) | (indices >= self._count)]):
                said = f"draws the index {int(wrong[0])}, and the data set has {self._count} samples"
                raise UserError(f"the DataLoader's {self._kind} {said}: make it for this data set")
        return found

    def _to_the_end(self) -> list[Any]:
        """Return what the sampler draws in an epoch. Raises UserError if it does not end."""
        try:
            length = len(self._sampler)
        except (TypeError, NotImplementedError):  # torch needs none, either
            length = 0
        most = max(ENDLESS, 10 * self._count, 10 * length)
        drawn = list(islice(iter(self._sampler), most + 1))
        if len(drawn) > most:
            said = f"draws more than {most:,} times in an epoch of {self._count:,} samples, as one without an end"
            how = "let it end after an epoch, and give the number of steps to run.epochs(steps=NUMBER)"
            raise UserError(f"the DataLoader's {self._kind} {said}: {how}")
        return drawn


def digest_of(batches: list[Tensor]) -> int:
    """Return 63 bits of a hash of batches of indices."""
    total = hashlib.blake2b(digest_size=8)
    for indices in batches:
        total.update(len(indices).to_bytes(8))
        total.update(indices.numpy().data)
    return int.from_bytes(total.digest()) >> 1


def numbered(batches: list[Tensor], count: int) -> list[Tensor]:
    """Return the drawn batches of an epoch with k * `count` added to an index that was drawn k times before, so that its
    augmentation is another one. The index of `value` is value % count."""
    order = torch.cat(batches).remainder(count) if batches else torch.empty(0, dtype=torch.int64)
    values, places = order.sort(stable=True)
    order[places] += count * (torch.arange(len(order)) - torch.searchsorted(values, values))
    return list(order.split([len(batch) for batch in batches]))


def parts_of(sampler: Any) -> Iterator[Any]:
    """Yield a sampler and those that it holds, such as the sampler of a BatchSampler."""
    yield sampler
    held = getattr(sampler, "__dict__", {}).values()
    yield from chain.from_iterable(parts_of(value) for value in held if isinstance(value, Sampler))


def reseed(generator: object, seed: int) -> None:
    """Seed a generator of torch, Python or numpy. Does nothing for another object."""
    numpy = sys.modules.get("numpy")
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, random.Random):
        generator.seed(seed)
    elif numpy is not None and isinstance(generator, numpy.random.Generator):
        kind = type(generator.bit_generator)
        generator.bit_generator.state = kind(seed).state
    elif numpy is not None and isinstance(generator, numpy.random.RandomState):
        generator.seed(seed & 0xFFFFFFFF)
