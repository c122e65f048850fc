"""Compares the weights of all ranks, bit by bit."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from hvdtrain.engines.base import Engine
from hvdtrain.engines.errors import Failure, UserError
from hvdtrain.models.weights import is_extra

CHUNK = 2**18  # elements


def compare(
    engine: Engine, models: Sequence[nn.Module], name_of: Callable[[int], str], step: int, check_steps: int,
    everywhere: bool = True,
) -> None:  # fmt: skip
    """Raise Failure on every rank if the parameters are not bitwise equal on all ranks. A collective.

    name_of: returns the name of a rank. check_steps: steps between two comparisons; 0: there are none. everywhere: these are
    all ranks of the run.
    """
    named = named_parameters(models) if engine.size > 1 else []
    if not named:
        return
    names = [name for name, _ in named]
    sums = torch.stack([checksum(parameter) for _, parameter in named]).cpu()
    rows = engine.all_gather(sums, "guard.replicas")
    kinds = Counter(tuple(row.tolist()) for row in rows)
    if len(kinds) == 1:
        return
    usual, votes = kinds.most_common(1)[0]
    unlike = [rank for rank, row in zip(engine.ranks(), rows, strict=True) if tuple(row.tolist()) != usual]
    first = next(i for i in range(len(names)) if len(set(rows[:, i].tolist())) > 1)
    who = " and ".join(map(name_of, unlike))
    said = f"{who} has different weights than the other ranks"
    if votes * 2 <= engine.size:
        how = f"{who} differs from the other ranks"
        said = f"the weights differ between ranks, and no majority says which are right ({how})"
    since = f"between steps {max(0, step - check_steps)} and {step}" if check_steps else "by now"
    how = "start again from a checkpoint; check that host's memory, and that no forward pass changes weights (max_norm)"
    said += f": first in {names[first]}, {since}: {how}"
    raise Failure(said, everywhere=everywhere)


def require_same_on_all(engine: Engine, registered: Mapping[str, object]) -> None:
    """Raise UserError on every rank if a registered module has other values on another rank: of these, a checkpoint holds
    those of rank 0. A collective."""
    for name, what in registered.items():
        if not isinstance(what, nn.Module) or engine.size == 1:
            continue
        sums = [int(checksum(value)) for key, value in what.state_dict().items() if not is_extra(key, value)]
        rows = engine.all_gather_object(sums, f"register.{name}")
        for rank, row in enumerate(rows):
            if row != rows[0]:
                said = f"{type(what).__name__} has other values on rank {rank} than on rank 0"
                how = "create it alike on all ranks, or load the same state_dict"
                raise UserError(f"run.register({name}=...): the {said}: {how}", everywhere=True)


class Models(list[nn.Module]):
    """The models of a run. names: what the script calls them, `run.prepare(generator=...)`; "": it gave no name."""

    def __init__(self, models: Iterable[nn.Module], names: Iterable[str]):
        super().__init__(models)
        self.names = list(names)


def prefixes(models: Sequence[nn.Module]) -> list[str]:
    """Return what the names of each model's parts begin with: nothing for a single model, else its name or number."""
    if len(models) == 1:
        return [""]
    names = models.names if isinstance(models, Models) else [""] * len(models)
    return [f"{name or number}." for number, name in enumerate(names)]


def own_name(name: str) -> str:
    """Return the name of a parameter or buffer without the part that torch.compile inserts for a compiled module."""
    return name.replace("_orig_mod.", "")


def named_parameters(models: Sequence[nn.Module]) -> list[tuple[str, nn.Parameter]]:
    """Return each parameter once, with a unique name. With several models, it begins with the model's name or number."""
    named: dict[nn.Parameter, str] = {}
    for prefix, model in zip(prefixes(models), models, strict=True):
        for name, parameter in model.named_parameters():
            named.setdefault(parameter, prefix + own_name(name))
    return [(name, parameter) for parameter, name in named.items()]


def kind_of(tensor: Tensor) -> str:
    """Return a tensor's shape and type in words."""
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def checksum(parameter: Tensor) -> Tensor:
    """Return an int64 scalar: the sum over all values of their bits times their position (from 1), modulo 2^64.

    It changes if a single bit flips, or if two different values are swapped. Computed on the parameter's device, in chunks:
    positions and products are of int64, four times the memory of a large float32 parameter.
    """
    if parameter.is_complex():
        parameter = torch.view_as_real(parameter.detach())
    kind = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[parameter.element_size()]
    total, done = torch.zeros((), dtype=torch.int64, device=parameter.device), 0
    for chunk in chunks(parameter.detach()):
        bits = chunk.view(kind)
        total += (bits * torch.arange(done + 1, done + len(bits) + 1, device=bits.device)).sum()
        done += len(bits)
    return total


def chunks(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the elements in order, as flat tensors of at most CHUNK elements. Only the current one is copied, if at all."""
    if tensor.is_contiguous():
        yield from tensor.reshape(-1).split(CHUNK)
        return
    rows = CHUNK // tensor[0].numel()
    for part in tensor.split(max(1, rows)):  # channels_last, for instance
        yield from [part.reshape(-1)] if rows else chunks(part[0])
