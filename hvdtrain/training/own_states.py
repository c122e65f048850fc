"""What each worker has of its own with --sync-every, for checkpoints: optimizers, loss scaler, number of skipped steps.

A worker is a rank, or the ranks of a host, whose states are equal: its first rank's is saved. In a checkpoint, beside rank
0's state:

own.WORKER  JSON as uint8: the state that is no tensor, and name, type and shape of each tensor of the optimizers
own.TYPE    the optimizers' tensors of that type, [workers - 1, n]: of each but the first, one after the other, padded
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hvdtrain.engines.base import Engine
from hvdtrain.engines.errors import UserError
from hvdtrain.training import contents
from hvdtrain.training.checkpoint import Facts

Lengths = dict[str, int]  # number of elements, by type


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
    held, tensors = contents.collect((), optimizers, {})
    listed = [(name, str(value.dtype).removeprefix("torch."), list(value.shape)) for name, value in tensors.items()]
    facts = {"optimizers": held["optimizers"], "scaler": scaler.state_dict(), "skipped": skipped, "tensors": listed}
    # The tensors are not alike on all ranks: a rank that has skipped its first steps has none yet.
    ranks: list[Facts] = engine.all_gather_object(facts, "checkpoint.own")
    lengths = [lengths_of(one) for one in ranks]
    packed = contents.pack_each("own", [ranks[rank] for rank in first])
    for kind in sorted({kind for one in lengths for kind in one}):
        row = torch.zeros(max(one[kind] for one in lengths), dtype=getattr(torch, kind))
        mine = [value.detach().reshape(-1).cpu() for value in tensors.values() if value.dtype == row.dtype]
        if mine:
            row[: lengths[engine.rank][kind]] = torch.cat(mine)
        packed[f"own.{kind}"] = engine.all_gather(row, f"checkpoint.own.{kind}")[first[1:]]
    return packed


def restore(
    engine: Engine,
    workers: Sequence[int],
    tensors: Mapping[str, Tensor] | None,
    optimizers: Sequence[torch.optim.Optimizer],
) -> Facts:
    """Restore this rank's optimizers, once those of rank 0 are on every rank. Return what else is its own: "optimizers",
    "scaler", "skipped". A collective, with the `workers` that have written it. tensors: of the checkpoint, on rank 0.
    """
    first = sorted(set(workers))
    me = first.index(workers[engine.rank])
    held: list[Facts] | None = None
    with engine.raising_together("checkpoint"):
        if tensors is not None:
            held = contents.unpack_each("own", tensors)
            require_whole(held, tensors, len(first))
    held = engine.broadcast_object(held, "checkpoint.own")
    assert held is not None
    mine: dict[str, Tensor] = {}
    for worker, facts in list(enumerate(held))[1:]:
        for kind, length in sorted(lengths_of(facts).items()):
            row = torch.empty(length, dtype=getattr(torch, kind))
            if tensors is not None:
                row.copy_(tensors[f"own.{kind}"][worker - 1, :length])
            engine.broadcast_(row, f"checkpoint.own.{worker}.{kind}")
            if worker == me:
                mine[kind] = row
    own = held[me]
    if me:
        contents.load_optimizers(own, named(own, mine), optimizers)
    return {name: own[name] for name in ("optimizers", "scaler", "skipped")}


def require_whole(workers: list[Facts] | None, tensors: Mapping[str, Tensor], size: int) -> None:
    """Raise UserError if the tensors do not have the form that `gather` gives them."""
    try:
        sound = workers is not None and len(workers) == size and all(type(one["skipped"]) is int for one in workers)
        for number, one in enumerate(workers or ()):
            for kind, length in lengths_of(one).items() if number else ():
                held = tensors[f"own.{kind}"]
                sound = sound and held.dim() == 2 and len(held) == size - 1 and 0 < length <= held.shape[1]
                sound = sound and held.dtype == getattr(torch, kind)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(contents.OTHER_VERSION) from error
    if not sound:
        raise UserError(contents.OTHER_VERSION)


def lengths_of(facts: Facts) -> Lengths:
    """Return how many elements a worker has of each type. 0: of types that it has not."""
    found: Lengths = defaultdict(int)
    for _, kind, shape in facts["tensors"]:
        found[kind] += math.prod(shape)
    return found


def named(facts: Facts, flat: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a worker's tensors by name. flat: by type, one after the other."""
    found: dict[str, Tensor] = {}
    begin: Lengths = defaultdict(int)
    for name, kind, shape in facts["tensors"]:
        end = begin[kind] + math.prod(shape)
        found[name] = flat[kind][begin[kind] : end].view(shape).clone()
        begin[kind] = end
    return found
