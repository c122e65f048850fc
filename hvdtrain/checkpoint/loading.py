"""Loads the content of a checkpoint (contents.py) into models, optimizers and other objects. Raises UserError if it does not
match them."""

import contextlib
import copy
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from hvdtrain.checkpoint.checkpoint import Facts
from hvdtrain.checkpoint.contents import (
    IMPLEMENTATION,
    OBJECTS,
    REGISTER,
    States,
    about_optimizer,
    about_registered,
    decoded,
    names_of,
    prefixes,
    tensors_of,
    types_of,
)
from hvdtrain.engines.base import Engine
from hvdtrain.engines.broadcasts import load_exactly
from hvdtrain.engines.errors import UserError
from hvdtrain.engines.modules import own_name
from hvdtrain.engines.portable import TENSOR, difference, from_json
from hvdtrain.models.weight_files import require_match


def unpack(packed: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the value that was given to `pack`."""
    return from_json(packed, lambda held: tensors[held[TENSOR]])


def unpack_everywhere(engine: Engine, packed: Any, tensors: Mapping[str, Tensor], name: str) -> Any:
    """Return the value that was given to `pack`, on every rank. Only rank 0 needs `tensors`. A collective."""
    return engine.broadcast_tensors(packed, lambda place: tensors[place], name)


def registered_state(tensors: Mapping[str, Tensor], name: str) -> Any:
    """Return the state of an object that was registered under `name`; None: there was none."""
    packed = decoded(tensors[OBJECTS])["registered"].get(name) if OBJECTS in tensors else None
    return None if packed is None else unpack(packed, tensors)


def load(
    content: tuple[Facts, Mapping[str, Tensor]],
    models: Sequence[nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    scaler: torch.amp.GradScaler,
) -> None:
    """Load a checkpoint into models, optimizers and scaler. Raises UserError if it does not match.

    content: facts and tensors, as returned by `reading.read`.
    """
    facts, tensors = content
    load_models(tensors, models)
    if (there := facts["optimizer_types"]) != (here := types_of(optimizers)):
        message = f"{', '.join(there)} in the checkpoint, {', '.join(here)} now"
        raise UserError(f"the checkpoint does not match the optimizer ({message}): check --optimizer")
    states = [unpack(packed, tensors) for packed in decoded(tensors[OBJECTS])["optimizers"]]
    load_optimizers(optimizers, models, states, facts["parameters"])
    with explained():
        scaler.load_state_dict(facts["scaler"] or scaler.state_dict())


def require_as_saved(
    states: States, facts: Facts, tensors: Mapping[str, Tensor], models: Sequence[nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
) -> None:  # fmt: skip
    """Raise UserError if a resume would not have what a checkpoint was made of. Of optimizers, this needs their own code.

    states: what was saved. facts, tensors: the checkpoint. Called for the first one of a run, before hours are lost.
    """
    held = decoded(tensors[OBJECTS])
    for name, saved in states.registered.items():
        if why := difference(saved, unpack(held["registered"][name], tensors)):
            what, remedy = about_registered(name)
            raise UserError(f"{what} cannot be restored: {why}: {remedy}")
    for number, (optimizer, saved) in enumerate(zip(optimizers, states.optimizers, strict=True)):
        what, remedy = about_optimizer(optimizer)
        read = unpack(held["optimizers"][number], tensors)
        why = difference(saved, read)
        if not why and (twin := twin_of(optimizer)) is not None:
            try:
                load_optimizers([twin], models, [read], [facts["parameters"][number]])
                why = difference(saved, twin.state_dict())
            except UserError as error:
                why = str(error)
        if why:
            raise UserError(f"{what} cannot be restored: {why}: {remedy}")


def twin_of(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer | None:
    """Return an optimizer of the same class and parameters, into which a state can be loaded without harm; None: there is no
    memory for the state of another one, or its class loads it in a way of its own and cannot be copied."""
    if any(parameter.device.type != "cpu" for group in optimizer.param_groups for parameter in group["params"]):
        return None
    twin: torch.optim.Optimizer = object.__new__(type(optimizer))
    vars(twin).update(vars(optimizer))
    twin.state = defaultdict(dict)
    twin.param_groups = [dict(group) for group in optimizer.param_groups]
    if getattr(type(optimizer).load_state_dict, "__qualname__", "") != "Optimizer.load_state_dict":
        memo: dict[int, Any] = {id(one): one for group in optimizer.param_groups for one in group["params"]}
        try:
            vars(twin).update(copy.deepcopy(vars(twin), memo))
        except Exception:  # any: of a process group, or of the author's own
            return None
    return twin


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Turn what torch raises for an optimizer's or scaler's state into a UserError."""
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        first = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(f"the checkpoint does not match the optimizer ({first}): check --optimizer") from error


def load_models(tensors: Mapping[str, Tensor], models: Sequence[nn.Module]) -> None:
    """Load a checkpoint's models. Raises UserError if it does not match."""
    several = any(name.startswith("models.") for name in tensors)
    for model, prefix in zip(models, prefixes("model", len(models)), strict=True):
        if several != prefix.startswith("models."):
            raise UserError("the checkpoint does not match: it has a different number of models: check the script")
        load_model(model, {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)})


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
            if isinstance(
                what, lr_scheduler.LRScheduler
            ):  # load_state_dict accepts any type, and the next step would fail
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
    model.load_state_dict(here, strict=False)  # strict=False: entries that `is_extra` are not in it


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
                # Settings such as `fused` are this run's: the checkpoint may come from another kind of device.
                own = {name: mine[name] for name in (*IMPLEMENTATION, "params", "param_names") if name in mine}
                groups.append(mine | {name: like(name, mine.get(name), value) for name, value in theirs.items()} | own)
            for number, (one, other) in enumerate(zip(here, there, strict=True)):
                if unlike := sorted({*one} ^ {*other}):
                    where = "now" if unlike[0] in one else "in the checkpoint"
                    raise ValueError(f"parameter group {number} has {unlike[0]} only {where}")
            place = {name: number for number, name in enumerate(chain.from_iterable(here))}
            moved = {number: place[name] for number, name in enumerate(chain.from_iterable(there))}
            state = {moved.get(key, key): value for key, value in held["state"].items()}
            load_exactly(optimizer, {"state": state, "param_groups": groups})


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
    return theirs.tolist() if isinstance(theirs, Tensor) and mine is not None else theirs
