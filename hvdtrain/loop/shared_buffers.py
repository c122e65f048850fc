"""Buffers, which each rank changes in its own forward passes, made the same on all ranks where these evaluate one model.

Batch norm's running statistics are averaged. Of any other buffer that differs, such as a codebook that follows the samples
of its rank, every rank takes rank 0's, as DistributedDataParallel does in every forward pass.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hvdtrain.checkpoint.checksums import checksum
from hvdtrain.engines.base import Engine
from hvdtrain.engines.errors import UserError
from hvdtrain.engines.modules import kind_of, own_name, prefixes, running_statistics, statistics_of_layer

COUNTER = "num_batches_tracked"  # of the batches that a batch norm's statistics are of
NONE: Mapping[str, nn.Module] = {}
ALIKE = "make it alike on every rank, or register_buffer(..., persistent=False), which no checkpoint holds"


def give_memory(model: nn.Module) -> None:
    """Give expanded buffers and lazy conjugates, which share memory, memory of their own: values are received into it."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.layout is not torch.strided:
                continue
            own = buffer.resolve_conj().resolve_neg()
            if any(stride == 0 and size > 1 for stride, size in zip(own.stride(), own.shape, strict=True)):
                own = own.contiguous()
            module._buffers[name] = own


class NamedBuffer(NamedTuple):
    """A buffer, and the layer that has it."""

    tensor: Tensor
    layer: nn.Module
    is_statistic: bool  # a running statistic of batch norm
    saved: bool  # whether checkpoints have it


class SharedBuffers:
    """The buffers of a run's models."""

    def __init__(self, engine: Engine, models: Sequence[nn.Module]):
        self._engine, self._models = engine, models
        self._shared_at: object = None
        self._own: dict[int, tuple[Tensor, Tensor]] = {}  # by id: buffers, and copies of what this rank had in them
        self._unlike: list[str] = []  # of other buffers: those that differed between ranks when that was first noticed
        self._warned = False

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

    def _named(self, registered: Mapping[str, nn.Module]) -> dict[str, NamedBuffer]:
        """Return each buffer that ranks should have in common, once: of the models all, of registered modules the
        statistics, and of how many batches these are."""
        modules = [(prefix, model) for prefix, model in zip(prefixes(self._models), self._models, strict=True)]
        modules += [(f"{name}.", module) for name, module in registered.items()]
        named, known = dict[str, NamedBuffer](), set[int]()
        for number, (prefix, module) in enumerate(modules):
            for path, layer in module.named_modules():
                statistics = statistics_of_layer(layer)
                for name, tensor in layer.named_buffers(recurse=False):
                    shared = number < len(self._models) or name in statistics or (statistics and name == COUNTER)
                    if not shared or id(tensor) in known or tensor.layout is not torch.strided:
                        continue
                    known.add(id(tensor))
                    full = prefix + own_name(f"{path}.{name}" if path else name)
                    saved = name not in layer._non_persistent_buffers_set
                    named[full] = NamedBuffer(tensor, layer, name in statistics, saved)
        return named

    def compare(self, registered: Mapping[str, nn.Module] = NONE) -> tuple[dict[str, NamedBuffer], list[str]]:
        """Return this rank's buffers by name, and the names of those that differ between ranks. A collective.

        Buffers that no checkpoint has may be missing on a rank, or have other shapes, such as tables as long as the longest
        sequence so far: they stay as they are. Raises UserError on every rank for others.
        """
        if self._engine.size == 1:
            return {}, []
        named = self._named(registered)
        sums = torch.stack([checksum(buffer.tensor) for buffer in named.values()]).tolist() if named else []
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
                raise UserError(f"{message}: {ALIKE}", everywhere=True)
        self._unlike = self._unlike or [name for name in differing if not named[name].is_statistic]
        return named, differing

    def warning(self) -> str | None:
        """Return, once, what to tell the author about buffers that differed between ranks; None: nothing."""
        if self._warned or not self._unlike:
            return None
        self._warned = True
        more = f" and {len(self._unlike) - 1} others differ" if len(self._unlike) > 1 else " differs"
        message = f"the buffer {self._unlike[0]}{more} between ranks, and rank 0's is evaluated and saved"
        return f"warning: {message}: let it follow the rows of all ranks, run.gather(rows)"

    def _keep(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            self._own.setdefault(id(tensor), (tensor, tensor.clone()))

    def restore_own(self) -> None:
        """Restore this rank's buffers of before the evaluations at this position, for a checkpoint from which these are
        repeated: averaging the means again could change bits, because the sum of equal numbers is rounded."""
        for tensor, own in self._own.values():
            tensor.copy_(own)
