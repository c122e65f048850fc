"""The content of a checkpoint: tensors and JSON, made of models, optimizers and other objects. loading.py is the reverse.

model.NAME, or models.K.NAME        parameters and buffers of the single model, or of model K of several
objects                             optimizers and registered objects: JSON as uint8, with places for their tensors
optimizer.N, or optimizers.K.N      tensor N of the optimizer's state_dict
registered.NAME.N                   tensor N of the object registered under NAME (`Run.register`)
own, own.bytes                      what each rank has of its own: see own.py
"""

import contextlib
import functools
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hvdtrain.checkpoint.checkpoint import Facts
from hvdtrain.engines.accelerators import module_of
from hvdtrain.engines.errors import UserError
from hvdtrain.engines.modules import is_extra, named_parameters, own_name
from hvdtrain.engines.portable import NotStored, require_no_meta, to_json

OBJECTS = "objects"
IMPLEMENTATION = ("fused", "foreach", "capturable")  # settings of torch's optimizers
REGISTER = "register the same objects as when it was written, or --resume never"


class States(NamedTuple):
    """What the objects of a run have returned as their state, before it was encoded."""

    optimizers: list[Any]
    registered: dict[str, Any]  # by name, without modules


def snapshot(tensors: Mapping[str, Tensor], heartbeat: Callable[[], None] = lambda: None) -> dict[str, Tensor]:
    """Return contiguous copies of `tensors` on the CPU. heartbeat: called after each.

    Those of an accelerator are copied to pinned memory one after the other, and the host waits once.
    """
    copies = {}
    away = None
    for name, tensor in tensors.items():
        if tensor.device.type == "cpu":
            copies[name] = tensor.detach().to("cpu", copy=True).contiguous()
        else:
            away = tensor.device
            copies[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            copies[name].copy_(tensor.detach(), non_blocking=True)
        heartbeat()
    if away is not None:
        module_of(away).current_stream(away).synchronize()
    return copies


def prefixes(kind: str, count: int) -> list[str]:
    """Return the name prefix of each of `count` objects. A single object has no number."""
    return [f"{kind}."] if count == 1 else [f"{kind}s.{number}." for number in range(count)]


def collect(
    models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer], registered: Mapping[str, Any],
    heartbeat: Callable[[], None] = lambda: None,
) -> tuple[Facts, dict[str, Tensor], States]:  # fmt: skip
    """Return all state: the facts (JSON), the tensors by name, which are not copied (see `snapshot`), and what was encoded.

    heartbeat: called for each registered object.
    """
    tensors: dict[str, Tensor] = {}
    for model, prefix in zip(models, prefixes("model", len(models)), strict=True):
        tensors |= {f"{prefix}{name}": tensor for name, tensor in tensors_of(model).items()}
    states, packed_optimizers = States([], {}), []
    for optimizer, prefix in zip(optimizers, prefixes("optimizer", len(optimizers)), strict=True):
        states.optimizers.append(state := optimizer.state_dict())
        packed_optimizers.append(pack(state, prefix, tensors, *about_optimizer(optimizer)))
    packed = {}
    for name, what in registered.items():
        prefix, about = f"registered.{name}.", about_registered(name)
        if isinstance(what, nn.Module):  # whose own memory takes the values
            packed[name] = {key: pack(one, f"{prefix}{key}.", tensors, *about) for key, one in tensors_of(what).items()}
        else:
            states.registered[name] = state = what.state_dict()
            packed[name] = pack(state, prefix, tensors, *about)
        heartbeat()
    require_storable(tensors)
    tensors[OBJECTS] = encoded({"optimizers": packed_optimizers, "registered": packed})
    return (
        {
            "optimizer_types": types_of(optimizers),
            "parameters": [names_of(optimizer, models) for optimizer in optimizers],
            "registered_types": {name: type_of(what) for name, what in registered.items()},
        },
        tensors,
        states,
    )


def require_storable(tensors: Mapping[str, Tensor]) -> None:
    """Raise UserError for a tensor that a checkpoint cannot store."""
    for name, tensor in tensors.items():
        if tensor.layout is not torch.strided:
            remedy = "register the buffer with persistent=False"
            raise UserError(f"{name} is a sparse tensor, which a checkpoint cannot store: {remedy}")
        if not is_stored(tensor.dtype):
            remedy = "use complex64" if tensor.is_complex() else "register the buffer with persistent=False"
            kind = str(tensor.dtype).removeprefix("torch.")
            raise UserError(f"{name} is {kind}, which a checkpoint cannot store: {remedy}")


@functools.cache
def is_stored(dtype: torch.dtype) -> bool:
    """Return whether a file of safetensors holds such tensors. It raises errors of many kinds for others."""
    import safetensors.torch

    try:
        return safetensors.torch.load(safetensors.torch.save({"it": torch.empty(1, dtype=dtype)}))["it"].dtype is dtype
    except Exception:
        return False


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers in a module's state_dict by its own names. For the rest, see `own.extra_state`."""
    return {own_name(name): value for name, value in module.state_dict().items() if not is_extra(name, value)}


def names_of(optimizer: torch.optim.Optimizer, models: Sequence[nn.Module]) -> list[list[str]]:
    """Return the names of the parameters in each of the optimizer's groups, in the order in which it counts them."""
    names = {parameter: name for name, parameter in named_parameters(models)}
    return [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]


def require_type(name: str, what: object, kind: str) -> None:
    """Raise UserError on every rank if an object registered under `name` is of another class than the saved one, `kind`."""
    if (here := type_of(what)) != kind:
        raise UserError(f"run.register({name}=...): {kind} in the checkpoint, {here} now: {REGISTER}", everywhere=True)


def type_of(what: object) -> str:
    """Return the name of an object's class; of a compiled module, that of the module inside."""
    return type(getattr(what, "_orig_mod", what)).__name__


def types_of(optimizers: Sequence[torch.optim.Optimizer]) -> list[str]:
    """Return the name of each optimizer's class. Horovod's wrapper has that of the optimizer in it."""
    return [type(optimizer).__name__ for optimizer in optimizers]


def about_optimizer(optimizer: torch.optim.Optimizer) -> tuple[str, str]:
    """Return what to call its state in a message, and the remedy if it cannot be saved."""
    return f"the state of {type(optimizer).__name__}", "keep to numbers, text, tensors and collections of these"


def about_registered(name: str) -> tuple[str, str]:
    """Return what to call the state of a registered object in a message, and the remedy if it cannot be saved."""
    remedy = "leave it out, or let its state_dict have only numbers, text, tensors and collections of these"
    return f"run.register({name}=...): its state_dict", remedy


@contextlib.contextmanager
def storable(what: str, remedy: str) -> Iterator[None]:
    """Raise UserError for an object that `portable.to_json` refuses. what: its name, and the remedy."""
    try:
        yield
    except NotStored as error:
        raise UserError(f"{what} holds a {error}, which a checkpoint cannot store: {remedy}") from error


def pack(value: Any, prefix: str, tensors: dict[str, Tensor], what: str, remedy: str) -> Any:
    """Return `value` as JSON, and add its tensors to `tensors`, as PREFIX and a number. Raises UserError: `storable`."""
    numbers = itertools.count()

    def put(tensor: Tensor) -> str:
        require_no_meta(tensor)
        tensors[name := f"{prefix}{next(numbers)}"] = tensor
        return name

    with storable(what, remedy):
        return to_json(value, put)


def encoded(value: Any) -> Tensor:
    """Return JSON as a tensor, for what is too long for a file's header, such as the state of a data set."""
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def decoded(tensor: Tensor) -> Any:
    """Return what was given to `encoded`."""
    return json.loads(bytes(tensor.numpy()))
