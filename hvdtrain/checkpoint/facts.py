"""What the facts of a checkpoint must be: one table, and how they must agree with the tensors.

A checksum says that a file is what somebody wrote, and not that it was hvdtrain.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from hvdtrain.checkpoint.checkpoint import parsed
from hvdtrain.engines.portable import TENSOR, Held, from_json, unflattened
from hvdtrain.loop.state import TrainState

DEEPEST = 50
LARGEST = 2**53  # of whole numbers

Kind = Callable[[Any], bool]


def whole(low: int = 0, high: int = LARGEST) -> Kind:
    return lambda value: type(value) is int and low <= value <= high


def number(value: Any) -> bool:
    return type(value) is float or (type(value) is int and abs(value) <= LARGEST)


def text(value: Any) -> bool:
    return type(value) is str


def boolean(value: Any) -> bool:
    return type(value) is bool


def anything(value: Any) -> bool:
    return True


def duration(value: Any) -> bool:
    return number(value) and 0 <= value < math.inf


def one_of(*values: str) -> Kind:
    return lambda value: value in values


def optional(kind: Kind) -> Kind:
    return lambda value: value is None or kind(value)


def list_of(kind: Kind) -> Kind:
    return lambda value: type(value) is list and all(map(kind, value))


def mapping_to(kind: Kind) -> Kind:
    return lambda value: type(value) is dict and all(map(kind, value.values()))


def row(*kinds: Kind) -> Kind:
    return lambda value: (
        type(value) is list
        and len(value) == len(kinds)
        and all(kind(item) for kind, item in zip(kinds, value, strict=True))
    )


def record(**kinds: Kind) -> Kind:
    return lambda value: (
        type(value) is dict and value.keys() == kinds.keys() and all(kind(value[name]) for name, kind in kinds.items())
    )


def either(*kinds: Kind) -> Kind:
    return lambda value: any(kind(value) for kind in kinds)


SHAPE = list_of(whole())
BEST = dict(metric=text, direction=one_of("min", "max"), value=number)
STATE = dict(
    epoch=whole(), samples_of_epoch=whole(), samples=whole(), step=whole(), skipped=whole(), train_seconds=duration,
    train=mapping_to(number), evaluation=mapping_to(number), prefix=text, evaluated_epoch=whole(-1),
    best=either(record(), record(**BEST, epoch=whole(), step=whole())),
)  # fmt: skip
TABLE: dict[str, Kind] = {
    "format": whole(),
    "state": record(**STATE),
    "automatic": boolean,
    "best": optional(record(**BEST)),
    "initial": record(ranks=whole(1, 2**31), batch_size=whole(1, 2**31), accumulate=whole(1, 2**31)),
    "world_size": whole(1, 2**31),
    "engine": text,
    "config": mapping_to(anything),
    "typed": mapping_to(anything),
    "data": mapping_to(anything),
    "scaler": mapping_to(number),
    "workers": list_of(whole()),
    "optimizers": list_of(mapping_to(anything)),
    "optimizer_types": list_of(text),
    "parameters": list_of(list_of(list_of(text))),
    "registered": mapping_to(anything),
    "registered_types": mapping_to(text),
    "own": mapping_to(row(whole(1, 2**31), mapping_to(SHAPE))),
    "late": mapping_to(list_of(row(text, optional(SHAPE), SHAPE, text))),
    "outer": list_of(text),
    "chosen": mapping_to(anything),
    "input": record(samples=whole(), per_epoch=whole()),
    "ended": optional(record(epochs=optional(whole()), steps=optional(whole()))),
}
assert STATE.keys() == {field.name for field in fields(TrainState)}


def require_sound(facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Raise ValueError if the facts are not what a run writes, or do not agree with the tensors."""
    for name, kind in TABLE.items():
        require(name in facts and depth(facts[name]) <= DEEPEST and kind(facts[name]), name)
    require_optimizers(facts, tensors)
    for name, packed in facts["registered"].items():
        require(name in facts["registered_types"], f"registered {name}")
        unpacked(packed, tensors, f"registered {name}")
    elements = sum(tensor.numel() for tensor in tensors.values())
    for late in facts["late"].values():
        for name, _, shape, dtype in late:
            require(math.prod(shape) <= elements and is_dtype(dtype), f"buffer {name}")
    for name, (ranks, parts) in facts["own"].items():
        length = sum(map(math.prod, parts.values()))
        floating = name in tensors and tensors[name].dtype in (torch.float32, torch.float64)
        require(floating and list(tensors[name].shape) == [ranks, length], name)
    require_own(facts, tensors)


def require_optimizers(facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless each optimizer has groups of numbered parameters, with a name for each."""
    packed, names = facts["optimizers"], facts["parameters"]
    require(len(packed) == len(names) == len(facts["optimizer_types"]), "number of optimizers")
    for one, there in zip(packed, names, strict=True):
        held = unpacked(one, tensors, "optimizers")
        require(
            type(held.get("state")) is dict and list_of(mapping_to(anything))(held.get("param_groups")), "optimizers"
        )
        numbers = [group.get("params") for group in held["param_groups"]]
        require(all(map(list_of(whole()), numbers)), "optimizers")
        require(list(map(len, numbers)) == list(map(len, there)), "parameters")
        count = sum(map(len, numbers))
        require([n for group in numbers for n in group] == list(range(count)), "optimizers")
        require(len({name for group in there for name in group}) == count, "parameters")


def require_own(facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Raise ValueError for states of single ranks that cannot be read: positions in streams, generators, workers."""
    size = facts["world_size"]
    if "positions" in tensors:
        require(len(decoded(tensors, "positions")) == size, "positions")
    if "generators" in tensors:
        ranks = decoded(tensors, "generators")
        require(len(ranks) == size, "generators")
        require_rows(ranks, tensors.get("generators.rows"), [one.get("value") for one in ranks], "generators")
    for name in ("extra", "differing"):
        if name in tensors:
            ranks = decoded(tensors, name)
            values = [one.get("value") for one in ranks]
            require(len(ranks) == size and all(map(mapping_to(mapping_to(anything)), values)), name)
            require_rows(ranks, tensors.get(f"{name}.rows"), values, name)
    if facts["workers"]:
        require(len(facts["workers"]) == size and max(facts["workers"]) < size, "workers")
        workers = decoded(tensors, "own")
        require(len(workers) == len(set(facts["workers"])), "workers")
        require_rows(workers[1:], tensors.get("own.rows"), [one.get("optimizers") for one in workers[1:]], "own")
        for one in workers:
            require(mapping_to(number)(one.get("scaler")) and whole()(one.get("skipped")), "own")
    momentum = tensors.get("outer.momentum")
    require(bool(facts["outer"]) == (momentum is not None), "outer")


def require_rows(packed: list[Any], rows: Tensor | None, values: list[Any], name: str) -> None:
    """Raise ValueError unless `rows`, int64 [len(values), n], has the tensors of the nested `values`."""
    require(rows is not None and rows.dtype == torch.int64 and rows.ndim == 2 and len(rows) == len(values), name)
    assert rows is not None
    for one, value, own in zip(packed, values, rows, strict=True):
        require(whole(0, rows.shape[1])(one.get("length")), name)
        attempt(lambda value=value, own=own: unflattened(value, own), name)  # type: ignore[misc] # of this pass


def decoded(tensors: Mapping[str, Tensor], name: str) -> list[Any]:
    """Return a list of JSON that is stored as uint8."""
    tensor = tensors.get(name)
    require(tensor is not None and tensor.dtype == torch.uint8 and tensor.ndim == 1, name)
    assert tensor is not None
    decoded_list = attempt(lambda: parsed(bytes(tensor.numpy()).decode()), name)
    require(type(decoded_list) is list and depth(decoded_list) <= DEEPEST, name)
    if name != "positions":
        require(list_of(mapping_to(anything))(decoded_list), name)
    return list(decoded_list)


def unpacked(packed: Any, tensors: Mapping[str, Tensor], name: str) -> Any:
    """Return what `contents.pack` has packed. Raises ValueError if a tensor is not the one that is described."""

    def get(held: Held) -> Tensor:
        tensor = tensors[held[TENSOR]]
        if list(tensor.shape) != held["shape"] or str(tensor.dtype) != f"torch.{held['dtype']}":
            raise ValueError(held[TENSOR])
        return tensor

    return attempt(lambda: from_json(packed, get), name)


def attempt(read: Callable[[], Any], name: str) -> Any:
    """Return what `read` returns. Raises ValueError if it fails."""
    try:
        return read()
    except Exception as error:  # any: the values are whatever somebody has written
        raise ValueError(about(name)) from error


def is_dtype(name: str) -> bool:
    return isinstance(getattr(torch, name, None), torch.dtype)


def depth(value: Any) -> int:
    """Return how deep the values are nested; more than DEEPEST where it is more."""
    level, levels = [value], 0
    while level and levels <= DEEPEST:
        inner = (item.values() if type(item) is dict else item for item in level if type(item) in (dict, list))
        level, levels = [item for items in inner for item in items], levels + 1
    return levels


def require(sound: bool, name: str) -> None:
    """Raise ValueError unless `sound`."""
    if not sound:
        raise ValueError(about(name))


def about(name: str) -> str:
    return f"its facts are not those of a run: {name}"
