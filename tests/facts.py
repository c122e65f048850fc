"""The content of a sound checkpoint, for tests that write one themselves."""

from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from hvdtrain.checkpoint import checkpoint, contents, own
from hvdtrain.engines.portable import flattened, unflattened
from hvdtrain.loop.state import TrainState


def sound_facts(**changed: Any) -> dict[str, Any]:
    """Return facts of a run of one rank without an optimizer, with some of them changed."""
    facts = {
        "format": checkpoint.CHECKPOINT_FORMAT,
        "state": asdict(TrainState(step=12, samples=64)),
        "automatic": False,
        "best": None,
        "initial": dict(ranks=1, batch_size=64, accumulate=1),
        "world_size": 1,
        "engine": "serial",
        "config": {},
        "typed": {},
        "data": {},
        "scaler": {},
        "optimizer_types": [],
        "parameters": [],
        "registered_types": {},
        "late": {},
        "chosen": {},
        "input": {"samples": 0, "per_epoch": 0},
        "ended": None,
    }
    return facts | changed


def own_tensors(ranks: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Return the tensors for what each rank has of its own, by the name of the provider."""
    packed = [{name: flattened(state) for name, state in one.items()} for one in ranks]
    told = [{name: (value, len(row)) for name, (value, row) in one.items()} for one in packed]
    rows = [row for one in packed for _, row in one.values()]
    return {own.OWN: contents.json_tensor(told), own.BYTES: torch.cat([own.NO_BYTES, *rows])}


def own_states(tensors: dict[str, Tensor]) -> list[dict[str, Any]]:
    """Return what each rank has of its own in a checkpoint."""
    ranks = own.unpacked_states(contents.decoded(tensors[own.OWN]), tensors[own.BYTES])
    return [{name: unflattened(*one) for name, one in of.items()} for of in ranks]
