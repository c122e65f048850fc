"""The two simplest kinds of data: a number of samples, which the script loads by index, and tensors."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from hvdtrain.engines.accelerators import Copies
from hvdtrain.engines.base import Engine
from hvdtrain.engines.errors import UserError
from hvdtrain.inputs.inputs import Batch, Input, InputKind
from hvdtrain.inputs.sameness import compared_of, compared_samples, require_same
from hvdtrain.inputs.sharding import PlannedBatch


class Indices(Input):
    """A number of samples; the script loads them itself by index."""

    may_wait = False

    def __init__(self, samples: int):
        self.samples = self.per_epoch = samples

    def load(self, planned: PlannedBatch) -> Batch:
        return Batch(None, planned.indices, planned.local_count, planned.weight, planned.first)


class Tensors(Input):
    """Tensors of equal length, each [n, ...]. Batches are gathered on the tensors' device; use `Run.to_device` before."""

    may_wait = False

    def __init__(self, engine: Engine, tensors: Sequence[Tensor]):
        device = engine.device
        self.tensors, self._engine, self._compared = tensors, engine, False
        self._copies = None if device.type == "cpu" else Copies(device)
        self.samples = self.per_epoch = len(tensors[0])
        if all(tensor.device == tensors[0].device for tensor in tensors):
            self.indices_on = tensors[0].device

    def require_unchanged(self, epoch: int) -> None:
        if not self._compared and self._engine.size > 1:
            numbers = compared_samples(
                self.order(0, epoch)
            )  # any: a plan has the data set that determines the epochs alone
            compared = compared_of(numbers, lambda number: [tensor[number] for tensor in self.tensors])
            require_same(self._engine, numbers, compared)
        self._compared = True

    def load(self, planned: PlannedBatch) -> Batch:
        data = []
        for tensor in self.tensors:
            # Several times faster than tensor[indices], which copies value by value.
            data.append(tensor.index_select(0, planned.indices.to(tensor.device)))
        moved = tuple(data) if self._copies is None else self._copies.to_device(tuple(data))
        return Batch(moved, planned.indices, planned.local_count, planned.weight, planned.first)


def are_tensors(data: Any) -> bool:
    """Return whether `data` is a tensor, or a tuple of tensors, with rows."""
    parts = data if isinstance(data, tuple) else (data,)
    return bool(parts) and all(isinstance(part, Tensor) and part.ndim > 0 for part in parts)


def open_tensors(engine: Engine, data: Any, *_: object) -> Tensors:
    """Return the input for a tensor, or for a tuple of tensors. Raises UserError."""
    tensors = data if isinstance(data, tuple) else (data,)
    if len({len(part) for part in tensors}) > 1:
        lengths = ", ".join(str(len(part)) for part in tensors)
        raise UserError(f"run.steps got tensors of {lengths} samples: give equal lengths")
    for tensor in tensors:
        if tensor.device.type not in ("cpu", engine.device.type):
            remedy = "use run.to_device(...)"
            raise UserError(f"run.steps got a tensor on {tensor.device}, and ranks are on {engine.device}: {remedy}")
    return Tensors(engine, tensors)


NUMBER = InputKind(
    lambda data: isinstance(data, int) and not isinstance(data, bool), lambda engine, count, *_: Indices(count)
)
TENSORS = InputKind(are_tensors, open_tensors)
