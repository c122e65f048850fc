"""Buffers, which each rank changes in its own forward passes, made the same on all ranks where these evaluate one model.

Batch norm's running statistics are averaged. Of any other buffer that differs, such as a codebook that follows the samples
of its rank, every rank takes rank 0's, as DistributedDataParallel does in every forward pass.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hvdtrain.checkpoint.checksums import checksum
from hvdtrain.engines.base import Engine
from hvdtrain.engines.modules import kind_of, own_name, prefixes, running_statistics


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


class SharedBuffers:
    """The buffers of a run's models."""

    def __init__(self, engine: Engine, models: Sequence[nn.Module]):
        self._engine, self._models = engine, models
        self._shared_at: object = None
        self._own: dict[int, tuple[Tensor, Tensor]] = {}  # by id: buffers, and copies of what this rank had in them
        self._unlike: list[str] = []  # of other buffers: those that differed between ranks when that was first noticed
        self._warned = False

    def share(self, position: object, registered: Sequence[nn.Module]) -> None:
        """Make the buffers the same on all ranks, for an evaluation. A collective.

        position: in training; a resume repeats all evaluations of the same one. See `restore_own`. registered: modules with
        statistics of their own, such as averaged weights.
        """
        if position != self._shared_at:
            self._shared_at, self._own = position, {}
        of_models = running_statistics(self._models)
        known = {id(tensor) for tensor in of_models}
        others = [tensor for tensor in running_statistics(registered) if id(tensor) not in known]
        self._keep([*of_models, *others])
        for model in self._models:
            self._engine.average_buffers(model)
        self._engine.average_(others)
        self.take_rank_0s()

    def take_rank_0s(self) -> None:
        """Copy rank 0's buffers to every rank where they differ, without running statistics. A collective.

        Buffers that have other shapes on another rank, such as tables as long as the longest sequence so far, stay as they
        are.
        """
        mine, unlike = self.compare()
        self._keep([mine[name] for name in unlike])
        for name in unlike:
            self._engine.broadcast_(mine[name], f"buffers.{name}")

    def compare(self) -> tuple[dict[str, Tensor], list[str]]:
        """Return this rank's buffers without running statistics, by name, and which differ between ranks. A collective."""
        if self._engine.size == 1:
            return {}, []
        statistics = {id(tensor) for tensor in running_statistics(self._models)}
        mine = {
            prefix + own_name(name): buffer
            for prefix, model in zip(prefixes(self._models), self._models, strict=True)
            for name, buffer in model.named_buffers()
            if id(buffer) not in statistics and buffer.layout is torch.strided
        }
        sums = torch.stack([checksum(buffer) for buffer in mine.values()]).tolist() if mine else []
        facts = {name: [kind_of(buffer), each] for (name, buffer), each in zip(mine.items(), sums, strict=True)}
        everyone = self._engine.all_gather_object(facts, "buffers")
        unlike = [
            name
            for name, (kind, each) in everyone[0].items()
            if all(name in theirs and theirs[name][0] == kind for theirs in everyone)
            and any(theirs[name][1] != each for theirs in everyone)
        ]
        self._unlike = self._unlike or unlike
        return mine, unlike

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
