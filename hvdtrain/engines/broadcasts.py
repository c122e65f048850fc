"""What rank 0 has, given to all ranks: models, the state of optimizers, nested values."""

import json
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from hvdtrain.engines.collectives import Collectives
from hvdtrain.engines.errors import UserError
from hvdtrain.engines.modules import all_tensors
from hvdtrain.engines.portable import TENSOR, Held, NotStored, from_json, to_json


def lay_state_as_weights(optimizer: torch.optim.Optimizer) -> None:
    """Give the state the memory format of the weights. State that was loaded or received is contiguous, and fused
    kernels take no two formats at once."""
    for parameter, values in optimizer.state.items():
        for name, value in values.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.stride() != parameter.stride():
                values[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def load_exactly(optimizer: torch.optim.Optimizer, held: dict[str, Any]) -> None:
    """Load a state_dict as it was. Trap: torch converts all state to the type of the weight, and makes other text of text.

    The next step would compute with other bits, or fail, where the state is float16, an integer or bool.
    """
    state = {number: _without_text(values) for number, values in held["state"].items()}
    optimizer.load_state_dict(held | {"state": state})
    for number, values in optimizer.state_dict()["state"].items():
        if number in held["state"]:
            _as_held(held["state"][number], values)
    lay_state_as_weights(optimizer)


def _without_text(value: Any) -> Any:
    """Return nested values without what torch would make anew of its parts, wrongly: text, arrays, namedtuples."""
    if type(value) is dict:
        return {key: _without_text(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_without_text, value))
    return None if isinstance(value, Iterable) and not isinstance(value, Tensor) else value


def _as_held(held: Any, loaded: Any) -> Any:
    """Return `held` with the tensors of `loaded` that were not converted. Dictionaries and lists are changed in place."""
    if isinstance(held, Tensor) and isinstance(loaded, Tensor):
        return loaded if loaded.dtype == held.dtype else held.to(loaded.device)
    if isinstance(held, dict) and isinstance(loaded, dict):
        loaded.update({key: _as_held(value, loaded[key]) for key, value in held.items() if key in loaded})
    elif type(held) is list and type(loaded) is list:
        loaded[:] = map(_as_held, held, loaded)
    elif type(held) is tuple and type(loaded) is tuple:
        return tuple(map(_as_held, held, loaded))
    elif loaded is None:  # left out by `_without_text`
        return held
    return loaded


class Broadcasts(Collectives):
    """The collectives that are built of `broadcast_`."""

    def broadcast_model(self, model: nn.Module) -> None:
        """Copy rank 0's parameters and buffers to every rank, also those that a state_dict leaves out."""
        for name, tensor in all_tensors(model):
            self.broadcast_(tensor, name)

    def broadcast(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Copy rank 0's parameters, buffers and optimizer state to every rank. Rank 0 is not changed."""
        self.broadcast_model(model)
        self.broadcast_optimizer_state(optimizer)

    def broadcast_optimizer_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Copy rank 0's optimizer state and settings to every rank. If rank 0 has no state yet, neither has any rank."""
        try:
            local, sent = optimizer.state_dict(), list[Tensor]()
        except RuntimeError as error:  # of torch's ZeroRedundancyOptimizer
            message = f"the state of {type(optimizer).__name__} cannot be read ({error})"
            raise UserError(f"{message}: use one that keeps all of its state on every rank", everywhere=True) from error

        def put(tensor: Tensor) -> int:
            sent.append(tensor)
            return len(sent) - 1

        settings = [
            {name: value for name, value in group.items() if name != "params"} for group in local["param_groups"]
        ]
        # The structure comes first, so that ranks without state (only rank 0 reads the checkpoint) can receive the rest.
        # On the CPU: `step` of optimizers that are not fused. On a GPU, each would be read back in every step.
        try:
            plan = to_json([local["state"], settings], put) if self.rank == 0 else None
        except NotStored as error:
            remedy = "keep to numbers, text, tensors and collections of these"
            message = f"the settings of {type(optimizer).__name__} hold a {error}, which ranks cannot exchange"
            raise UserError(f"{message}: {remedy}") from error
        packed, on_cpu = self.broadcast_object(
            [plan, [tensor.device.type == "cpu" for tensor in sent]], "optimizer.plan"
        )
        devices = [torch.device("cpu") if here else self.device for here in on_cpu]
        state, settings = self.broadcast_tensors(packed, sent.__getitem__, "optimizer", devices.__getitem__)
        if self.rank != 0:
            groups = [mine | theirs for mine, theirs in zip(local["param_groups"], settings, strict=True)]
            load_exactly(optimizer, {"state": state, "param_groups": groups})

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

    # ---- values

    def broadcast_object(self, value: object, name: str) -> Any:
        """Return rank 0's `value` on every rank. It must be JSON-serializable; pickle is not used."""
        text = json.dumps(value).encode() if self.rank == 0 else b""
        length = torch.tensor([len(text)])
        self.broadcast_(length, name + ".length")
        content = torch.zeros(int(length), dtype=torch.uint8)
        if self.rank == 0:
            content = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.broadcast_(content, name)
        return json.loads(content.numpy().tobytes())

    def broadcast_packed(self, value: Any, row: Tensor, name: str) -> tuple[Any, Tensor]:
        """Return rank 0's JSON value and its row, int64 [n], on every rank: see `all_gather_packed`."""
        value, length = self.broadcast_object([value, len(row)], name)
        row = row if self.rank == 0 else torch.zeros(length, dtype=torch.int64)
        if length:
            self.broadcast_(row, f"{name}.bytes")
        return value, row
