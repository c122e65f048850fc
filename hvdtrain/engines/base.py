"""What every engine offers: `Engine`, the ranks of one run and the collectives over them.

An engine supplies the abstract methods; what can be built from them stands here once. Every rank calls every collective, in
the same order.
"""

import contextlib
import functools
import json
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from hvdtrain.engines.errors import UserError


def computes_in_bf16(device: torch.device, cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether `device` multiplies in bfloat16 by itself: NVIDIA from capability 8.0 on; AVX512-BF16, AMX, Arm's BF16."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    try:
        lines = [line for line in cpuinfo.read_text().splitlines() if line.startswith(("flags", "Features"))]
    except OSError:
        return False
    return bool({"avx512_bf16", "amx_bf16", "bf16"} & set(" ".join(lines).split()))


class Reduction(NamedTuple):
    """How gradients become those of the global batch."""

    compression: str = "none"  # "none" or "fp16", on the wire
    predivide: float = 1.0  # gradients are divided by it before they are summed, and multiplied back after
    reduction: str = "average"  # "average", "sum" or "adasum"
    accumulate: int = 1  # micro-batches per step, at most
    find_unused_parameters: bool = False  # a step may leave parameters without a gradient, others on each rank


class Setting(str):
    """A note on something that was only set for speed: said in full where asked for."""

    __slots__ = ()


Method = TypeVar("Method", bound=Callable[..., Any])


def collective(method: Method) -> Method:
    """Mark a method in which this rank waits for others: `Engine.waiting_in` is its argument `name`, or its own."""

    @functools.wraps(method)
    def marked(self: "Engine", *args: Any, **kwargs: Any) -> Any:
        outer = self.waiting_in
        name = kwargs.get("name", args[-1] if args else None)
        self.waiting_in = name if isinstance(name, str) else method.__name__
        try:
            return method(self, *args, **kwargs)
        finally:
            self.waiting_in = outer

    return marked  # type: ignore[return-value]


class Engine(ABC):
    """The ranks of one run. Use it as a context manager: leaving it shuts the engine down."""

    name: str  # as --engine has it
    description: str  # the engine and what carries its messages
    rank: int
    size: int
    local_rank: int  # among the ranks of this host
    local_size: int
    device: torch.device
    reductions: tuple[str, ...]  # what `all_reduce_` can do
    lacks: ClassVar[dict[str, tuple | None]] = {}  # by flag: the values this engine cannot honour; None: any at all
    tells_missing_gradients: ClassVar[bool] = False  # a gradient that a rank lacks becomes NaN on all
    waiting_in: str | None = None  # the collective in which the main thread is: for the watchdog
    notes: list[str]  # what was decided automatically, each with its reason: shown once at the start

    def __init__(self, *, tuning: bool, rank: int, size: int, launcher: str) -> None:
        """Join the other ranks. `rank`, `size`, `launcher`: what the launcher announced; the engine may know better."""
        self.notes = []
        self.tuning = tuning
        self.rank, self.size = rank, size

    NO_GPU = "--device cuda, but torch sees no GPU here: use --device cpu, or a GPU node (in a container: --nv)"

    @abstractmethod
    def choose_device(self, wanted: str) -> torch.device:
        """Return this rank's device for "auto", "cpu" or "cuda". Raises UserError where `wanted` cannot be had."""

    # An engine decorates its collectives with `collective`.

    @abstractmethod
    def all_reduce_(self, tensor: Tensor, op: str, name: str) -> None:
        """Replace `tensor` on every rank by its reduction over all ranks.

        op: one of `reductions`. Shapes and dtypes agree over ranks; `name` identifies the call.
        """

    @abstractmethod
    def all_gather(self, tensor: Tensor, name: str) -> Tensor:
        """Return [size, ...]: the `tensor` of each rank, which all have one shape and dtype."""

    @abstractmethod
    def broadcast_(self, tensor: Tensor, name: str) -> None:
        """Overwrite `tensor` on every rank with rank 0's."""

    def broadcast_model(self, model: nn.Module) -> None:
        """Give every rank the parameters and buffers of rank 0."""
        for name, tensor in model.state_dict().items():
            self.broadcast_(tensor, name)

    def broadcast(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Give every rank the parameters, buffers and optimizer state of rank 0, and change nothing on rank 0."""
        self.broadcast_model(model)
        self.broadcast_optimizer_state(optimizer)

    def distribute_model(self, model: nn.Module, how: Reduction) -> nn.Module:
        """Return the model to train with. It may be a wrapper around `model`, with the same parameters: evaluate, save and
        hash `model` itself."""
        return model

    def distribute_optimizer(
        self, optimizer: torch.optim.Optimizer, named: Sequence[tuple[str, nn.Parameter]], how: Reduction
    ) -> torch.optim.Optimizer:
        """Return the optimizer to step, with empty state. named: at least its parameters, each under a name of its own."""
        return optimizer

    def distribute(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, **how: Any
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Return a model and its optimizer, which together reduce gradients over all ranks. how: fields of `Reduction`."""
        reduction = Reduction(**how)
        replica = self.distribute_model(model, reduction)
        return replica, self.distribute_optimizer(optimizer, list(model.named_parameters()), reduction)

    @contextlib.contextmanager
    def micro_batch(
        self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer], number: int, count: int
    ) -> Iterator[None]:
        """Enclose forward and backward of micro-batch `number` (from 0) of the `count` whose gradients a step accumulates.

        models, optimizers: as `distribute_model` and `distribute_optimizer` returned them.
        """
        yield

    def gradients_ready(self) -> float:
        """Return when (`time.perf_counter`) this rank's own last gradient was computed; call it right after backward."""
        return time.perf_counter()

    def waits(self) -> bool:
        """Tell, from any thread, whether this rank has done its part of a backward pass and may be waiting inside it."""
        return False

    def synchronize(self, optimizer: torch.optim.Optimizer) -> None:  # noqa: B027 - some reduce inside backward
        """Wait until the gradients of `optimizer` are reduced. From then on they may be inspected and changed."""

    def stepping(self, optimizer: torch.optim.Optimizer) -> contextlib.AbstractContextManager[None]:
        """Enclose `optimizer.step()` after `synchronize`."""
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def synchronized(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Wait until the gradients are reduced; inside, they may be inspected or changed and the optimizer stepped."""
        self.synchronize(optimizer)
        with self.stepping(optimizer):
            yield

    @classmethod  # noqa: B027 - few engines have one
    def offer_timeline(cls) -> None:
        """Make `start_timeline` possible; call it before the engine is made."""

    def start_timeline(self, path: Path) -> bool:
        """Let the engine record what it does itself, of all ranks, into `path` on rank 0; tell whether it can."""
        return False

    def stop_timeline(self) -> None:  # noqa: B027
        """Close what `start_timeline` began; then the file on rank 0 is complete."""

    @abstractmethod
    def shutdown(self) -> None:
        """Leave the job in good order. Idempotent."""

    def choose_compression(self, asked: str) -> str:
        """Return "none" or "fp16": what was `asked`, or, for "auto", what the topology makes the faster."""
        if asked != "auto":
            return asked
        hosts = len(set(self.all_gather_object(socket.gethostname(), "compression")))
        if hosts > 1:
            self.notes.append(f"compression fp16: gradients travel between {hosts} hosts")
            return "fp16"
        self.notes.append("compression none: all ranks are on one host, where casting costs more than it saves")
        return "none"

    def choose_amp(self, asked: str) -> str:
        """Return "off", "fp16" or "bf16": what was `asked`, or, for "auto", bf16 where every rank's device has it."""
        if asked != "auto":
            return asked
        if all(self.all_gather_object(computes_in_bf16(self.device), "amp")):
            self.notes.append("amp bf16: every rank's device has instructions for it")
            return "bf16"
        self.notes.append(
            "amp off: not every rank's device has instructions for bf16, which would be slower than float32"
        )
        return "off"

    def gpu_of_local_rank(self, gpus: int) -> torch.device:
        """Return this rank's own GPU of the `gpus` that it sees, and make it torch's current one."""
        # One GPU visible to each of several local ranks: the scheduler dealt them out already.
        if 1 < gpus < self.local_size:
            raise UserError(f"{self.local_size} ranks on this host but {gpus} GPUs: start at most one rank per GPU")
        device = torch.device("cuda", self.local_rank if gpus > 1 else 0)
        torch.cuda.set_device(device)
        return device

    def sum(self, tensor: Tensor, name: str) -> Tensor:
        """Return the sum of `tensor` over all ranks, on every rank."""
        result = tensor.clone()
        self.all_reduce_(result, "sum", name)
        return result

    def barrier(self) -> None:
        """Return once every rank has come here."""
        self.all_reduce_(torch.zeros(1), "sum", "barrier")

    def all_gather_object(self, value: object, name: str) -> list:
        """Return every rank's `value`, in rank order; it must be expressible in JSON (nothing is ever unpickled)."""
        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        lengths = self.all_gather(torch.tensor([len(text)]), name + ".length")[:, 0].tolist()
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: len(text)] = text
        gathered = self.all_gather(padded, name)
        return [json.loads(bytes(row[:length].tolist())) for row, length in zip(gathered, lengths, strict=True)]

    def broadcast_object(self, value: object, name: str) -> Any:
        """Return rank 0's `value` on every rank; it must be expressible in JSON (nothing is ever unpickled)."""
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
        """Run a block that may fail on some ranks only: what one rank raises, every rank raises, and none waits for ever."""
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            failure = error
        message = None if failure is None else str(failure) if isinstance(failure, UserError) else repr(failure)
        user_error = isinstance(failure, UserError)
        reports = self.all_gather_object([message, user_error, socket.gethostname()], f"agreement.{name}")
        failed = [(rank, *report) for rank, report in enumerate(reports) if report[0] is not None]
        if not failed:
            return
        if failure is not None and not user_error:
            raise failure
        rank, message, user_error, host = failed[0]
        where = "" if len(failed) == self.size else f"rank {rank} on {host}: "
        if user_error:
            raise UserError(f"{where}{message}", everywhere=True) from failure
        raise RuntimeError(f"{where}{message}")

    def broadcast_optimizer_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Give every rank rank 0's optimizer state and settings; if rank 0 has none yet, no rank gets any.

        The structure travels first, as JSON, so that a rank with no state (it did not read the checkpoint) can receive it.
        """
        local = optimizer.state_dict()
        plan = {
            "state": {
                str(index): {
                    key: {"shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
                    if isinstance(value, Tensor)
                    else {"value": value}
                    for key, value in entries.items()
                }
                for index, entries in local["state"].items()
            },
            "groups": [{k: v for k, v in group.items() if k != "params"} for group in local["param_groups"]],
        }
        plan = self.broadcast_object(plan, "optimizer.plan")
        received: dict[int, dict[str, object]] = {}
        for index, entries in plan["state"].items():
            received[int(index)] = {}
            for key, what in entries.items():
                if "value" in what:
                    received[int(index)][key] = what["value"]
                    continue
                tensor = torch.empty(what["shape"], dtype=getattr(torch, what["dtype"]), device=self.device)
                if self.rank == 0:
                    tensor.copy_(local["state"][int(index)][key])
                self.broadcast_(tensor, f"optimizer.{index}.{key}")
                received[int(index)][key] = tensor
        if self.rank != 0:
            groups = [mine | theirs for mine, theirs in zip(local["param_groups"], plan["groups"], strict=True)]
            optimizer.load_state_dict({"state": received, "param_groups": groups})

    def require_equal(self, what: str, value: object, remedy: str) -> None:
        """Raise UserError on every rank where `value` (JSON) is not the same on all of them."""
        values = self.all_gather_object(value, f"equal.{what}")
        for rank, other in enumerate(values):
            if other != values[0]:
                said = f"ranks disagree about {what}: rank 0 has {values[0]}, rank {rank} has {other}: {remedy}"
                raise UserError(said, everywhere=True)

    def mean(self, value: Tensor | float, count: int, name: str) -> float:
        """Return the mean over all samples of all ranks, given this rank's mean `value` over its `count` samples."""
        total, samples = self.sum(torch.tensor([float(value) * count, count], dtype=torch.float64), name).tolist()
        return total / samples

    def average_buffers(self, model: nn.Module) -> None:
        """Replace the floating-point buffers (batch norm's running statistics) by their mean over ranks, in one call."""
        buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
        if self.size == 1 or not buffers:
            return
        flat = torch.cat([buffer.reshape(-1).float() for buffer in buffers])
        flat = self.sum(flat, "average_buffers") / self.size
        for buffer, mean in zip(buffers, flat.split([buffer.numel() for buffer in buffers]), strict=True):
            buffer.copy_(mean.view_as(buffer))

    def __enter__(self) -> "Engine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown()
