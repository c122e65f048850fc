"""Rows of all ranks with their gradient, for losses over the samples of all ranks, such as contrastive ones."""

from typing import Any

import torch
from torch import Tensor

from hvdtrain.engines.base import Engine
from hvdtrain.engines.errors import UserError
from hvdtrain.inputs.inputs import Batch
from hvdtrain.inputs.sharding import mixed_seed


class Gathered(torch.autograd.Function):
    """The rows of every rank, in rank order. backward: each rank gets the sum of all ranks' gradients for its rows.

    Every rank's loss is a mean over its own samples, weighted by their number, so that the mean over ranks is the loss. Its
    gradient for a row is therefore the sum over ranks, divided by their number with all other gradients.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, engine: Engine, lengths: list[int]) -> Tensor:
        ctx.engine = engine
        ctx.first, ctx.length = sum(lengths[: engine.rank]), lengths[engine.rank]
        return torch.cat(engine.all_gather_rows(rows, lengths, "gather"))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        total = gradient.contiguous().clone()
        ctx.engine.all_reduce_(total, "sum", "gather.gradient")
        return total[ctx.first : ctx.first + ctx.length], None, None


def gather(engine: Engine, rows: Tensor, batch: Batch | None) -> Tensor:
    """Return the rows ([n, ...]; n may differ) of all ranks. A collective, and so is its backward pass.

    batch: the current one of a step, if there is one. Raises UserError on every rank if the rows are of different shapes or
    types.
    """
    if engine.takes_turns:
        remedy = "compute the loss from the samples of one rank"
        raise UserError(f"--virtual-ranks cannot go with run.gather(), as ranks take turns: {remedy}", everywhere=True)
    if not isinstance(rows, Tensor) or not rows.ndim:
        what = "a scalar" if isinstance(rows, Tensor) else f"a {type(rows).__name__}"
        raise UserError(f"run.gather() got {what}: give it a tensor with a row for each sample")
    if batch is not None and not batch.count:  # this rank repeats a sample, which does not count
        rows = rows[:0]
    kind = f"{list(rows.shape[1:])} {str(rows.dtype).removeprefix('torch.')}"
    mine = torch.tensor([len(rows), mixed_seed(kind)])
    lengths, kinds = engine.all_gather(mine, "gather.lengths").T.tolist()
    if len(set(kinds)) > 1:
        engine.require_equal("the rows of run.gather()", kind, "give it rows of the same shape and type on all ranks")
    if not max(lengths):
        return rows
    result: Tensor = Gathered.apply(rows, engine, lengths)
    return result
