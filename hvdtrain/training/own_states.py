"""What each group has of its own with --sync-every, for checkpoints: optimizers, loss scaler, number of skipped steps.

A group is a rank, or the ranks of a host, whose states are equal: its first rank's is saved. In a checkpoint, beside rank
0's state:

own        JSON as uint8: of each group, the state that is no tensor, with shape and type of its tensors
own.rows   int64 [groups - 1, n]: of each but the first, the bytes of its tensors, one after the other, padded
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hvdtrain.engines.base import Engine
from hvdtrain.engines.portable import flattened, unflattened
from hvdtrain.training import contents, loading
from hvdtrain.training.checkpoint import Facts


def gather(
    engine: Engine,
    leaders: Sequence[int],
    optimizers: Sequence[torch.optim.Optimizer],
    scaler: torch.amp.GradScaler,
    skipped: int,
) -> dict[str, Tensor]:
    """Return the tensors for a checkpoint. A collective. Every rank needs memory for the states of all.

    leaders: of each rank, the first rank of its group.
    """
    first = sorted(set(leaders))
    kinds = " or ".join(type(optimizer).__name__ for optimizer in optimizers)
    with contents.storable(f"the state of {kinds}", "use another optimizer"):
        packed, row = flattened([optimizer.state_dict() for optimizer in optimizers])
    facts = {"optimizers": packed, "scaler": scaler.state_dict(), "skipped": skipped, "length": len(row)}
    ranks, rows = gather_flattened(engine, facts, row, "checkpoint.own")
    return {"own": contents.encoded([ranks[rank] for rank in first]), "own.rows": rows[first[1:]].clone()}


def gather_flattened(engine: Engine, facts: Facts, row: Tensor, name: str) -> tuple[list[Facts], Tensor]:
    """Return the facts of all ranks, and their rows, padded. A collective. facts: with the row's "length"."""
    # The tensors are not alike on all ranks: a rank that has skipped its first steps has none yet.
    ranks: list[Facts] = engine.all_gather_object(facts, name)
    row = F.pad(row, (0, max(one["length"] for one in ranks) - len(row)))
    return ranks, engine.all_gather(row, f"{name}.rows") if len(row) else row.expand(engine.size, 0)


def gather_values(engine: Engine, value: Any, name: str) -> tuple[list[Facts], Tensor]:
    """Return the nested values of all ranks, as JSON without their tensors, and the bytes of these. A collective."""
    packed, row = flattened(value)
    return gather_flattened(engine, {"value": packed, "length": len(row)}, row, name)


def broadcast_values(engine: Engine, saved: tuple[list[Facts], Tensor] | None, name: str) -> tuple[list[Facts], Tensor]:
    """Return on every rank what `gather_values` returned. A collective. saved: on rank 0."""
    ranks, shape = engine.broadcast_object(saved and [saved[0], list(saved[1].shape)], name)
    rows = torch.zeros(shape, dtype=torch.int64)
    if rows.numel():
        if saved is not None:
            rows.copy_(saved[1])
        engine.broadcast_(rows, f"{name}.rows")
    return ranks, rows


def restore(
    engine: Engine,
    leaders: Sequence[int],
    tensors: Mapping[str, Tensor] | None,
    optimizers: Sequence[torch.optim.Optimizer],
    models: Sequence[nn.Module],
    names: Sequence[Sequence[Sequence[str]]],
) -> Facts:
    """Restore this rank's optimizers, once those of rank 0 are on every rank. Return what else is its own: "scaler",
    "skipped". A collective, with the `leaders` that have written it. tensors: of the checkpoint, on rank 0.
    names: see `loading.load_optimizers`.
    """
    me = sorted(set(leaders)).index(leaders[engine.rank])
    saved = None if tensors is None else [contents.decoded(tensors["own"]), tensors["own.rows"].shape]
    packed, shape = engine.broadcast_object(saved, "checkpoint.own")
    rows = torch.zeros(shape, dtype=torch.int64)
    if rows.numel():
        if tensors is not None:
            rows.copy_(tensors["own.rows"])
        engine.broadcast_(rows, "checkpoint.own.rows")
    if me:
        loading.load_optimizers(optimizers, models, unflattened(packed[me]["optimizers"], rows[me - 1]), names)
    return {name: packed[me][name] for name in ("scaler", "skipped")}
