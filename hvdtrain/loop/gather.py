"""Rows of all ranks with their gradient, for losses over the samples of all ranks, such as contrastive ones."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hvdtrain.engines.base import Engine
from hvdtrain.engines.errors import UserError
from hvdtrain.engines.portable import as_row
from hvdtrain.engines.tree import Sums, owners
from hvdtrain.engines.virtual import VirtualRanks, not_with_turns
from hvdtrain.inputs.inputs import Batch
from hvdtrain.inputs.sharding import mixed_seed
from hvdtrain.loop.evaluation import Taken


class Gathered(torch.autograd.Function):
    """The rows of every rank, in rank order. backward: each rank gets the sum of all ranks' gradients for its rows.

    Every rank's loss is a mean over its own samples, weighted by their number, so that the mean over ranks is the loss.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, engine: Engine, lengths: list[int]) -> Tensor:
        ctx.engine = engine
        ctx.first, ctx.length = sum(lengths[: engine.rank]), lengths[engine.rank]
        return torch.cat(engine.all_gather_rows(rows, lengths, "gather"))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        # The reduction is in place, and autograd may use this gradient elsewhere: it works on a copy.
        total = gradient.contiguous().clone()
        # Each rank's loss uses the rows of all.
        # This sum is divided by the number of ranks later, with all other gradients.
        ctx.engine.all_reduce_(total, "sum", "gather.gradient")
        return total[ctx.first : ctx.first + ctx.length], None, None


def gather_rows(
    engine: Engine, rows: Tensor | Sequence[Tensor], batch: Batch | None,
    gathered: Callable[[Tensor], Tensor] | None = None, taken: Taken | None = None,
) -> Tensor:  # fmt: skip
    """Return the rows ([n, ...]; n may differ) of all ranks. A collective, and so is its backward pass.

    rows: a tensor, or a list of tensors, one after the other, which may be empty on some ranks. batch: the current one of a
    step, if there is one. gathered: does this for ranks that take turns. taken: by an evaluation, of which the rows are.
    Raises UserError on every rank if the rows are of different shapes or types.
    """
    unknown = isinstance(rows, (list, tuple)) and not rows  # this rank knows no shape
    if isinstance(rows, (list, tuple)) and all(isinstance(one, Tensor) and one.ndim for one in rows):
        rows = torch.cat(rows) if rows else torch.empty(0, device=engine.device)
    if not isinstance(rows, Tensor) or not rows.ndim:
        what = "a scalar" if isinstance(rows, Tensor) else f"a {type(rows).__name__}"
        raise UserError(f"run.gather() got {what}: give it a tensor with a row for each sample")
    if engine.takes_turns:
        if batch is None or gathered is None:
            raise not_with_turns("run.gather() elsewhere", "call it in step.batches()")
        return gathered(rows)
    if batch is not None and not batch.count:  # this rank repeats a sample, which does not count
        rows = rows[:0]
    # Shape and type go as one number with the length, in a single collective. Texts are exchanged only if they differ.
    mine = torch.tensor([len(rows), 0 if unknown else mixed_seed(kind_of_rows(rows))])
    lengths, kinds = engine.all_gather(mine, "gather.lengths").T.tolist()
    if 0 in kinds and any(kinds):
        kind = None if unknown else [list(rows.shape[1:]), str(rows.dtype).removeprefix("torch."), rows.requires_grad]
        shape, dtype, has_gradient = next(
            one for one in engine.all_gather_object(kind, "gather.kinds") if one is not None
        )
        if unknown:  # with the gradient of others: its backward pass is a collective, too
            rows = torch.empty(0, *shape, dtype=getattr(torch, dtype), device=rows.device, requires_grad=has_gradient)
    if len(set(kinds) - {0}) > 1:
        engine.require_equal("the rows of run.gather()", kind_of_rows(rows), SAME_KIND)
    if not max(lengths):
        return rows
    result: Tensor = Gathered.apply(rows, engine, lengths)
    return result if taken is None or lengths != taken.samples else in_order_of_data(engine, result, taken)


def in_order_of_data(engine: Engine, rows: Tensor, taken: Taken) -> Tensor:
    """Return rows of all ranks, one for each sample of an evaluation, in the order of its data set. A collective."""
    if taken.order is None:
        indices = gather_rows(engine, [one.to(engine.device) for one in taken.indices], None)
        taken.order = indices.argsort(stable=True)
    return rows[taken.order.to(rows.device)] if len(taken.order) == len(rows) else rows


SAME_KIND = "give it rows of the same shape and type on all ranks"


def kind_of_rows(rows: Tensor) -> str:
    return f"{list(rows.shape[1:])} {str(rows.dtype).removeprefix('torch.')}"


# ---- ranks that take turns (--virtual-ranks)

LAST, ROWS, GRADIENTS = "last", "rows", "gradients"
AGAIN = (
    "run.gather() got other rows when the loop over step.batches() was computed again, as --virtual-ranks does: "
    "let them follow from the batch, the weights, buffers and torch's random numbers, not from gathered rows"
)


class Rehearsals:
    """The rounds in which a loop over micro-batches is computed, so that ranks which take turns have the rows of all.

    The loss of a rank takes rows of ranks whose turn comes later, and so does the gradient for its rows. So the loop is
    computed with the same batches, random numbers and buffers in up to three rounds. ROWS: without a backward pass, what
    `run.gather` gets is kept. GRADIENTS: those of each rank's loss for the rows of all. LAST: as if ranks were processes. A
    program that does not gather has the last round alone.
    """

    def __init__(self, engine: Engine):
        assert isinstance(engine, VirtualRanks)
        self._engine, self._gathers, self._round = engine, False, LAST

    def begin(self) -> None:
        """Begin a loop over micro-batches."""
        self._engine.buffers.begin()
        self._buffers = self._engine.buffers.noted()
        self._rows: dict[int, list[Tensor]] = {rank: [] for rank in self._engine.own}  # in the order of the calls
        self._whole: list[Tensor] = []  # of each call, the rows of all ranks
        self._lengths: list[list[int]] = []  # of each call, of each rank
        self._sums: dict[tuple[int, int], Sums] = {}  # of the gradients for `_whole`, by call and backward pass
        self._totals: dict[tuple[int, int], Tensor] = {}
        # A program that does not gather has the last round alone. Whether it does is known from its first step.
        self._begin_round(ROWS if self._gathers else LAST)

    def _begin_round(self, kind: str) -> None:
        self._round, self._at = kind, dict.fromkeys(self._engine.own, 0)
        self._current: dict[int, Tensor] = {}  # by call in this micro-batch, what `GRADIENTS` are for
        self._batch: object = None
        self._pass = -1  # backward passes in this micro-batch, from 0

    def goes_on(self) -> bool:
        """Begin the next round, and return True; or False after the last one. A collective, if the program gathers."""
        if self._round is LAST:
            return False
        self._engine.take_turn(None)
        if self._round is ROWS and any(self._rows.values()):
            self._exchange()
            after = GRADIENTS if any(one.requires_grad for rows in self._rows.values() for one in rows) else LAST
        else:
            self._totals = {key: self._engine.total(sums) for key, sums in self._sums.items()}
            after = LAST
        # Each round is a forward pass, which moves batch norm's statistics: a step is to move them once.
        self._engine.buffers.restore(self._buffers)
        self._buffers = self._engine.buffers.noted()
        self._begin_round(after)
        return True

    def gather(self, rows: Tensor, batch: Batch, together: int, *, late: bool) -> Tensor:
        """Return the rows of all ranks; in the round for ROWS, as many others.

        together: samples of all ranks in this micro-batch. late: this loop had a backward pass before.
        """
        rank = self._engine.rank
        if batch is not self._batch:
            self._batch, self._current, self._pass = batch, {}, -1
        if self._round is LAST and not self._whole:
            if late:
                raise UserError("--virtual-ranks: run.gather() after step.backward(): call it before", everywhere=True)
            self._gathers, self._round = True, ROWS
        own = rows if batch.count else rows[:0]  # else this rank repeats a sample, which does not count
        number = self._at[rank]
        self._at[rank] += 1
        if self._round is ROWS:
            self._rows[rank].append(own.detach().requires_grad_(own.requires_grad))
            # Rows of later ranks are not there yet.
            # This rank's stand in for them, in the number and shape that they will have.
            total = len(rows) * together // batch.count if batch.count else len(rows) * self._engine.size
            return torch.cat([rows] * (total // max(1, len(rows)) + 1))[:total]
        first = sum(self._lengths[number][:rank]) if number < len(self._whole) else 0
        whole = self._whole[number] if number < len(self._whole) else None
        # Gradients of an earlier round belong to other rows, if the program drew or computed others since.
        if whole is None or not same_bits(own, whole[first : first + len(own)]):
            raise UserError(AGAIN)
        if self._round is GRADIENTS:
            # A leaf of its own in each micro-batch: its gradient is that of this rank's loss alone.
            leaf = self._current[number] = whole.clone().requires_grad_(own.requires_grad)
            return leaf
        result: Tensor = Summed.apply(own, self, number, first)
        return result

    def rehearses(self, loss: Tensor) -> bool:
        """Take in a backward pass, with its weighted loss. Return whether there is nothing more to do for it."""
        self._pass += 1
        if self._round is not GRADIENTS:
            return self._round is ROWS
        numbers = [number for number, leaf in self._current.items() if leaf.requires_grad]
        leaves = [self._current[number] for number in numbers]
        # Not backward(): the gradients of the weights would be added up in each round.
        gradients = torch.autograd.grad(loss, leaves, allow_unused=True) if leaves else ()
        for number, leaf, gradient in zip(numbers, leaves, gradients, strict=True):
            sums = self._sums.setdefault((number, self._pass), Sums(self._engine.own[0]))
            sums.add([torch.zeros_like(leaf) if gradient is None else gradient.contiguous().clone()])
        return True

    def whole(self, number: int) -> Tensor:
        return self._whole[number].clone()

    def total(self, number: int) -> Tensor | None:
        """Return the sum over ranks of the gradients for the rows of a call, in this backward pass."""
        return self._totals.get((number, self._pass))

    def _exchange(self) -> None:
        engine = self._engine
        told = [
            [[len(one), kind_of_rows(one) + " with a gradient" * one.requires_grad] for one in self._rows[rank]]
            for rank in engine.own
        ]
        everyone = [calls for own in engine.all_gather_object(told, "gather.lengths") for calls in own]
        for rank, calls in enumerate(everyone):
            if [kind for _, kind in calls] != [kind for _, kind in everyone[0]]:
                message = (
                    f"ranks disagree about the rows of run.gather(): rank 0 has {everyone[0]}, rank {rank} has {calls}"
                )
                raise UserError(f"{message}: {SAME_KIND}", everywhere=True)
        for number in range(len(everyone[0])):
            lengths = [calls[number][0] for calls in everyone]
            own = torch.cat([self._rows[rank][number] for rank in engine.own]).detach()
            of_processes = [
                sum(lengths[rank] for rank in ranks) for ranks in owners(engine.processes.size, engine.size)
            ]
            self._whole.append(torch.cat(engine.all_gather_rows(own, of_processes, "gather")) if sum(lengths) else own)
            self._lengths.append(lengths)


class Summed(torch.autograd.Function):
    """The rows of all ranks, which `Rehearsals` has. backward: the sum of all ranks' gradients for the rows of this one."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, rounds: Rehearsals, number: int, first: int) -> Tensor:
        ctx.rounds, ctx.number, ctx.part = rounds, number, slice(first, first + len(rows))
        return rounds.whole(number)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None, None]:
        total = ctx.rounds.total(ctx.number)
        return (None if total is None else total[ctx.part]), None, None, None


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are equal, also where they are not numbers."""
    # Compared as bytes, because NaN is not equal to itself.
    return one.shape == other.shape and torch.equal(*(as_row(rows.detach()).view(torch.uint8) for rows in (one, other)))
