"""Turns gradients of means over samples into those over other items: tokens, or the samples that a collate_fn left in."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hvdtrain.engines.accelerators import exact, to_device
from hvdtrain.engines.base import Engine
from hvdtrain.engines.errors import UserError
from hvdtrain.inputs.inputs import Batch
from hvdtrain.loop.prepare import Prepared


def compare_counts(
    engine: Engine, items: "Counts | None", averaged: list[list[float]], say: Callable[[str], object]
) -> None:
    """Raise UserError on every rank if some give `count`, and some do not; say if means need it. A collective.

    items: of this rank, if it gives it. averaged: what `losses.look_at` has returned of its micro-batches.
    """
    from hvdtrain.program.losses import unequal_items

    given = "one" if items is not None and items.given else "none"
    engine.require_equal("count= of step.backward()", given, "give it on all ranks, or on none")
    if line := unequal_items(engine.all_gather_object(averaged, "losses")):
        say(f"warning: {line}")


class Counts:
    """The numbers of items given to `step.backward(count=...)` in one step. samples: of the step, over all ranks."""

    def __init__(self, prepared: Prepared, number: int, samples: int):
        self._engine, self._prepared, self._number, self._samples = prepared.engine, prepared, number, samples
        # Of each optimizer, `count` by the number of the backward pass in this loop.
        self._counts: dict[torch.optim.Optimizer, dict[int, Tensor | float]] = {}
        self.given = False  # in this loop
        self.least: Tensor | None = None  # the smallest sum over all ranks so far

    def begin(self) -> None:
        """Begin a loop over the micro-batches."""
        self._counts, self.given = {}, False

    def add(self, optimizers: Sequence[torch.optim.Optimizer], number: int, count: Tensor | float) -> float | Tensor:
        """Note the `count` of backward pass `number`. Return the factor for its loss; `divide` divides by the sum later.
        Raises UserError."""
        # To read a tensor of a GPU waits for all kernels that are queued there. `lacking` looks at it later.
        waits = isinstance(count, Tensor) and count.device.type != "cpu"
        if not waits and not 0 <= float(count) < math.inf:
            raise UserError(f"step {self._number}: step.backward(count=...) got {float(count):g}: give it 0 or more")
        self.given = True
        for one in optimizers:  # plus 0, a copy: the program may write the next number into the same tensor
            self._counts.setdefault(one, {})[number] = count + 0
        if isinstance(count, Tensor) and not count.is_floating_point():  # else torch divides in its default dtype
            count = count.to(torch.promote_types(torch.get_default_dtype(), torch.float32))
        # The average over ranks divides by `size`.
        # What is left is the sum over items, divided by the samples of the step.
        return count * self._engine.size / self._samples

    def divide(self) -> None:
        """Turn the gradients of means over samples into those of a mean over items. A collective."""
        # Each loss has items of its own, and so have the optimizers that got others in this loop.
        alike: dict[tuple[int, ...], list[torch.optim.Optimizer]] = {}  # by backward passes, the same on all ranks
        for optimizer, counts in self._counts.items():
            alike.setdefault(tuple(counts), []).append(optimizer)
        for optimizers in alike.values():
            self._multiply(self._factor(list(self._counts[optimizers[0]].values())), optimizers)

    def _factor(self, counts: Sequence[Tensor | float]) -> Tensor | float:
        """Return the number of samples by that of items, over all ranks. counts: of the backward passes of each own rank."""
        if (device := self._engine.device).type != "cpu":  # the sum stays there, on every rank
            own = torch.zeros(len(self._engine.own), dtype=torch.float64, device=device)
            for number, count in enumerate(counts):
                # Backward passes come rank by rank, as many for each of this process's ranks.
                own[number * len(own) // len(counts)] += to_device(count, device)  # a tensor, or a number
            self._note(whole := self._of_all(own))
            return (self._samples / whole).float()  # infinite without items, which `lacking` explains
        passes = len(counts) // len(self._engine.own)
        items = [sum(map(float, counts[at : at + passes])) for at in range(0, len(counts), passes)]
        self._note(whole := self._of_all(torch.tensor(items, dtype=torch.float64)))
        return self._samples / float(whole) if whole > 0 else math.inf

    def make_up(self, left_in: int, planned: int, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Turn the gradients of means over the planned samples into those over the ones that the collate_fn has left in.

        left_in, planned: of this rank. A collective.
        """
        device = self._engine.device
        numbers = torch.tensor([left_in, planned], dtype=torch.float64).to(device, non_blocking=True)
        left, whole = self._engine.sum(numbers, "samples")
        if self._engine.of_all_ranks or device.type != "cpu":
            self._note(left)
        if device.type != "cpu":  # the sums stay there
            # Infinite without samples, which `lacking` explains.
            self._multiply((whole / left).float(), optimizers)
        elif left != whole:
            without = math.inf if self._engine.of_all_ranks else 1.0
            self._multiply(float(whole) / float(left) if left else without, optimizers)

    def _note(self, number: Tensor) -> None:
        self.least = number if self.least is None else torch.minimum(number, self.least)

    def lacking(self) -> str:
        """Return that there were no items on all ranks, so that the gradients are not finite; else an empty text. Reads from
        an accelerator."""
        if self.least is None or float(self.least) > 0:
            return ""
        step, remedy = f"step {self._number}", "leave such samples out"
        if not self.given:
            return f"{step}: the collate_fn left no sample of all ranks: {remedy} of the Dataset"
        return f"{step}: step.backward(count=...) was 0 or less over all ranks: {remedy}"

    def _multiply(self, factor: Tensor | float, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        for optimizer in optimizers:
            if gradients := [p.grad for p in self._prepared.trained[optimizer] if p.grad is not None]:
                torch._foreach_mul_(gradients, factor)

    def _of_all(self, own: Tensor) -> Tensor:
        """Return the number of items over the ranks that average their gradients; those of this process have `own`."""
        # If those that average are some of all ranks, they may have no item:
        # their gradients are zero, to be divided by 1.
        total = self._engine.sum_of_ranks(own, "tokens")
        return total if self._engine.of_all_ranks else torch.where(total > 0, total, torch.ones_like(total))


def share_of_samples(
    engine: Engine,
    ranks: Sequence[int],
    load: Callable[[int], Batch],
    passes: int,
    number: Callable[[Any], Tensor | float],
) -> float:
    """Return how many of something there are for each sample of a step: see `Step.per_sample`. A collective.

    ranks: that this process computes, in turn. load: returns a micro-batch of the step by its number. passes: of each rank.
    """
    of_ranks = []
    for turn, rank in enumerate(ranks):
        engine.take_turn(rank)
        loaded = [load(turn * passes + i) for i in range(passes)]
        own = [(exact(number(b if b.data is None else b.data)), b.count) for b in loaded if b.count]
        if wrong := [amount for amount, _ in own if amount.numel() != 1]:
            remedy = "return their number in the micro-batch, such as a sum"
            raise UserError(f"step.per_sample() got a tensor of shape {tuple(wrong[0].shape)}: {remedy}")
        of_ranks.append([sum(float(amount) for amount, _ in own), sum(count for _, count in own)])
    engine.take_turn(None)
    total, count = engine.sums(of_ranks, "step.per_sample")
    return total / count if count else 0.0
