"""The content of a checkpoint, to and from models, optimizers and other state: tensors, and everything else as JSON.

model.NAME, or models.K.NAME               parameters and buffers of the one model, or of model K of several
optimizer.I.NAME, or optimizers.K.I.NAME   the optimizer's tensors of parameter I
registered.NAME.N                          tensor N of what `Run.register` was given under NAME
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hvdtrain.engines.base import Engine
from hvdtrain.engines.errors import UserError
from hvdtrain.training.state import Initial, TrainState

Facts = dict[str, Any]
TENSOR = "__tensor__"  # key of a JSON object that stands for a tensor: its number, shape and dtype


def require_whole(facts: Facts, tensors: Mapping[str, Tensor]) -> None:
    """Raise UserError where facts are not as `save` writes them: another version's, with its own right checksum."""
    try:
        initial, state = Initial(**facts["initial"]), TrainState(**facts["state"])
        counts = (*initial, state.epoch, state.samples_of_epoch, state.samples, state.step, state.skipped)
        numbers = (*counts, state.train_seconds, *state.evaluation.values(), *state.train.values())
        optimizers = facts["optimizers"]
        parts = [part for one in optimizers for part in (*one["groups"], *one["values"].values(), one["values"])]
        sound = (
            all(isinstance(number, (int, float)) for number in numbers)
            and all(type(number) is int and 0 <= number < 2**53 for number in counts)
            and min(initial) > 0
            and state.train_seconds >= 0
            and isinstance(state.prefix, str)
            and all(isinstance(facts[name], dict) for name in ("config", "data", "scaler", "registered"))
            and all(isinstance(part, dict) for part in parts)
            and facts["buffers"] == list(tensors["buffers"].shape)
            and all(type(length) is int for length in facts["buffers"])
            and len(facts["buffers"]) == 2
        )
    except (KeyError, TypeError, AttributeError):
        sound = False
    if not sound:
        raise UserError("the checkpoint was written by another version of hvdtrain: use that, or --resume never")


def upgraded(facts: Facts) -> Facts:
    """Return facts of format 1 as those of format 2: one model, one optimizer, `accuracy` as the one metric."""
    if facts.get("format") != 1:
        return facts
    renamed = {"taken": "samples_of_epoch"}
    accuracy = facts.get("accuracy")
    best = None if accuracy is None else {"metric": "accuracy", "direction": "max", "value": accuracy}
    position = facts.get("position")
    return {
        **{
            name: facts[name]
            for name in ("world_size", "engine", "config", "data", "scaler", "buffers")
            if name in facts
        },
        "format": 2,
        "derived": True,  # a learning rate in `config` may have been derived from the batch size
        "state": {renamed.get(k, k): v for k, v in position.items()} if isinstance(position, dict) else position,
        "best": best,
        "initial": facts.get("begun"),
        "optimizers": [facts.get("optimizer")],
        "registered": {},
    }


def plain(value: object) -> object:
    """Return `value` as JSON gives it back: paths and the like as text, tuples as lists."""
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value if isinstance(value, (bool, int, float, str, type(None))) else str(value)


def snapshot(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


def prefixes(kind: str, count: int) -> list[str]:
    """Return the prefix of each of `count` objects: of one without a number, as in every checkpoint of a single model."""
    return [f"{kind}."] if count == 1 else [f"{kind}s.{number}." for number in range(count)]


def collect(
    models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer], registered: Mapping[str, Any]
) -> tuple[Facts, dict[str, Tensor]]:
    """Return copies of what they hold: what is no tensor, and the tensors."""
    tensors: dict[str, Tensor] = {}
    for model, prefix in zip(models, prefixes("model", len(models)), strict=True):
        tensors |= {f"{prefix}{name}": snapshot(tensor) for name, tensor in model.state_dict().items()}
    described = []
    for optimizer, prefix in zip(optimizers, prefixes("optimizer", len(optimizers)), strict=True):
        held = optimizer.state_dict()
        state: dict[int, dict] = held["state"]
        for index, entries in state.items():
            tensors |= {f"{prefix}{index}.{k}": snapshot(v) for k, v in entries.items() if isinstance(v, Tensor)}
        values = {i: {k: v for k, v in entries.items() if not isinstance(v, Tensor)} for i, entries in state.items()}
        groups = [{k: plain(v) for k, v in group.items() if k != "params"} for group in held["param_groups"]]
        described.append({"values": {str(i): v for i, v in values.items() if v}, "groups": groups})
    packed = {name: pack(what.state_dict(), f"registered.{name}", tensors) for name, what in registered.items()}
    return {"optimizers": described, "registered": packed}, tensors


def pack(value: Any, prefix: str, tensors: dict[str, Tensor]) -> Any:
    """Return `value` as JSON; its tensors go into `tensors`, as PREFIX.0, PREFIX.1, ... Keys of dictionaries become text.

    Raises UserError for what JSON cannot hold.
    """
    if isinstance(value, Tensor):
        number = sum(name.startswith(f"{prefix}.") for name in tensors)
        tensors[f"{prefix}.{number}"] = snapshot(value)
        return {TENSOR: number, "shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value):
            return {key: pack(item, prefix, tensors) for key, item in value.items()}
        return {"__items__": [[plain(key), pack(item, prefix, tensors)] for key, item in value.items()]}
    if isinstance(value, (list, tuple)):
        return [pack(item, prefix, tensors) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    name = prefix.partition(".")[2]
    raise UserError(
        f"run.register({name}=...): its state_dict holds a {type(value).__name__}, which a checkpoint cannot: "
        "leave it out, or register an object whose state_dict has numbers, texts and tensors"
    )


def unpack(engine: Engine, value: Any, prefix: str, tensors: Mapping[str, Tensor]) -> Any:
    """Return what `pack` was given; rank 0 alone has the `tensors`. A collective."""
    if isinstance(value, dict) and TENSOR in value:
        tensor = torch.empty(value["shape"], dtype=getattr(torch, value["dtype"]))
        if engine.rank == 0:
            tensor.copy_(tensors[f"{prefix}.{value[TENSOR]}"])
        engine.broadcast_(tensor, f"{prefix}.{value[TENSOR]}")
        return tensor
    if isinstance(value, dict) and "__items__" in value:
        return {key: unpack(engine, item, prefix, tensors) for key, item in value["__items__"]}
    if isinstance(value, dict):
        return {key: unpack(engine, item, prefix, tensors) for key, item in value.items()}
    if isinstance(value, list):
        return [unpack(engine, item, prefix, tensors) for item in value]
    return value


def flatten(models: Sequence[nn.Module]) -> Tensor:
    """Return this rank's floating-point buffers as one float32 [n] on the CPU."""
    parts = [buffer.detach().reshape(-1).float().cpu() for buffer in floating_buffers(models)]
    return torch.cat(parts) if parts else torch.zeros(0)


def unflatten(flat: Tensor, models: Sequence[nn.Module]) -> None:
    buffers = list(floating_buffers(models))
    for buffer, part in zip(buffers, flat.split([buffer.numel() for buffer in buffers]), strict=True):
        buffer.copy_(part.view_as(buffer))


def floating_buffers(models: Sequence[nn.Module]) -> Iterable[Tensor]:
    return (buffer for model in models for buffer in model.buffers() if buffer.is_floating_point())


def load(
    found: tuple[Facts, Mapping[str, Tensor]],
    models: Sequence[nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    scaler: torch.amp.GradScaler,
) -> None:
    """Fill them from what was read. Raises UserError where it does not fit."""
    facts, tensors = found
    several = sum(name.startswith("models.") for name in tensors) > 0
    for model, prefix in zip(models, prefixes("model", len(models)), strict=True):
        if several != prefix.startswith("models."):
            raise UserError("the checkpoint does not match: it holds another number of models: check the script")
        load_model(model, {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)})
    try:
        for optimizer, prefix, held in zip(
            optimizers, prefixes("optimizer", len(optimizers)), facts["optimizers"], strict=True
        ):
            load_optimizer(
                optimizer, {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}, held
            )
        scaler.load_state_dict(facts["scaler"] or scaler.state_dict())
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        first = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(f"the checkpoint does not match the optimizer ({first}): check --optimizer") from error


def load_model(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    expected = model.state_dict()
    for name in sorted(set(state) ^ set(expected)):
        raise UserError(f"the checkpoint does not match the model: {name} is in one of them only: check --model")
    for name, tensor in state.items():
        if tensor.shape != expected[name].shape:
            shapes = f"{tuple(tensor.shape)} in the file, {tuple(expected[name].shape)} in the model"
            raise UserError(f"the checkpoint does not match the model: {name} is {shapes}: check --model")
    model.load_state_dict(dict(state))


def load_optimizer(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor], held: Facts) -> None:
    """tensors: by I.NAME."""
    state: dict[int, dict[str, object]] = {int(index): dict(values) for index, values in held["values"].items()}
    for name, tensor in tensors.items():
        index, _, key = name.partition(".")
        state.setdefault(int(index), {})[key] = tensor
    groups = [
        {**mine, **theirs} for mine, theirs in zip(optimizer.state_dict()["param_groups"], held["groups"], strict=True)
    ]
    optimizer.load_state_dict({"state": state, "param_groups": groups})
