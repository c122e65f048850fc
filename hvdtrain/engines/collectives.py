"""The collectives over the ranks of a run: three that each engine has, and what is built of them.

Every rank must call every collective, in the same order.
"""

import contextlib
import json
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hvdtrain.engines.errors import Failure, UserError
from hvdtrain.engines.modules import all_tensors, flatten, running_statistics, unflatten
from hvdtrain.engines.portable import TENSOR, Held, flattened, from_json, to_json

Facts = dict[str, Any]  # JSON


def lay_state_as_weights(optimizer: torch.optim.Optimizer) -> None:
    """Give the state the memory format of the weights. State that was loaded or received is contiguous, and fused
    kernels take no two formats at once."""
    for parameter, values in optimizer.state.items():
        for name, value in values.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.stride() != parameter.stride():
                values[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


class Collectives(ABC):
    """The collectives of an engine."""

    rank: int
    size: int
    device: torch.device

    # ---- those of an engine, which decorates them with `activity.collective`

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
        for name, tensor in all_tensors(model):
            self.broadcast_(tensor, name)

    def broadcast(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Copy rank 0's parameters, buffers and optimizer state to every rank. Rank 0 is not changed."""
        self.broadcast_model(model)
        self.broadcast_optimizer_state(optimizer)

    # ---- built of them

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
        packed, on_cpu = self.broadcast_object(
            [plan, [tensor.device.type == "cpu" for tensor in sent]], "optimizer.plan"
        )
        devices = [torch.device("cpu") if here else self.device for here in on_cpu]
        state, settings = self.broadcast_tensors(packed, sent.__getitem__, "optimizer", devices.__getitem__)
        if self.rank != 0:
            groups = [mine | theirs for mine, theirs in zip(local["param_groups"], settings, strict=True)]
            optimizer.load_state_dict({"state": state, "param_groups": groups})
            lay_state_as_weights(optimizer)

    def broadcast_tensors(
        self, packed: Any, find: Callable[[Any], Tensor], name: str,
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

        return from_json(packed, get)

    def require_equal(self, what: str, value: object, remedy: str) -> None:
        """Raise UserError on every rank if `value` (JSON-serializable) differs between ranks. A collective."""
        values = self.all_gather_object(value, f"equal.{what}")
        for rank, other in enumerate(values):
            if other != values[0]:
                message = f"ranks disagree about {what}: rank 0 has {values[0]}, rank {rank} has {other}: {remedy}"
                raise UserError(message, everywhere=True)

    def average_buffers(self, model: nn.Module) -> None:
        """Replace batch norm's running statistics with their mean over ranks. One all-reduce."""
        self.average_(running_statistics([model]))

    def average_(self, tensors: Sequence[Tensor]) -> None:
        """Replace floating-point tensors with their mean over ranks. One all-reduce."""
        if self.size > 1 and tensors:
            unflatten(self.sum(flatten(tensors), "average_buffers") / self.size, tensors)

    # ---- nested values, whose tensors may differ between ranks

    def all_gather_nested(self, value: Any, name: str) -> tuple[list[Facts], Tensor]:
        """Return the nested values of all ranks, as JSON without their tensors, and the bytes of these, padded."""
        packed, row = flattened(value)
        return self.all_gather_flattened({"value": packed, "length": len(row)}, row, name)

    def all_gather_flattened(self, facts: Facts, row: Tensor, name: str) -> tuple[list[Facts], Tensor]:
        """Return the facts of all ranks, and their rows, padded. facts: with the row's "length"."""
        ranks: list[Facts] = self.all_gather_object(facts, name)
        row = F.pad(row, (0, max(one["length"] for one in ranks) - len(row)))
        return ranks, self.all_gather(row, f"{name}.rows") if len(row) else row.expand(self.size, 0)

    def broadcast_nested(self, saved: tuple[list[Facts], Tensor] | None, name: str) -> tuple[list[Facts], Tensor]:
        """Return on every rank what `all_gather_nested` returned. saved: on rank 0."""
        ranks, shape = self.broadcast_object(saved and [saved[0], list(saved[1].shape)], name)
        rows = torch.zeros(shape, dtype=torch.int64)
        if rows.numel():
            if saved is not None:
                rows.copy_(saved[1])
            self.broadcast_(rows, f"{name}.rows")
        return ranks, rows
