"""`Engine`, the interface of all engines: the ranks of one run and the collectives over them.

An engine implements the abstract methods; the other methods are built from them here. Every rank must call every
collective, in the same order.
"""

import contextlib
import json
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType, TracebackType
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from hvdtrain.engines import buffers
from hvdtrain.engines.activity import Activity
from hvdtrain.engines.errors import Failure, UserError
from hvdtrain.engines.portable import TENSOR, Held, from_json, to_json


class Reduction(NamedTuple):
    """How the gradients of all ranks are combined into those of the global batch."""

    compression: str = "none"  # a key of WIRE_DTYPES: type of the gradients on the network
    predivide: float = 1.0  # gradients are divided by this before the sum, and multiplied by it afterwards
    reduction: str = "average"  # "average" or "sum"
    accumulate: int = 1  # maximum number of micro-batches per step
    find_unused_parameters: bool = False  # a step may leave parameters without a gradient, different ones on each rank


AMP_DTYPES = {"off": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
WIRE_DTYPES = {"none": None, "fp16": torch.float16, "bf16": torch.bfloat16}


def lay_state_as_weights(optimizer: torch.optim.Optimizer) -> None:
    """Give the state the memory format of the weights. State that was loaded or received is contiguous, and fused
    kernels take no two formats at once."""
    for parameter, values in optimizer.state.items():
        for name, value in values.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.stride() != parameter.stride():
                values[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


class Setting(str):
    """A note about a setting that only affects speed. It is printed only with --verbose."""

    __slots__ = ()


class Engine(ABC):
    """The ranks of one run. Use it as a context manager: leaving it shuts the engine down."""

    name: str  # the value of --engine
    reason = ""  # why --engine auto chose this engine; "": it was named
    description: str  # the engine and its transport, such as "horovod over MPI"
    rank: int
    size: int
    local_rank: int  # this rank's number on its host, from 0
    local_size: int
    device: torch.device
    activity: Activity  # what the main thread is doing
    notes: list[str]  # automatic decisions with their reasons; printed once at the start
    of_all_ranks: ClassVar[bool] = True  # or of some of them (parts.py)
    tells_missing_gradients: ClassVar[bool] = False  # a gradient missing on one rank becomes NaN on all ranks
    # When this rank computed its last gradient (`time.perf_counter`), once a micro-batch is done; None: at its end.
    gradients_ready_at: float | None = None
    begin_backward: Callable[[Tensor], None] | None = None  # called with a loss right before its backward pass

    def __init__(self, *, tuning: bool, rank: int, size: int, launcher: str) -> None:
        """Connect to the other ranks. `rank`, `size`, `launcher`: from the launcher's variables; the engine may correct
        them."""
        self.notes = []
        self.activity = Activity()
        self.tuning = tuning
        self.rank, self.size = rank, size
        self.ending: Callable[[], contextlib.AbstractContextManager[None]] = (
            contextlib.nullcontext
        )  # around the shutdown
        self.parts: list[Engine] = []  # engines over some of these ranks (parts.py), shut down with this one

    def ranks(self) -> Sequence[int]:
        """Return what numbers these ranks have in the run."""
        return range(self.size)

    @abstractmethod
    def choose_device(self, wanted: str) -> torch.device:
        """Return this rank's device for "auto", "cpu" or "cuda". Raises UserError if `wanted` is not available, and if
        "auto" would leave a GPU idle."""

    # ---- gradients: here, they stay on their rank

    def distribute_model(self, model: nn.Module, how: Reduction) -> nn.Module:
        """Return the model to train with. It may be a wrapper that shares the parameters of `model`; evaluate, save and
        hash `model` itself."""
        return model

    def distribute_optimizer(
        self, optimizer: torch.optim.Optimizer, named: Sequence[tuple[str, nn.Parameter]], how: Reduction
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

    def synchronize(self, optimizer: torch.optim.Optimizer) -> None:  # noqa: B027 # nothing to wait for, if not overridden
        """Wait until the gradients of `optimizer` are reduced. They may then be read and changed."""

    def stepping(self, optimizer: torch.optim.Optimizer) -> contextlib.AbstractContextManager[None]:
        """Context manager for `optimizer.step()` after `synchronize`."""
        return contextlib.nullcontext()

    # ---- collectives. Engines decorate them with `activity.collective`.

    @abstractmethod
    def all_reduce_(self, tensor: Tensor, op: str, name: str) -> None:
        """Reduce `tensor` over all ranks, in place on every rank.

        op: "sum", "average", "min", "max" or "product". Shape and dtype must be the same on all ranks; `name` identifies
        the call.
        """

    @abstractmethod
    def all_gather(self, tensor: Tensor, name: str) -> Tensor:
        """Return the `tensor` of every rank, stacked as [size, ...]. Shape and dtype must be the same on all ranks."""

    @abstractmethod
    def broadcast_(self, tensor: Tensor, name: str) -> None:
        """Copy rank 0's `tensor` to every rank, in place."""

    def broadcast_model(self, model: nn.Module) -> None:
        """Copy rank 0's parameters and buffers to every rank, also those that a state_dict leaves out."""
        for name, tensor in buffers.all_tensors(model):
            self.broadcast_(tensor, name)

    def broadcast(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Copy rank 0's parameters, buffers and optimizer state to every rank. Rank 0 is not changed."""
        self.broadcast_model(model)
        self.broadcast_optimizer_state(optimizer)

    def distribute(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, **how: Any
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Return a model and an optimizer that reduce gradients over all ranks. how: fields of `Reduction`."""
        reduction = Reduction(**how)
        replica = self.distribute_model(model, reduction)
        return replica, self.distribute_optimizer(optimizer, list(model.named_parameters()), reduction)

    @contextlib.contextmanager
    def synchronized(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Wait until the gradients are reduced. Inside, they may be read and changed, and the optimizer stepped."""
        self.synchronize(optimizer)
        with self.stepping(optimizer):
            yield

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

    def refuse_compression(self, kind: str) -> None:  # noqa: B027 # nothing to refuse, if not overridden
        """Raise UserError on every rank if gradients cannot travel as `kind`, a key of WIRE_DTYPES. A collective."""

    def sum(self, tensor: Tensor, name: str) -> Tensor:
        """Return the sum of `tensor` over all ranks, on every rank."""
        result = tensor.clone()
        self.all_reduce_(result, "sum", name)
        return result

    def barrier(self) -> None:
        """Return once every rank has called this."""
        self.all_reduce_(torch.zeros(1), "sum", "barrier")

    def all_gather_object(self, value: object, name: str) -> list[Any]:
        """Return the `value` of every rank, in rank order. It must be JSON-serializable; pickle is not used."""
        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        lengths = self.all_gather(torch.tensor([len(text)]), name + ".length")[:, 0].tolist()
        return [json.loads(bytes(theirs.tolist())) for theirs in self.all_gather_rows(text, lengths, name)]

    def all_gather_rows(self, rows: Tensor, lengths: Sequence[int], name: str) -> list[Tensor]:
        """Return the rows of each rank. lengths: number of rows of each rank, not all 0. The rest must be the same."""
        padded = rows.new_zeros(max(lengths), *rows.shape[1:])
        padded[: len(rows)] = rows
        everyone = self.all_gather(padded, name)
        return [theirs[:length] for theirs, length in zip(everyone, lengths, strict=True)]

    def broadcast_object(self, value: object, name: str) -> Any:
        """Return rank 0's `value` on every rank. It must be JSON-serializable; pickle is not used."""
        text = json.dumps(value).encode() if self.rank == 0 else b""
        length = torch.tensor([len(text)])
        self.broadcast_(length, name + ".length")
        content = torch.zeros(int(length), dtype=torch.uint8)
        if self.rank == 0:
            content = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.broadcast_(content, name)
        return json.loads(bytes(content.tolist()))

    @contextlib.contextmanager
    def raising_together(self, name: str) -> Iterator[None]:
        """Context manager for a block that may fail on some ranks only. A collective.

        If any rank raises an exception, every rank raises it, so that no rank waits forever for one that has failed.
        """
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            failure = error
        ours = next((kind for kind in (UserError, Failure) if isinstance(failure, kind)), None)
        message = None if failure is None else str(failure) if ours else repr(failure)
        mine = [message, ours and ours.__name__, socket.gethostname()]
        reports = self.all_gather_object(mine, f"agreement.{name}")
        failed = [(rank, *report) for rank, report in enumerate(reports) if report[0] is not None]
        if not failed:
            return
        if failure is not None and ours is None:
            raise failure
        rank, message, kind, host = failed[0]
        where = "" if len(failed) == self.size else f"rank {rank} on {host}: "
        if kind is not None:
            raise (UserError if kind == UserError.__name__ else Failure)(
                f"{where}{message}", everywhere=True
            ) from failure
        raise RuntimeError(f"{where}{message}")

    def broadcast_optimizer_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Copy rank 0's optimizer state and settings to every rank. If rank 0 has no state yet, neither has any rank."""
        local, sent = optimizer.state_dict(), list[Tensor]()

        def put(tensor: Tensor) -> int:
            sent.append(tensor)
            return len(sent) - 1

        settings = [
            {name: value for name, value in group.items() if name != "params"} for group in local["param_groups"]
        ]
        # The structure comes first, so that ranks without state (only rank 0 reads the checkpoint) can receive the rest.
        # On the CPU: `step` of optimizers that are not fused. On a GPU, each would be read back in every step.
        plan = to_json([local["state"], settings], put) if self.rank == 0 else None
        told, on_cpu = self.broadcast_object([plan, [tensor.device.type == "cpu" for tensor in sent]], "optimizer.plan")
        devices = [torch.device("cpu") if here else self.device for here in on_cpu]
        state, settings = self.broadcast_tensors(told, sent.__getitem__, "optimizer", devices.__getitem__)
        if self.rank != 0:
            groups = [mine | theirs for mine, theirs in zip(local["param_groups"], settings, strict=True)]
            optimizer.load_state_dict({"state": state, "param_groups": groups})
            lay_state_as_weights(optimizer)

    def broadcast_tensors(
        self, told: Any, find: Callable[[Any], Tensor], name: str,
        device_of: Callable[[Any], torch.device] = lambda place: torch.device("cpu"),
    ) -> Any:  # fmt: skip
        """Return on every rank the value that `portable.to_json` has made `told` of. A collective.

        find: on rank 0, returns the tensor at a place. device_of: returns where to receive it.
        """

        def get(held: Held) -> Tensor:
            place, dtype = held[TENSOR], getattr(torch, held["dtype"])
            tensor = torch.empty(held["shape"], dtype=dtype, device=device_of(place))
            if self.rank == 0:
                tensor.copy_(find(place))
            self.broadcast_(tensor, f"{name}.{place}")
            return tensor

        return from_json(told, get)

    def require_equal(self, what: str, value: object, remedy: str) -> None:
        """Raise UserError on every rank if `value` (JSON-serializable) differs between ranks. A collective."""
        values = self.all_gather_object(value, f"equal.{what}")
        for rank, other in enumerate(values):
            if other != values[0]:
                said = f"ranks disagree about {what}: rank 0 has {values[0]}, rank {rank} has {other}: {remedy}"
                raise UserError(said, everywhere=True)

    def average_buffers(self, model: nn.Module) -> None:
        """Replace batch norm's running statistics with their mean over ranks. One all-reduce."""
        self.average_(buffers.running_statistics([model]))

    def average_(self, tensors: Sequence[Tensor]) -> None:
        """Replace floating-point tensors with their mean over ranks. One all-reduce."""
        if self.size > 1 and tensors:
            buffers.unflatten(self.sum(buffers.flatten(tensors), "average_buffers") / self.size, tensors)

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
