"""--virtual-ranks V: the training of V ranks on any number of processes P <= V, with the same bits.

A process computes its ranks one after the other: each takes its turn in a step, with its samples, its random numbers and
its buffers. Step and evaluation ask an engine for `own`, the ranks of this process, and call `take_turn`; any other engine
has one. `rank` and `size` are those of the ranks. All else that a run exchanges is between processes, as without this.

Outside of turns, every process has the buffers of rank 0, and the same random numbers: what a program does there, such as
an average of the weights, is the same on all. A buffer that it changes there changes for all ranks.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hvdtrain.engines.base import Engine, Reduction
from hvdtrain.engines.errors import UserError
from hvdtrain.engines.tree import Gradients, Sums, exchange, owned, owners
from hvdtrain.engines.turns import BuffersOfRanks


def not_with_turns(what: str, remedy: str) -> UserError:
    """Return the error for what --virtual-ranks does not do."""
    return UserError(f"--virtual-ranks cannot go with {what}: {remedy}", everywhere=True)


def of_processes(name: str) -> Any:
    """Return a method that calls the one of this name of the engine of the processes."""

    def method(self: "VirtualRanks", *arguments: Any) -> Any:
        return getattr(self.processes, name)(*arguments)

    return method


class VirtualRanks(Engine):
    """`ranks` ranks on the processes of another engine. Raises UserError if there are more processes."""

    takes_turns = tells_missing_gradients = True

    def __init__(self, processes: Engine, ranks: int):
        if processes.size > ranks:
            remedy = f"start at most {ranks} process{'es'[: 2 * (ranks > 1)]}"
            raise UserError(f"--virtual-ranks {ranks} on {processes.size} processes: {remedy}", everywhere=True)
        self._processes, self.size = processes, ranks
        self._own = owned(processes.rank, processes.size, ranks)
        self.rank = self._own[0]
        self.name, self.reason, self.device = processes.name, processes.reason, processes.device
        self.activity, self.notes, self.tuning = processes.activity, processes.notes, processes.tuning
        self.local_rank, self.local_size = processes.local_rank, processes.local_size
        self.ending, self.parts = processes.ending, processes.parts
        count = f"{processes.size} process{'es'[: 2 * (processes.size > 1)]}"
        self.description = f"virtual ones on {count}, {processes.description}"
        self.buffers = BuffersOfRanks(self)
        self._turn: int | None = None
        self._gradients: dict[torch.optim.Optimizer, Gradients] = {}
        self._chosen: dict[Gradients, None] = {}  # those with a backward pass in this turn

    @property
    def processes(self) -> Engine:
        return self._processes

    # ---- turns

    @property
    def own(self) -> Sequence[int]:
        return self._own

    @property
    def in_turn(self) -> bool:
        return self._turn is not None

    def take_turn(self, rank: int | None) -> None:
        begins = self._turn is None
        if self._turn is not None:
            self.buffers.leave(self._turn)
            for gradients in self._chosen:
                gradients.end_turn(last=self._turn == self._own[-1])
            self._chosen = {}
        self._turn, self.rank = rank, self._own[0] if rank is None else rank
        if rank is None:
            self.buffers.share_first()
            return
        if begins:
            self.buffers.begin()
        self.buffers.enter(rank)

    @contextlib.contextmanager
    def as_rank(self, rank: int) -> Iterator[None]:
        self.buffers.begin()
        self._turn = self.rank = rank
        self.buffers.enter(rank)
        yield
        self.buffers.leave(rank)
        self._turn, self.rank = None, self._own[0]

    @contextlib.contextmanager
    def numbered(self, rank: int) -> Iterator[None]:
        outer, self.rank = self.rank, rank
        try:
            yield
        finally:
            self.rank = outer

    # ---- gradients

    def distribute_model(self, model: nn.Module, reduction: Reduction) -> nn.Module:
        for name, layer in model.named_modules():
            if type(layer).__name__ == "SyncBatchNorm":
                raise not_with_turns(f"{name or 'a model'}, a SyncBatchNorm", "use nn.BatchNorm")
            if type(layer).get_extra_state is not nn.Module.get_extra_state:
                raise not_with_turns(f"{name or 'a model'}, which has a get_extra_state", "keep its state in buffers")
        self.buffers.watch(model)
        return model

    def distribute_optimizer(
        self, optimizer: torch.optim.Optimizer, named: Sequence[tuple[str, nn.Parameter]], reduction: Reduction
    ) -> torch.optim.Optimizer:
        self._gradients[optimizer] = Gradients(self, len(self._gradients), optimizer, reduction)
        return optimizer

    def micro_batch(
        self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer], number: int, count: int
    ) -> contextlib.AbstractContextManager[None]:
        for gradients in self._gradients.values():
            gradients.passes_last = number == count - 1
        return contextlib.nullcontext()

    def begin_backward(self, loss: Tensor, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        for optimizer in optimizers:
            gradients = self._gradients[optimizer]
            if self._turn == self._own[0] and gradients not in self._chosen:
                gradients.begin()
            self._chosen[gradients] = None
        for gradients in self._chosen:
            gradients.is_alone = len(self._chosen) == 1

    def synchronize(self, optimizer: torch.optim.Optimizer) -> None:
        self._gradients[optimizer].reduce()

    def total(self, sums: Sums) -> Tensor:
        """Return the sum over all ranks of one tensor. sums: over those of this process. A collective."""
        result: list[Tensor] = []
        for _ in exchange(self, dict(sums.nodes), "sum of ranks", result.extend):
            pass
        return result[0]

    # ---- collectives: between processes

    def sum_of_ranks(self, rows: Tensor, name: str) -> Tensor:
        return self.all_gather_ranks(rows.unbind(), name).sum(0)

    def all_gather_ranks(self, rows: Sequence[Tensor], name: str) -> Tensor:
        each = [len(own) for own in owners(self.processes.size, self.size)]
        if not rows[0].numel():
            return rows[0].expand(self.size, *rows[0].shape)
        return torch.cat(self.processes.all_gather_rows(torch.stack(list(rows)), each, name))

    ranks = of_processes("ranks")
    all_reduce_ = of_processes("all_reduce_")
    all_gather = of_processes("all_gather")
    all_gather_object = of_processes("all_gather_object")
    all_gather_if_unlike = of_processes("all_gather_if_unlike")
    begin = of_processes("begin")
    broadcast_ = of_processes("broadcast_")
    average_ = of_processes("average_")
    broadcast_model = of_processes("broadcast_model")
    ending_calls = of_processes("ending_calls")
    shutdown = of_processes("shutdown")

    @contextlib.contextmanager
    def raising_together(self, name: str) -> Iterator[None]:
        # A collective in each turn would hang: processes have different numbers of ranks.
        with contextlib.nullcontext() if self._is_later else self.processes.raising_together(name):
            yield

    def require_equal(self, what: str, value: object, remedy: str) -> None:
        if not self._is_later:
            self.processes.require_equal(what, value, remedy)

    @property
    def _is_later(self) -> bool:
        """Whether the turn is not the first one of this process: other processes may have fewer."""
        return self._turn not in (None, self._own[0])

    def choose_device(self, wanted: str) -> torch.device:
        return self.device
