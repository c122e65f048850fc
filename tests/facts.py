"""The facts of a sound checkpoint, for tests that write one themselves."""

from dataclasses import asdict
from typing import Any

from hvdtrain.checkpoint import checkpoint
from hvdtrain.loop.state import TrainState


def sound_facts(**changed: Any) -> dict[str, Any]:
    """Return facts of a run of one rank without an optimizer, with some of them changed."""
    facts = {
        "format": checkpoint.FORMAT,
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
        "workers": [],
        "optimizer_types": [],
        "parameters": [],
        "registered_types": {},
        "own": {},
        "late": {},
        "outer": [],
        "chosen": {},
        "input": {"samples": 0, "per_epoch": 0},
        "ended": None,
    }
    return facts | changed
