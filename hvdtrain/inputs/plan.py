"""Which batches a rank loads: its steps in each epoch, also of an epoch that is resumed."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hvdtrain.engines.errors import UserError
from hvdtrain.inputs.sharding import (
    PlannedBatch,
    PlannedStep,
    epoch_order,
    steps,
    steps_per_epoch,
)


@dataclass(frozen=True)
class Plan:
    """Which samples one rank takes in each step of each epoch (sharding.py)."""

    total: int  # samples in the training set
    per_epoch: int  # samples per epoch
    seed: int
    epochs: int
    rank: int
    size: int
    batch_size: int
    accumulate: int = 1
    global_batch: int | None = None  # samples per step over all ranks; None: size * batch_size * accumulate
    first_epoch: int = 0  # epoch in which a resumed run continues
    taken: int = 0  # samples of that epoch that are already done
    device: str | torch.device = "cpu"  # of the indices
    order: Callable[[int, int], Tensor] | None = None  # (seed, epoch) -> int64 [total]; None: `epoch_order`
    # (seed, epoch) -> batches that stay whole; takes precedence
    batches: Callable[[int, int], Sequence[Tensor]] | None = None
    batches_per_step: int = 1  # of these, over all ranks
    own: Sequence[int] = ()  # ranks that this process computes, if they take turns; (): `rank`

    def epoch(self, epoch: int) -> Iterator[PlannedStep]:
        """Return this process's remaining steps of `epoch`: in each, the passes of its first rank, then of its next one."""
        if len(self.own) <= 1:
            return self._of_rank(epoch, self.rank)
        of_ranks = zip(*(self._of_rank(epoch, rank) for rank in self.own), strict=True)
        return (PlannedStep([batch for step in steps for batch in step.batches], steps[0].count) for steps in of_ranks)

    def _of_rank(self, epoch: int, rank: int) -> Iterator[PlannedStep]:
        if self.batches is not None:
            whole = self.batches(self.seed, epoch)
            left = batches_after(whole, self.taken) if epoch == self.first_epoch else whole
            if left is None:
                done = f"{self.taken} samples of this epoch are done, where no batch ends: use the same batch_sampler"
                raise UserError(f"the checkpoint does not match the batches: {done}", everywhere=True)
            return steps_of_batches(left, rank, self.size, self.batches_per_step)
        order = self.order(self.seed, epoch) if self.order else epoch_order(self.total, self.seed, epoch)
        order = order[: self.per_epoch].to(self.device)
        rest = order[self.taken :] if epoch == self.first_epoch else order
        return steps(rest, rank, self.size, self.batch_size, self.accumulate, self.global_batch)

    def of_epoch(self, epoch: int, taken: int) -> "Plan":
        """Return the plan of the steps of `epoch` alone that remain after this number of samples."""
        return dataclasses.replace(self, first_epoch=epoch, epochs=epoch + 1, taken=taken)

    def steps_per_epoch(self) -> int:
        """Return the number of steps in a full epoch; of batches, whose number may vary, in the first one."""
        if self.batches is not None:
            return -(-len(self.batches(self.seed, 0)) // self.batches_per_step)
        if self.global_batch is not None:
            return -(-self.per_epoch // self.global_batch)
        return steps_per_epoch(self.per_epoch, self.size, self.batch_size, self.accumulate)

    def __iter__(self) -> Iterator[tuple[int, PlannedBatch]]:
        """Yield (epoch, batch) for all remaining epochs, so that loading continues across the end of an epoch."""
        for epoch in range(self.first_epoch, self.epochs):
            for step in self.epoch(epoch):
                for batch in step.batches:
                    yield epoch, batch


# ---- batches that stay whole, as of a batch_sampler


def steps_of_batches(batches: Sequence[Tensor], rank: int, size: int, per_step: int) -> Iterator[PlannedStep]:
    """Yield this rank's part of each step through `batches` of indices, each int64 [b]. A batch stays whole on one rank.

    A step takes `per_step` batches, in as many passes as needed. In each, rank r takes the batch with number r. As with
    `steps`, the weight of a batch follows from its samples. A rank without one repeats the pass's first batch with weight 0.
    """
    for start in range(0, len(batches), per_step):
        those = [batches[number] for number in range(start, min(start + per_step, len(batches)))]
        count = sum(map(len, those))
        passes = []
        for number in range(0, len(those), size):
            together = those[number : number + size]
            # A whole batch again, not one sample: batch norm and deviations may need more than one.
            mine = together[rank] if rank < len(together) else together[0]
            local_count = len(mine) if rank < len(together) else 0
            lengths = [len(batch) for batch in together]
            weight = local_count * size / count
            passes.append(
                PlannedBatch(mine, weight, local_count, sum(lengths), sum(lengths[:rank]) if local_count else 0)
            )
        yield PlannedStep(passes, count)


def batches_after(batches: Sequence[Tensor], taken: int) -> Sequence[Tensor] | None:
    """Return the batches after the first `taken` samples; None if a batch would have to be divided."""
    for number, batch in enumerate(batches):
        if taken <= 0:
            return batches[number:] if taken == 0 else None
        taken -= len(batch)
    return [] if taken == 0 else None
