"""What each worker has of its own with --sync-every, for checkpoints: optimizers, loss scaler, number of skipped steps.

A worker is a rank, or the ranks of a host, whose states are equal: its first rank's is saved. In a checkpoint, beside rank
0's state:

own        JSON as uint8: of each worker, the state that is no tensor, with shape and type of its tensors
own.rows   int64 [workers - 1, n]: of each but the first, the bytes of its tensors, one after the other, padded
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hvdtrain.engines.base import Engine
from hvdtrain.engines.portable import Held, from_json, to_json
from hvdtrain.training import contents
from hvdtrain.training.checkpoint import Facts


def gather(
    engine: Engine,
    workers: Sequence[int],
    optimizers: Sequence[torch.optim.Optimizer],
    scaler: torch.amp.GradScaler,
    skipped: int,
) -> dict[str, Tensor]:
    """Return the tensors for a checkpoint. A collective. Every rank needs memory for the states of all.

    workers: of each rank, the first rank of its worker.
    """
    first = sorted(set(workers))
    kinds = " or ".join(type(optimizer).__name__ for optimizer in optimizers)
    with contents.storable(f"the state of {kinds}", "use another optimizer"):
        told, row = flattened([optimizer.state_dict() for optimizer in optimizers])
    facts = {"optimizers": told, "scaler": scaler.state_dict(), "skipped": skipped, "length": len(row)}
    # The tensors are not alike on all ranks: a rank that has skipped its first steps has none yet.
    ranks: list[Facts] = engine.all_gather_object(facts, "checkpoint.own")
    row = F.pad(row, (0, max(one["length"] for one in ranks) - len(row)))
    rows = engine.all_gather(row, "checkpoint.own.rows") if len(row) else row.expand(engine.size, 0)
    return {"own": contents.encoded([ranks[rank] for rank in first]), "own.rows": rows[first[1:]].clone()}


def restore(
    engine: Engine,
    workers: Sequence[int],
    tensors: Mapping[str, Tensor] | None,
    optimizers: Sequence[torch.optim.Optimizer],
) -> Facts:
    """Restore this rank's optimizers, once those of rank 0 are on every rank. Return what else is its own: "scaler",
    "skipped". A collective, with the `workers` that have written it. tensors: of the checkpoint, on rank 0.
    """
    me = sorted(set(workers)).index(workers[engine.rank])
    saved = None if tensors is None else [contents.decoded(tensors["own"]), tensors["own.rows"].shape]
    told, shape = engine.broadcast_object(saved, "checkpoint.own")
    rows = torch.zeros(shape, dtype=torch.int64)
    if rows.numel():
        if tensors is not None:
            rows.copy_(tensors["own.rows"])
        engine.broadcast_(rows, "checkpoint.own.rows")
    if me:
        contents.load_optimizers(optimizers, unflattened(told[me]["optimizers"], rows[me - 1]))
    return {name: told[me][name] for name in ("scaler", "skipped")}


def flattened(value: Any) -> tuple[Any, Tensor]:
    """Return nested values as JSON, and the bytes of their tensors, one after the other, as int64 [n] on the CPU."""
    parts = [torch.empty(0, dtype=torch.uint8)]

    def put(tensor: Tensor) -> None:
        parts.append(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8))

    told = to_json(value, put)
    content = torch.cat(parts)
    return told, F.pad(content, (0, -len(content) % 8)).view(torch.int64)  # 8 bytes each: MPI counts up to 2^31


def unflattened(told: Any, row: Tensor) -> Any:
    """Return what was given to `flattened`. row: may be longer."""
    content, end = row.view(torch.uint8), 0

    def get(held: Held) -> Tensor:
        nonlocal end
        dtype: torch.dtype = getattr(torch, held["dtype"])
        begin, end = end, end + math.prod(held["shape"]) * dtype.itemsize
        return content[begin:end].clone().view(dtype).reshape(held["shape"])

    return from_json(told, get)
