"""Conversion between the state of models, optimizers and other objects and the content of a checkpoint: tensors and JSON.

model.NAME, or models.K.NAME               parameters and buffers of the single model, or of model K of several
optimizer.I.NAME, or optimizers.K.I.NAME   the optimizer's tensors for parameter I
registered.NAME.N                          tensor N of the object registered under NAME (`Run.register`)
statistics.NAME                            [ranks, n]: each rank's running statistics of the module registered under NAME
position.RANK                              the position in the stream of a rank, JSON as uint8
outer.momentum                             with --sync-every: see local_steps.py, and own_states.py for own.WORKER, own.TYPE
"""

import contextlib
import functools
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hvdtrain.engines.accelerators import module_of
from hvdtrain.engines.base import Engine, lay_state_as_weights
from hvdtrain.engines.errors import UserError
from hvdtrain.engines.portable import TENSOR, Held, described, from_json, to_json
from hvdtrain.training.checkpoint import Facts
from hvdtrain.training.replicas import own_name
from hvdtrain.training.state import Initial, TrainState

IMPLEMENTATION = ("fused", "foreach", "capturable")  # settings of torch's optimizers
OTHER_VERSION = "the checkpoint was written by another version of hvdtrain: use that, or --resume never"


def require_whole(facts: Facts, tensors: Mapping[str, Tensor]) -> None:
    """Raise UserError if the facts do not have the expected form, as in a checkpoint of another version."""
    try:
        initial, state = Initial(**facts["initial"]), TrainState(**facts["state"])
        counts = (*initial, state.epoch, state.samples_of_epoch, state.samples, state.step, state.skipped)
        numbers = (*counts, state.train_seconds, *state.evaluation.values(), *state.train.values())
        optimizers = facts["optimizers"]
        parts = [part for one in optimizers for part in (*one["groups"], *one["values"].values(), one["values"])]
        sound = (
            all(isinstance(number, (int, float)) for number in numbers)
            and all(type(number) is int and 0 <= number < 2**53 for number in counts)
            and 0 < min(initial) <= max(initial) < 2**31
            and max(state.epoch, state.skipped) <= state.step <= state.samples
            and state.samples_of_epoch <= state.samples
            and 0 <= state.train_seconds < float("inf")
            and (not state.evaluation or 0 <= state.evaluation["count"] < 2**53)
            and isinstance(state.prefix, str)
            and all(isinstance(facts[name], dict) for name in ("config", "data", "scaler", "registered"))
            and all(isinstance(part, dict) for part in parts)
            and facts["buffers"] == list(tensors["buffers"].shape)
            and all(type(length) is int for length in facts["buffers"])
            and len(facts["buffers"]) == 2
            and all(
                shape == list(tensors[f"statistics.{name}"].shape) and len(shape) == 2
                for name, shape in facts.get("statistics", {}).items()
            )
        )
        for name, value in facts["registered"].items():
            from_json(value, functools.partial(found, f"registered.{name}", tensors))
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
        sound = False
    if not sound:
        raise UserError(OTHER_VERSION)


def found(prefix: str, tensors: Mapping[str, Tensor], held: Held) -> Tensor:
    """Return the tensor that `pack` has added. Raises KeyError, or ValueError if the JSON object describes another."""
    tensor = tensors[f"{prefix}.{held[TENSOR]}"]
    if held != described(tensor, held[TENSOR]):
        raise ValueError(held)
    return tensor


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
        tensors |= {f"{prefix}{own_name(name)}": tensor for name, tensor in model.state_dict().items()}
    states = []
    for optimizer, prefix in zip(optimizers, prefixes("optimizer", len(optimizers)), strict=True):
        held = optimizer.state_dict()
        state: dict[int, dict[str, object]] = held["state"]
        groups = [{k: plain(v) for k, v in group.items() if k != "params"} for group in held["param_groups"]]
        values: dict[str, Facts] = {}
        for index, entries in state.items():
            for key, value in entries.items():
                if isinstance(value, Tensor):
                    tensors[f"{prefix}{index}.{key}"] = value
                    continue
                told = f"the state of {type(optimizer).__name__}", "use another optimizer"
                values.setdefault(str(index), {})[key] = pack(value, f"{prefix}{index}.{key}", tensors, *told)
        states.append({"values": values, "groups": groups})
    packed = {}
    for name, what in registered.items():
        whole = what.state_dict()
        if isinstance(what, nn.Module):
            whole = {own_name(key): value for key, value in whole.items()}
        how = "leave it out, or register an object whose state_dict has only numbers, strings and tensors"
        told = f"run.register({name}=...): its state_dict", how
        packed[name] = pack(whole, f"registered.{name}", tensors, *told)
        heartbeat()
    if long := next((name for name, tensor in tensors.items() if tensor.dtype == torch.complex128), None):
        raise UserError(f"{long} is complex128, which a checkpoint cannot store: use complex64")
    return {"optimizers": states, "registered": packed}, tensors


def pack(value: Any, prefix: str, tensors: dict[str, Tensor], what: str, how: str) -> Any:
    """Return `value` as JSON. Its tensors are added to `tensors` as PREFIX.N. Raises UserError for other objects.

    what: its name, and how: the remedy, for this error.
    """
    numbers = itertools.count()

    def put(tensor: Tensor) -> int:
        number = next(numbers)
        tensors[f"{prefix}.{number}"] = tensor
        return number

    try:
        return to_json(value, put)
    except TypeError as error:
        raise UserError(f"{what} holds a {error}, which a checkpoint cannot store: {how}") from error


def unpack(engine: Engine, value: Any, prefix: str, tensors: Mapping[str, Tensor]) -> Any:
    """Return the value that was given to `pack`, on every rank. Only rank 0 needs `tensors`. A collective."""
    return engine.broadcast_tensors(value, lambda number: tensors[f"{prefix}.{number}"], prefix)


def pack_each(kind: str, values: Sequence[Any]) -> dict[str, Tensor]:
    """Return the values of all ranks (JSON) as tensors, KIND.RANK. A header has room for only a small part of a data set's
    state."""
    texts = [bytearray(json.dumps(value).encode()) for value in values]
    return {f"{kind}.{rank}": torch.frombuffer(text, dtype=torch.uint8) for rank, text in enumerate(texts)}


def unpack_each(kind: str, tensors: Mapping[str, Tensor]) -> list[Any] | None:
    """Return what was given to `pack_each`; None if there is nothing. Raises UserError."""
    ranks = [name for name in tensors if name.startswith(f"{kind}.") and name.removeprefix(f"{kind}.").isdecimal()]
    try:
        return [json.loads(bytes(tensors[f"{kind}.{rank}"].numpy())) for rank in range(len(ranks))] or None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(OTHER_VERSION) from error


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
    several = sum(name.startswith("models.") for name in tensors) > 0
    for model, prefix in zip(models, prefixes("model", len(models)), strict=True):
        if several != prefix.startswith("models."):
            raise UserError("the checkpoint does not match: it has a different number of models: check the script")
        load_model(model, {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)})
    load_optimizers(facts, tensors, optimizers)
    with explained():
        scaler.load_state_dict(facts["scaler"] or scaler.state_dict())


def load_optimizers(facts: Facts, tensors: Mapping[str, Tensor], optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Load facts and tensors, as returned by `collect`, into optimizers. Raises UserError if they do not match."""
    with explained():
        for optimizer, prefix, held in zip(
            optimizers, prefixes("optimizer", len(optimizers)), facts["optimizers"], strict=True
        ):
            load_optimizer(
                optimizer, {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}, held
            )


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Turn what torch raises for an optimizer's or scaler's state into a UserError."""
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        first = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(f"the checkpoint does not match the optimizer ({first}): check --optimizer") from error


def load_model(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load a state_dict into `model`. Raises UserError if names or shapes do not match."""
    state = {own_name(name): tensor for name, tensor in state.items()}  # of an earlier version, or from elsewhere
    expected = {own_name(name): tensor for name, tensor in model.state_dict().items()}
    for name in sorted(set(state) ^ set(expected)):
        raise UserError(f"the checkpoint does not match the model: {name} is in only one of them: check --model")
    for name, tensor in state.items():
        if tensor.shape != expected[name].shape:
            shapes = f"{tuple(tensor.shape)} in the file, {tuple(expected[name].shape)} in the model"
            raise UserError(f"the checkpoint does not match the model: {name} is {shapes}: check --model")
        if tensor.dtype != expected[name].dtype:  # load_state_dict would convert it
            types = f"{tensor.dtype} in the file, {expected[name].dtype} in the model"
            raise UserError(f"the checkpoint does not match the model: {name} is {types}: check --model")
    load_by_own_names(model, state)


def load_registered(name: str, model: nn.Module, state: Mapping[str, Any]) -> None:
    """Load a module that was registered under `name`. Raises UserError on every rank if names or shapes do not match."""
    try:
        load_by_own_names(model, state)
    except (KeyError, RuntimeError) as error:
        last = str(error).splitlines()[-1].strip()
        how = "register the same as when it was written, or --resume never"
        raise UserError(f"the checkpoint does not match {name!r} ({last}): {how}", everywhere=True) from error


def load_by_own_names(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Call `model.load_state_dict` with the names that it has if parts of it are compiled."""
    own = {own_name(name): value for name, value in state.items()}
    model.load_state_dict({name: own[own_name(name)] for name in model.state_dict()})


def load_optimizer(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor], held: Facts) -> None:
    """Load state into `optimizer`. tensors: by I.NAME (I: the parameter's index). held: its other values and settings."""
    packed: set[str] = set()  # names of the tensors that are parts of other values

    def find(place: str, told: Held) -> Tensor:
        packed.add(f"{place}.{told[TENSOR]}")
        return found(place, tensors, told)

    state: dict[int, dict[str, object]] = {}
    for index, values in held["values"].items():
        state[int(index)] = {k: from_json(v, functools.partial(find, f"{index}.{k}")) for k, v in values.items()}
    for name, tensor in tensors.items():
        index, _, key = name.partition(".")
        if name not in packed:
            state.setdefault(int(index), {})[key] = tensor
    groups = []
    for mine, theirs in zip(optimizer.state_dict()["param_groups"], held["groups"], strict=True):
        for name, value in theirs.items():
            if kind_of(value) != kind_of(mine.get(name, value)):
                raise ValueError(f"{name} is {plain(value)!r}")
        # How to compute is this run's choice: the checkpoint may come from another kind of device.
        own = {name: mine[name] for name in IMPLEMENTATION if name in mine}
        groups.append(mine | settings(mine, theirs) | own)
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    lay_state_as_weights(optimizer)


def settings(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings `theirs` of a parameter group, from JSON, as tensors where `mine` are tensors: a learning rate."""
    return {
        name: torch.as_tensor(value, dtype=now.dtype, device=now.device) if isinstance(now, Tensor) else value
        for name, value in theirs.items()
        for now in [mine.get(name)]
    }


def kind_of(setting: object) -> str:
    """Return what an optimizer's setting is, such as "number"; flags that are None have their default."""
    if isinstance(setting, bool | None):
        return "flag"
    if isinstance(setting, (list, tuple)):
        return f"{len(setting)} of {','.join(sorted({kind_of(item) for item in setting}))}"
    return "number" if isinstance(setting, (int, float, Tensor)) else "text" if isinstance(setting, str) else "other"
