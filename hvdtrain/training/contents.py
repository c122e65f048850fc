"""Conversion between the state of models, optimizers and other objects and the content of a checkpoint: tensors and JSON.

model.NAME, or models.K.NAME        parameters and buffers of the single model, or of model K of several
optimizer.N, or optimizers.K.N      tensor N of the optimizer's state_dict
registered.NAME.N                   tensor N of the object registered under NAME (`Run.register`)
buffers, statistics.NAME            [ranks, n]: each rank's own buffers, of the models and of the registered module NAME
positions                           each rank's position in its stream, JSON as uint8
outer.momentum                      with --sync-every: see local_steps.py, and own_states.py for own and own.rows
"""

import contextlib
import functools
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from hvdtrain.engines.accelerators import module_of
from hvdtrain.engines.base import Engine, lay_state_as_weights
from hvdtrain.engines.errors import UserError
from hvdtrain.engines.portable import TENSOR, from_json, to_json
from hvdtrain.models.weights import is_extra, require_match
from hvdtrain.training.checkpoint import Facts
from hvdtrain.training.names import named_parameters, own_name

IMPLEMENTATION = ("fused", "foreach", "capturable")  # settings of torch's optimizers
REGISTER = "register the same objects as when it was written, or --resume never"


def plain(value: object) -> object:
    """Return `value` as it would be read back from JSON: tuples and tensors become lists or numbers, other
    objects such as paths become strings."""
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, Tensor):
        return value.tolist()
    return value if isinstance(value, (bool, int, float, str, type(None))) else str(value)


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
) -> tuple[Facts, dict[str, Tensor]]:  # fmt: skip
    """Return all state: the facts (JSON), and the tensors by name. They are not copied: see `snapshot`.

    heartbeat: called for each registered object.
    """
    tensors: dict[str, Tensor] = {}
    for model, prefix in zip(models, prefixes("model", len(models)), strict=True):
        tensors |= {f"{prefix}{name}": tensor for name, tensor in tensors_of(model).items()}
    states = []
    for optimizer, prefix in zip(optimizers, prefixes("optimizer", len(optimizers)), strict=True):
        with storable(f"the state of {type(optimizer).__name__}", "use another optimizer"):
            states.append(pack(optimizer.state_dict(), prefix, tensors))
    packed = {}
    for name, what in registered.items():
        whole = tensors_of(what) if isinstance(what, nn.Module) else what.state_dict()
        how = "leave it out, or register an object whose state_dict has only numbers, strings and tensors"
        with storable(f"run.register({name}=...): its state_dict", how):
            packed[name] = pack(whole, f"registered.{name}.", tensors)
        heartbeat()
    require_storable(tensors)
    return {
        "optimizers": states,
        "optimizer_types": types_of(optimizers),
        "parameters": [names_of(optimizer, models) for optimizer in optimizers],
        "registered": packed,
        "registered_types": {name: type_of(what) for name, what in registered.items()},
    }, tensors


def require_storable(tensors: Mapping[str, Tensor]) -> None:
    """Raise UserError for a tensor that a checkpoint cannot store."""
    for name, tensor in tensors.items():
        if tensor.layout is not torch.strided:
            how = "register the buffer with persistent=False"
            raise UserError(f"{name} is a sparse tensor, which a checkpoint cannot store: {how}")
        if not is_stored(tensor.dtype):
            how = "use complex64" if tensor.is_complex() else "register the buffer with persistent=False"
            kind = str(tensor.dtype).removeprefix("torch.")
            raise UserError(f"{name} is {kind}, which a checkpoint cannot store: {how}")


@functools.cache
def is_stored(dtype: torch.dtype) -> bool:
    """Return whether a file of safetensors holds such tensors. It raises errors of many kinds for others."""
    import safetensors.torch

    try:
        return safetensors.torch.load(safetensors.torch.save({"it": torch.empty(1, dtype=dtype)}))["it"].dtype is dtype
    except Exception:
        return False


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers in a module's state_dict by its own names. For the rest, see extra_states.py."""
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


@contextlib.contextmanager
def storable(what: str, how: str) -> Iterator[None]:
    """Raise UserError for an object that `portable.to_json` refuses. what: its name, and how: the remedy."""
    try:
        yield
    except TypeError as error:
        raise UserError(f"{what} holds a {error}, which a checkpoint cannot store: {how}") from error


def pack(value: Any, prefix: str, tensors: dict[str, Tensor]) -> Any:
    """Return `value` as JSON, and add its tensors to `tensors`, as PREFIX and a number. Raises TypeError: `storable`."""
    numbers = itertools.count()

    def put(tensor: Tensor) -> str:
        tensors[name := f"{prefix}{next(numbers)}"] = tensor
        return name

    return to_json(value, put)


def unpack(packed: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the value that was given to `pack`."""
    return from_json(packed, lambda held: tensors[held[TENSOR]])


def unpack_everywhere(engine: Engine, packed: Any, tensors: Mapping[str, Tensor], name: str) -> Any:
    """Return the value that was given to `pack`, on every rank. Only rank 0 needs `tensors`. A collective."""
    return engine.broadcast_tensors(packed, lambda place: tensors[place], name)


def encoded(value: Any) -> Tensor:
    """Return JSON as a tensor, for what is too long for a file's header, such as the state of a data set."""
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def decoded(tensor: Tensor) -> Any:
    """Return what was given to `encoded`."""
    return json.loads(bytes(tensor.numpy()))


def load(
    found: tuple[Facts, Mapping[str, Tensor]],
    models: Sequence[nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    scaler: torch.amp.GradScaler,
) -> None:
    """Load a checkpoint into models, optimizers and scaler. Raises UserError if it does not match.

    found: facts and tensors, as returned by `checkpoint.read`.
    """
    facts, tensors = found
    several = any(name.startswith("models.") for name in tensors)
    for model, prefix in zip(models, prefixes("model", len(models)), strict=True):
        if several != prefix.startswith("models."):
            raise UserError("the checkpoint does not match: it has a different number of models: check the script")
        load_model(model, {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)})
    if (there := facts["optimizer_types"]) != (here := types_of(optimizers)):
        said = f"{', '.join(there)} in the checkpoint, {', '.join(here)} now"
        raise UserError(f"the checkpoint does not match the optimizer ({said}): check --optimizer")
    load_optimizers(
        optimizers, models, [unpack(packed, tensors) for packed in facts["optimizers"]], facts["parameters"]
    )
    with explained():
        scaler.load_state_dict(facts["scaler"] or scaler.state_dict())


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Turn what torch raises for an optimizer's or scaler's state into a UserError."""
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        first = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(f"the checkpoint does not match the optimizer ({first}): check --optimizer") from error


def load_model(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load a state_dict into `model`. Raises UserError if names, shapes or types do not match."""
    state = {own_name(name): tensor for name, tensor in state.items()}
    try:
        require_match(state, tensors_of(model), types=True)
    except ValueError as error:
        raise UserError(f"the checkpoint does not match the model: {error}: check --model") from error
    load_by_own_names(model, state)


def load_registered(name: str, what: Any, state: Any) -> None:
    """Load an object that was registered under `name`. Raises UserError on every rank if it does not match: of a module,
    names, shapes and types."""
    try:
        if isinstance(what, nn.Module):
            require_match(state, tensors_of(what), types=True)
            load_by_own_names(what, state)
        else:
            if isinstance(what, lr_scheduler.LRScheduler):  # it takes anything, and computes with it in the next step
                for key, mine in what.state_dict().items():
                    require_number(key, mine, state.get(key, mine))
            what.load_state_dict(state)
    except Exception as error:  # any: the class may be the author's own
        last = (str(error) or type(error).__name__).splitlines()[-1].strip()
        raise UserError(f"the checkpoint does not match {name!r} ({last}): {REGISTER}", everywhere=True) from error


def load_by_own_names(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Call `model.load_state_dict` with the names that it has if parts of it are compiled."""
    own = {own_name(name): value for name, value in state.items()}
    here = {name: own[own_name(name)] for name in model.state_dict() if own_name(name) in own}
    model.load_state_dict(here, strict=False)  # without what `is_extra`


def load_optimizers(
    optimizers: Sequence[torch.optim.Optimizer], models: Sequence[nn.Module], states: Sequence[Facts],
    names: Sequence[Sequence[Sequence[str]]],
) -> None:  # fmt: skip
    """Load a state_dict into each optimizer. Raises UserError if they do not match.

    names: of the parameters of each group of each optimizer, when they were saved. The order may be another one now.
    """
    with explained():
        for optimizer, held, there in zip(optimizers, states, names, strict=True):
            here, groups = names_of(optimizer, models), []
            for mine, theirs in zip(optimizer.state_dict()["param_groups"], held["param_groups"], strict=True):
                # How to compute is this run's choice: the checkpoint may come from another kind of device.
                own = {name: mine[name] for name in (*IMPLEMENTATION, "params", "param_names") if name in mine}
                groups.append(mine | {name: like(name, mine.get(name), value) for name, value in theirs.items()} | own)
            for number, (one, other) in enumerate(zip(here, there, strict=True)):
                if unlike := sorted({*one} ^ {*other}):
                    where = "now" if unlike[0] in one else "in the checkpoint"
                    raise ValueError(f"parameter group {number} has {unlike[0]} only {where}")
            place = {name: number for number, name in enumerate(chain.from_iterable(here))}
            moved = {number: place[name] for number, name in enumerate(chain.from_iterable(there))}
            state = {moved.get(key, key): value for key, value in held["state"].items()}
            optimizer.load_state_dict({"state": state, "param_groups": groups})
            lay_state_as_weights(optimizer)


def require_number(name: str, mine: Any, theirs: Any) -> None:
    """Raise ValueError if `mine` is a number, or a list of numbers, and `theirs` is not."""
    if isinstance(mine, list):
        for one, other in zip(mine, theirs if isinstance(theirs, list) else [theirs], strict=False):
            require_number(name, one, other)
    elif isinstance(mine, (int, float)) and not isinstance(theirs, (int, float, Tensor)):
        raise ValueError(f"{name} is {theirs}")


def like(name: str, mine: Any, theirs: Any) -> Any:
    """Return the setting `theirs` of a parameter group as a tensor or as a number, as this run has it: a learning rate.

    Raises ValueError if only one of them has several values.
    """
    if mine is not None and isinstance(mine, (list, tuple)) != isinstance(theirs, (list, tuple)):
        raise ValueError(f"{name} is {theirs}")
    require_number(name, mine, theirs)
    if isinstance(mine, Tensor):
        return torch.as_tensor(theirs, dtype=mine.dtype, device=mine.device)
    return plain(theirs) if isinstance(theirs, Tensor) else theirs
