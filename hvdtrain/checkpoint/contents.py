"""The content of a checkpoint: tensors and JSON, made of models, optimizers and other objects, and loaded into them.

model.NAME, or models.K.NAME        parameters and buffers of the single model, or of model K of several
objects                             optimizers and registered objects: JSON as uint8, with places for their tensors
optimizer.N, or optimizers.K.N      tensor N of the optimizer's state_dict
registered.NAME.N                   tensor N of the object registered under NAME (`Run.register`)
own, own.bytes                      what each rank has of its own: see own.py
"""

import contextlib
import copy
import functools
import gc
import itertools
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from hvdtrain.checkpoint.checkpoint import Facts
from hvdtrain.engines import portable
from hvdtrain.engines.accelerators import module_of
from hvdtrain.engines.collectives import load_exactly, require_as_of_torch
from hvdtrain.engines.errors import UserError
from hvdtrain.engines.modules import is_extra, named_parameters, uncompiled_name
from hvdtrain.engines.portable import TENSOR, NotStored, difference_of_values, from_json, require_no_meta, to_json
from hvdtrain.models.weights import require_match

OBJECTS = "objects"
IMPLEMENTATION = ("fused", "foreach", "capturable")  # settings of torch's optimizers
REGISTER = "register the same objects as when it was written, or --resume never"


class ObjectStates(NamedTuple):
    """What the objects of a run have returned as their state, before it was encoded."""

    optimizers: list[Any]
    registered: dict[str, Any]  # by name, without modules


@contextlib.contextmanager
def no_garbage() -> Iterator[None]:
    """Context manager in which Python does not look for garbage: of ten thousand small objects without a cycle, each of some
    looks goes through all objects of the process."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@no_garbage()
@torch.no_grad()
def snapshot(tensors: Mapping[str, Tensor], heartbeat: Callable[[], None] = lambda: None) -> dict[str, Tensor]:
    """Return contiguous copies of `tensors` on the CPU, those of an accelerator pinned. heartbeat: called after each."""
    copies = {}
    away = None
    for name, tensor in tensors.items():
        if tensor.device.type == "cpu":
            copies[name] = tensor.clone(memory_format=torch.contiguous_format)
        else:
            away = tensor.device
            copies[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            # All copies are queued, and the host waits for them once:
            # from memory that is not pinned, it would wait for each.
            copies[name].copy_(tensor.detach(), non_blocking=True)
        heartbeat()
    if away is not None:
        module_of(away).current_stream(away).synchronize()
    return copies


def prefixes_of_kind(kind: str, count: int) -> list[str]:
    """Return the name prefix of each of `count` objects. A single object has no number."""
    return [f"{kind}."] if count == 1 else [f"{kind}s.{number}." for number in range(count)]


@no_garbage()
def collect(
    models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer], registered: Mapping[str, Any],
    heartbeat: Callable[[], None] = lambda: None,
) -> tuple[Facts, dict[str, Tensor], ObjectStates]:  # fmt: skip
    """Return all state: the facts (JSON), the tensors by name, which are not copied (see `snapshot`), and what was encoded.

    heartbeat: called for each registered object.
    """
    tensors: dict[str, Tensor] = {}
    for model, prefix in zip(models, prefixes_of_kind("model", len(models)), strict=True):
        tensors |= {f"{prefix}{name}": tensor for name, tensor in tensors_of(model).items()}
    states, packed_optimizers = ObjectStates([], {}), []
    for optimizer, prefix in zip(optimizers, prefixes_of_kind("optimizer", len(optimizers)), strict=True):
        states.optimizers.append(state := optimizer.state_dict())
        require_as_of_torch(optimizer, state)
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
    # As a tensor: the header of a file is read as a whole, and may not be as long.
    tensors[OBJECTS] = json_tensor({"optimizers": packed_optimizers, "registered": packed})
    return (
        {
            "optimizer_types": types_of(optimizers),
            "parameters": [names_of(optimizer, models) for optimizer in optimizers],
            "registered_types": {name: type_of(what) for name, what in registered.items()},
        },
        tensors,
        states,
    )


def require_packable(optimizers: Sequence[torch.optim.Optimizer], registered: Mapping[str, Any]) -> None:
    """Raise UserError, before training, for a state that no checkpoint could hold, such as that of a scheduler in another
    one. Of a module, see `require_storable`."""
    objects: list[tuple[Any, tuple[str, str]]] = [(one, about_optimizer(one)) for one in optimizers]
    objects += [(one, about_registered(name)) for name, one in registered.items() if not isinstance(one, nn.Module)]
    for what, about in objects:
        try:
            state = what.state_dict()
        except Exception:  # any of its author's: it may have none before training
            continue
        if isinstance(what, torch.optim.Optimizer):
            require_as_of_torch(what, state)
            if loads_as_torch(what) and isinstance(getattr(type(what), "param_groups", None), property):
                remedy = "make it an attribute, self.param_groups = inner.param_groups"
                raise UserError(
                    f"param_groups of {type(what).__name__} is a property, which no state is loaded into: {remedy}"
                )
        pack(state, "", {}, *about)


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
    """Return whether a file of safetensors holds such tensors."""
    import safetensors.torch

    try:
        # Tried, because safetensors tells by errors of many kinds which types it does not hold.
        return safetensors.torch.load(safetensors.torch.save({"it": torch.empty(1, dtype=dtype)}))["it"].dtype is dtype
    except Exception:
        return False


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers in a module's state_dict by its own names. For the rest, see `own.extra_state`."""
    return {uncompiled_name(name): value for name, value in module.state_dict().items() if not is_extra(name, value)}


def names_of(optimizer: torch.optim.Optimizer, models: Sequence[nn.Module]) -> list[list[str]]:
    """Return the names of the parameters in each of the optimizer's groups, in the order in which it counts them."""
    names = {parameter: name for name, parameter in named_parameters(models)}
    return [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]


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
        if tensor.is_meta:
            require_no_meta(tensor)
        tensors[name := f"{prefix}{next(numbers)}"] = tensor
        return name

    with storable(what, remedy):
        return to_json(value, put)


def json_tensor(value: Any) -> Tensor:
    """Return JSON as a tensor, uint8 [n]."""
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def decoded(tensor: Tensor) -> Any:
    """Return what was given to `json_tensor`."""
    return json.loads(bytes(tensor.numpy()))


# ---- loading: each raises UserError for what does not match


def unpack_value(packed: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the value that was given to `pack`."""
    return from_json(packed, lambda held: tensors[held[TENSOR]])


def registered_state(tensors: Mapping[str, Tensor], name: str) -> Any:
    """Return the state of an object that was registered under `name`; None: there was none."""
    packed = decoded(tensors[OBJECTS])["registered"].get(name) if OBJECTS in tensors else None
    return None if packed is None else unpack_value(packed, tensors)


def load_content(
    content: tuple[Facts, Mapping[str, Tensor]],
    models: Sequence[nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
) -> None:
    """Load a checkpoint into models and optimizers. Raises UserError if it does not match.

    content: facts and tensors, as returned by `reading.read`.
    """
    facts, tensors = content
    load_models(tensors, models)
    if (there := facts["optimizer_types"]) != (here := types_of(optimizers)):
        message = f"{', '.join(there)} in the checkpoint, {', '.join(here)} now"
        raise UserError(f"the checkpoint does not match the optimizer ({message}): make the optimizer as the run did")
    states = [unpack_value(packed, tensors) for packed in decoded(tensors[OBJECTS])["optimizers"]]
    load_optimizers(optimizers, models, states, facts["parameters"])


def require_as_saved(
    states: ObjectStates, facts: Facts, tensors: Mapping[str, Tensor], models: Sequence[nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
) -> None:  # fmt: skip
    """Raise UserError if a resume would not have what a checkpoint was made of. Of optimizers, this needs their own code.

    states: what was saved. facts, tensors: the checkpoint. Called for the first one of a run, before hours are lost.
    """
    held = decoded(tensors[OBJECTS])
    for name, saved in states.registered.items():
        if why := difference_of_values(saved, unpack_value(held["registered"][name], tensors)):
            what, remedy = about_registered(name)
            raise UserError(f"{what} cannot be restored: {why}: {remedy}")
    for number, (optimizer, saved) in enumerate(zip(optimizers, states.optimizers, strict=True)):
        what, remedy = about_optimizer(optimizer)
        read = unpack_value(held["optimizers"][number], tensors)
        why = difference_of_values(saved, read)
        if not why and (twin := twin_of(optimizer)) is not None:
            try:
                load_optimizers([twin], models, [read], [facts["parameters"][number]])
                why = difference_of_values(saved, twin.state_dict())
            except UserError as error:  # without the remedy for a resume
                why = str(error.__cause__ or error).partition("\n")[0]
        if why:
            raise UserError(f"{what} cannot be restored: {why}: {remedy}")


def loads_as_torch(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer has torch's own load_state_dict."""
    return getattr(type(optimizer).load_state_dict, "__qualname__", "") == "Optimizer.load_state_dict"


def twin_of(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer | None:
    """Return an optimizer of the same class and parameters, into which a state can be loaded without harm; None: on a GPU,
    or if its class loads the state in a way of its own and cannot be copied."""
    # On a GPU, there may be no memory for the state of a second one.
    if any(parameter.device.type != "cpu" for group in optimizer.param_groups for parameter in group["params"]):
        return None
    if isinstance(getattr(type(optimizer), "param_groups", None), property):  # those of an optimizer in it
        return None
    # Not made by its constructor, of which only the program knows the arguments.
    twin: torch.optim.Optimizer = object.__new__(type(optimizer))
    vars(twin).update(vars(optimizer))
    twin.state = defaultdict(dict)
    twin.param_groups = [dict(group) for group in optimizer.param_groups]
    if not loads_as_torch(optimizer):
        memo: dict[int, Any] = {id(one): one for group in optimizer.param_groups for one in group["params"]}
        try:
            vars(twin).update(copy.deepcopy(vars(twin), memo))
        except Exception:  # any: of a process group, or of the author's own
            return None
    return twin


def load_models(tensors: Mapping[str, Tensor], models: Sequence[nn.Module]) -> None:
    """Load a checkpoint's models. Raises UserError if it does not match."""
    several = any(name.startswith("models.") for name in tensors)
    for model, prefix in zip(models, prefixes_of_kind("model", len(models)), strict=True):
        if several != prefix.startswith("models."):
            raise UserError("the checkpoint does not match: it has a different number of models: check the script")
        load_model(model, {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)})


def load_model(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load a state_dict into `model`. Raises UserError if names, shapes or types do not match."""
    state = {uncompiled_name(name): tensor for name, tensor in state.items()}  # a file from before they were saved so
    try:
        require_match(state, tensors_of(model), types=True)
    except ValueError as error:
        raise UserError(f"the checkpoint does not match the model: {error}: build the model as the run did") from error
    load_by_own_names(model, state)


def load_registered(name: str, what: Any, state: Any) -> None:
    """Load an object that was registered under `name`. Raises UserError on every rank if it does not match: of a module,
    names, shapes and types."""
    try:
        if isinstance(what, nn.Module):
            require_match(state, tensors_of(what), types=True)
            load_by_own_names(what, state)
        else:
            if isinstance(what, lr_scheduler.LRScheduler):  # which accepts any type, and would fail in the next step
                for key, mine in what.state_dict().items():
                    require_number(key, mine, state.get(key, mine))
            what.load_state_dict(state)
    except Exception as error:  # any: the class may be the author's own
        last = (str(error) or type(error).__name__).splitlines()[-1].strip()
        raise UserError(f"the checkpoint does not match {name!r} ({last}): {REGISTER}", everywhere=True) from error


def load_by_own_names(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Call `model.load_state_dict` with the names that it has if parts of it are compiled. state: by the model's own."""
    here = {name: state[own] for name in model.state_dict() if (own := uncompiled_name(name)) in state}
    model.load_state_dict(here, strict=False)  # of the entries that are tensors, or of the others alone


def load_optimizers(
    optimizers: Sequence[torch.optim.Optimizer], models: Sequence[nn.Module], states: Sequence[Facts],
    names: Sequence[Sequence[Sequence[str]]],
) -> None:  # fmt: skip
    """Load a state_dict into each optimizer. Raises UserError if they do not match.

    names: of the parameters of each group of each optimizer, when they were saved. The order may be another one now.
    """
    try:
        for optimizer, held, there in zip(optimizers, states, names, strict=True):
            here, groups = names_of(optimizer, models), []
            if len(there) != len(here):
                raise ValueError(f"{len(there)} parameter groups in the checkpoint, {len(here)} now")
            for mine, theirs in zip(optimizer.state_dict()["param_groups"], held["param_groups"], strict=True):
                # Settings such as `fused` are this run's: the checkpoint may come from another kind of device.
                own = {name: mine[name] for name in (*IMPLEMENTATION, "params", "param_names") if name in mine}
                groups.append(mine | {name: like(name, mine.get(name), value) for name, value in theirs.items()} | own)
            for number, (one, other) in enumerate(zip(here, there, strict=True)):
                if unlike := sorted({*one} ^ {*other}):
                    where = "now" if unlike[0] in one else "in the checkpoint"
                    raise ValueError(f"parameter group {number} has {unlike[0]} only {where}")
            place = {name: number for number, name in enumerate(chain.from_iterable(here))}
            # torch counts parameters in the order of the groups,
            # which may be another one now: names say which is which.
            moved = {number: place[name] for number, name in enumerate(chain.from_iterable(there))}
            state = {moved.get(key, key): value for key, value in held["state"].items()}
            load_exactly(optimizer, {"state": state, "param_groups": groups})
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:  # torch's own among them
        first = (str(error) or type(error).__name__).splitlines()[0]
        message = f"the checkpoint does not match the optimizer ({first}): make the optimizer as the run did"
        raise UserError(message) from error


def require_number(name: str, mine: Any, theirs: Any) -> None:
    """Raise ValueError if `mine` is a number, or a list of numbers, and `theirs` is not."""
    if isinstance(mine, list):
        for one, other in zip(mine, theirs if isinstance(theirs, list) else [theirs], strict=False):
            require_number(name, one, other)
    elif isinstance(mine, (int, float)) and not (
        isinstance(theirs, (int, float, Tensor)) or portable.is_scalar(theirs)
    ):
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
    return theirs.tolist() if isinstance(theirs, Tensor) and mine is not None else theirs
