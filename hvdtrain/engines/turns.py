"""The buffers of models on a process whose ranks take turns (--virtual-ranks): each rank has its own.

Outside of turns, every process has the buffers of rank 0. A buffer that a program changes there changes for all ranks.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hvdtrain.engines.base import Engine
from hvdtrain.engines.modules import COUNTER, flatten, kind_of, statistics_of_layer
from hvdtrain.engines.portable import as_row, flattened, unflattened

BufferPlace = tuple[nn.Module, str]  # a layer, and the name of a buffer in it
Values = dict[BufferPlace, Any]  # tensors, which are never changed in place, None, or ABSENT
ABSENT = object()  # a buffer that a layer makes later, or has deleted


def put_buffer(place: BufferPlace, value: Any) -> None:
    """Give a buffer a value."""
    layer, name = place
    now: Any = layer._buffers.get(name)
    if value is ABSENT:
        layer._buffers.pop(name, None)
    elif has_kind_of(now, value):
        now.copy_(value)
    else:
        layer._buffers[name] = copied(value)


def copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def has_kind_of(one: Any, other: Any) -> bool:
    return isinstance(one, Tensor) and isinstance(other, Tensor) and kind_of(one) == kind_of(other)


def is_same(one: Any, other: Any) -> bool:
    # As bytes: NaN is equal to itself, and -0.0 not to 0.0.
    bits = (as_row(each).view(torch.uint8) for each in (one, other))
    return one is other or (has_kind_of(one, other) and torch.equal(*bits))


class BuffersOfRanks:
    """The buffers of the models on one process, of which each rank may have its own."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._layers: dict[nn.Module, None] = {}
        self._fixed: list[BufferPlace] = []  # those that all processes have, in the same order
        self.common: Values = {}  # what all have outside of turns
        self.own: dict[int, Values] = {rank: {} for rank in engine.own}  # where a rank has others

    def watch(self, model: nn.Module) -> None:
        """Take care of the buffers of this model, too."""
        for layer in model.modules():
            if layer not in self._layers:
                self._layers[layer] = None
                self._fixed += [place for place, buffer in self._of_layer(layer) if buffer is not None]

    def _of_layer(self, layer: nn.Module) -> list[tuple[BufferPlace, Tensor | None]]:
        named = layer._buffers.items()  # sparse ones, which collectives do not carry, stay as they are
        return [((layer, name), one) for name, one in named if one is None or one.layout is torch.strided]

    def _now(self) -> Iterator[tuple[BufferPlace, Any]]:
        yield from itertools.chain.from_iterable(map(self._of_layer, self._layers))
        yield from [(place, ABSENT) for place in self.common if place[1] not in place[0]._buffers]

    @torch.no_grad()
    def enter(self, rank: int) -> None:
        """Begin the turn of a rank."""
        for place, value in self.own[rank].items():
            put_buffer(place, value)

    @torch.no_grad()
    def leave(self, rank: int) -> None:
        """End the turn of a rank: note what it has of its own."""
        own = self.own[rank]
        for place, buffer in self._now():
            common = self.common.get(place, ABSENT)
            if place not in own and is_same(common, buffer):
                continue
            if place not in own or not is_same(own[place], buffer):
                own[place] = copied(buffer)
            put_buffer(place, common)

    @torch.no_grad()
    def begin(self) -> None:
        """Take in what the program has changed since the last turn, for all ranks."""
        for place, buffer in self._now():
            if place not in self.common or not is_same(self.common[place], buffer):
                self.common[place] = copied(buffer)
                for own in self.own.values():
                    own.pop(place, None)

    @torch.no_grad()
    def share_first(self) -> None:
        """Let every process have the buffers of rank 0. A collective."""
        own = self.own.get(0, {})
        # As large as all processes have them. Others have grown, or were made later.
        alike = {place for place in self._fixed if has_kind_of(own.get(place), self.common.get(place))}
        for place, value in own.items():
            self.common[place] = value
            put_buffer(place, value)
        if self._engine.processes.size == 1 or not self._fixed:
            return
        changed = torch.tensor([*(place in alike for place in self._fixed), own.keys() > alike], dtype=torch.uint8)
        self._engine.broadcast_(changed, "buffers.changed")
        *flags, others = changed.tolist()
        if others:
            self._share_others([(place, value) for place, value in own.items() if place not in alike])
        places = [place for place, is_changed in zip(self._fixed, flags, strict=True) if is_changed]
        if not places:
            return
        buffers = [layer._buffers[name] for layer, name in places]
        # As bytes, buffers of all types travel in one message.
        content = torch.cat([as_row(buffer).view(torch.uint8) for buffer in buffers if buffer is not None])
        self._engine.broadcast_(content, "buffers")
        if 0 not in self.own:
            for place, part in zip(places, content.split([b.nbytes for b in buffers if b is not None]), strict=True):
                now = place[0]._buffers[place[1]]
                assert now is not None
                self.common[place] = part.clone().view(now.dtype).view(now.shape)
                put_buffer(place, self.common[place])

    def _share_others(self, of_first: Sequence[tuple[BufferPlace, Any]]) -> None:
        """Let every process have these of rank 0, whatever it has in their place. A collective."""
        layers = list(self._layers)
        there = [(layers.index(place[0]), place[1], value is not ABSENT, value) for place, value in of_first]
        packed, row = flattened([[*head, is_there, value if is_there else None] for *head, is_there, value in there])
        for number, name, is_there, value in unflattened(*self._engine.broadcast_packed(packed, row, "buffers.others")):
            if 0 not in self.own:
                place = layers[number], name
                value = value.to(self._engine.device) if isinstance(value, Tensor) else value
                self.common[place] = value if is_there else ABSENT
                put_buffer(place, self.common[place])

    def noted(self) -> tuple[Values, dict[int, Values]]:
        """Return what `restore` takes."""
        return dict(self.common), {rank: dict(own) for rank, own in self.own.items()}

    @torch.no_grad()
    def restore(self, noted: tuple[Values, dict[int, Values]]) -> None:
        """Go back to what was noted outside of turns."""
        self.common, self.own = noted
        for place, value in self.common.items():
            put_buffer(place, value)

    @torch.no_grad()
    def average(self) -> None:
        """Let all ranks have the mean of running statistics, and rank 0's of all others. A collective, outside of turns."""
        self.begin()
        places = [(layer, name) for layer in self._layers for name in statistics_of_layer(layer)]
        counters = {(layer, COUNTER) for layer, _ in places if layer._buffers.get(COUNTER) is not None}
        means: Values = {}
        if counted := sorted(counters, key=[*self.common].index):
            rows = self._of_all(counted)
            unlike = {layer for (layer, _), same in zip(counted, is_alike(rows), strict=True) if not same}
            places = [place for place in places if place[0] not in unlike]  # as after update_bn on one rank alone
        if places:
            rows = self._of_all(places)
            # Those that are equal keep their bits: three equal numbers, added up and divided by three, may give another.
            mean = torch.where(is_alike(rows), rows[0], rows.sum(0) / len(rows))
            sizes = [self._value(self._engine.rank, place).numel() for place in places]
            for place, part in zip(places, mean.split(sizes), strict=True):
                now = self._value(self._engine.rank, place)
                means[place] = part.to(now.dtype).view(now.shape)
        self.own = {rank: {} for rank in self.own}
        for place, value in means.items():
            self.common[place] = value
            put_buffer(place, value)

    def _value(self, rank: int, place: BufferPlace) -> Tensor:
        value: Tensor | None = self.own[rank].get(place, self.common[place])
        assert value is not None
        return value

    def _of_all(self, places: Sequence[BufferPlace]) -> Tensor:
        """Return these buffers of all ranks: a row for each. A collective."""
        rows = [flatten(self._value(rank, place) for place in places) for rank in self.own]
        return self._engine.all_gather_ranks(rows, "average_buffers")


def is_alike(rows: Tensor) -> Tensor:
    """Return in which columns all rows are equal."""
    return (rows == rows[0]).all(0)
