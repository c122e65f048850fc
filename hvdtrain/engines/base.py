"""`Engine`, the interface of all engines: the ranks of one run, their gradients, and the end. See collectives.py, too."""

import contextlib
from abc import abstractmethod
from collections.abc import Callable, Sequence
from types import ModuleType, TracebackType
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from hvdtrain.engines.collectives import Collectives
from hvdtrain.guards.activity import Activity


class Reduction(NamedTuple):
    """How the gradients of all ranks are combined into those of the global batch."""

    compression: str = "none"  # a key of WIRE_DTYPES: type of the gradients on the network
    predivide: float = 1.0  # gradients are divided by this before the sum, and multiplied by it afterwards
    reduction: str = "average"  # "average" or "sum"
    accumulate: int = 1  # maximum number of micro-batches per step
    find_unused_parameters: bool = False  # a step may leave parameters without a gradient, different ones on each rank


AMP_DTYPES = {"off": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
WIRE_DTYPES = {"none": None, "fp16": torch.float16, "bf16": torch.bfloat16}


class Setting(str):
    """A note about a setting that only affects speed. It is printed only with --verbose."""

    __slots__ = ()


class Engine(Collectives):
    """The ranks of one run. Use it as a context manager: leaving it shuts the engine down."""

    name: str  # the value of --engine
    reason = ""  # why --engine auto chose this engine; "": it was named
    description: str  # the engine and its transport, such as "horovod over MPI"
    local_rank: int  # this rank's number on its host, from 0
    local_size: int
    activity: Activity  # what the main thread is doing
    gpu_bytes = 0  # memory of the smallest GPU among those of all ranks; 0: a rank has none
    notes: list[str]  # automatic decisions with their reasons; printed once at the start
    of_all_ranks = True  # or of some of them (parts.py)
    tells_missing_gradients: ClassVar[bool] = False  # a gradient missing on one rank becomes NaN on all ranks
    # When this rank computed its last gradient (`time.perf_counter`), once a micro-batch is done; None: at its end.
    gradients_ready_at: float | None = None
    # Called right before a backward pass, with its loss and the optimizers whose gradients it computes.
    begin_backward: Callable[[Tensor, Sequence[torch.optim.Optimizer]], None] | None = None
    reduces_after_backward = False  # gradients are reduced while the program goes on, up to `synchronize`
    takes_turns: ClassVar[bool] = False  # a process computes several ranks, one after the other (virtual.py)

    def __init__(self, *, tuning: bool, rank: int, size: int, launcher: str) -> None:
        """Connect to the other ranks. `rank`, `size`, `launcher`: from the launcher's variables; the engine may correct
        them."""
        self.notes = []
        self.activity = Activity()
        self.tuning = tuning
        self.rank, self.size = rank, size
        # Around the shutdown.
        self.ending: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
        self.parts: list[Engine] = []  # engines over some of these ranks (parts.py), shut down with this one

    def ranks(self) -> Sequence[int]:
        """Return what numbers these ranks have in the run."""
        return range(self.size)

    @property
    def processes(self) -> "Engine":
        """The processes of the run, each of which is a rank, unless they take turns."""
        return self

    @property
    def own(self) -> Sequence[int]:
        """The ranks that this process computes: one, unless they take turns."""
        return (self.rank,)

    def take_turn(self, rank: int | None) -> None:  # nothing to do, if they take none
        """Go on as this rank of `own`; None: as what all ranks have in common. Every process calls it at the same points."""

    def as_rank(self, rank: int) -> contextlib.AbstractContextManager[None]:
        """Context manager in which what differs between ranks is that of this rank of `own`. No collectives inside."""
        return contextlib.nullcontext()

    def numbered(self, rank: int) -> contextlib.AbstractContextManager[None]:
        """Context manager in which `rank` is this one of `own`, for data that take their part by it."""
        return contextlib.nullcontext()

    def all_gather_ranks(self, rows: Sequence[Tensor], name: str) -> Tensor:
        """Return the rows of all ranks, [size, ...]. rows: of each rank of `own`."""
        return self.all_gather(rows[0], name)

    def sum_of_ranks(self, rows: Tensor, name: str) -> Tensor:
        """Return the sum over all ranks. rows: of each rank of `own`."""
        return self.sum(rows[0].contiguous(), name)

    @abstractmethod
    def choose_device(self, wanted: str) -> torch.device:
        """Return this rank's device for "auto", "cpu" or "cuda". Raises UserError if `wanted` is not available, and if
        "auto" would leave a GPU idle."""

    # ---- gradients: here, they stay on their rank

    def distribute_model(self, model: nn.Module, reduction: Reduction) -> nn.Module:
        """Return the model to train with. It may be a wrapper that shares the parameters of `model`; evaluate, save and
        hash `model` itself."""
        return model

    def distribute_optimizer(
        self, optimizer: torch.optim.Optimizer, named: Sequence[tuple[str, nn.Parameter]], reduction: Reduction
    ) -> torch.optim.Optimizer:
        """Return the optimizer to step. named: at least its parameters, each with a unique name."""
        return optimizer

    def micro_batch(
        self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer], number: int, count: int
    ) -> contextlib.AbstractContextManager[None]:
        """Context manager for the forward and backward pass of micro-batch `number` (from 0) of `count` in a step.

        models, optimizers: those returned by `distribute_model` and `distribute_optimizer`.
        """
        return contextlib.nullcontext()

    def synchronize(self, optimizer: torch.optim.Optimizer) -> None:  # nothing to wait for, if not overridden
        """Wait until the gradients of `optimizer` are reduced. They may then be read and changed."""

    def stepping(self, optimizer: torch.optim.Optimizer) -> contextlib.AbstractContextManager[None]:
        """Context manager for `optimizer.step()` after `synchronize`."""
        return contextlib.nullcontext()

    def distribute(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, **fields: Any
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Return a model and an optimizer that reduce gradients over all ranks. fields: of `Reduction`."""
        reduction = Reduction(**fields)
        replica = self.distribute_model(model, reduction)
        return replica, self.distribute_optimizer(optimizer, list(model.named_parameters()), reduction)

    @abstractmethod
    def shutdown(self) -> None:
        """Disconnect from the other ranks. Idempotent."""

    def ending_calls(self) -> list[tuple[ModuleType, str]]:
        """Return the functions (module, name) with which a program would shut this engine down."""
        return []

    def leave(self) -> None:
        """Call it instead of `shutdown` where no rank has failed. An engine may be started again in this process."""
        self.shutdown()

    def leave_parts(self) -> None:
        """Shut down the engines over some of these ranks."""
        while self.parts:
            self.parts.pop().shutdown()

    def refuse_compression(self, kind: str) -> None:  # nothing to refuse, if not overridden
        """Raise UserError on every rank if gradients cannot travel as `kind`, a key of WIRE_DTYPES. A collective."""

    def __enter__(self) -> "Engine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self.ending():
            self.leave_parts()
            if error is None:
                self.leave()
            else:
                self.shutdown()
