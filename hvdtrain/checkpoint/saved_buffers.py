"""The buffers in a checkpoint: those of which each rank has its own, by name, and those that are made while training.

Only those that belong to the state_dict. A buffer that is not persistent is made again by the module.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hvdtrain.checkpoint.objects import Objects
from hvdtrain.checkpoint.parts import Content, Part
from hvdtrain.engines.base import Engine
from hvdtrain.engines.errors import UserError
from hvdtrain.engines.modules import flatten, own_name, prefixes, running_statistics, unflatten

Shapes = dict[str, list[int] | None]  # of a module's persistent buffers, by name; None: there is no tensor yet
Late = list[Any]  # JSON: name, shape when training began, shape and dtype when the checkpoint was saved


def persistent_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor | None]]:
    """Yield each persistent buffer with its name in the state_dict."""
    for path, layer in module.named_modules():
        for name, buffer in layer._buffers.items():
            if name not in layer._non_persistent_buffers_set:
                yield own_name(f"{path}.{name}" if path else name), buffer


def of_each_rank(models: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Return the floating-point buffers of all models, by unique names: each rank has its own."""
    own, known = {}, set[int]()
    for prefix, model in zip(prefixes(models), models, strict=True):
        for name, buffer in persistent_buffers(model):
            if buffer is None or not buffer.is_floating_point() or buffer.layout is not torch.strided:
                continue
            if id(buffer) not in known:
                known.add(id(buffer))
                own[prefix + name] = buffer
    return own


def statistics_of(registered: Mapping[str, Any]) -> dict[str, dict[str, Tensor]]:
    """Return the running statistics in each registered module that has some: statistics.NAME, and their names."""
    by_name = {}
    for name, module in registered.items():
        if isinstance(module, nn.Module) and (statistics := {id(one) for one in running_statistics([module])}):
            named = module.named_buffers()
            by_name[f"statistics.{name}"] = {own_name(one): buffer for one, buffer in named if id(buffer) in statistics}
    return by_name


def shapes(module: nn.Module) -> Shapes:
    """Return the shape of each persistent buffer."""
    return {name: None if buffer is None else list(buffer.shape) for name, buffer in persistent_buffers(module)}


def changed(module: nn.Module, began: Shapes) -> list[Late]:
    """Return the buffers that have other shapes than when training began."""
    return [
        [name, began.get(name), list(buffer.shape), str(buffer.dtype).removeprefix("torch.")]
        for name, buffer in persistent_buffers(module)
        if buffer is not None and began.get(name) != list(buffer.shape)
    ]


def make_room(module: nn.Module, late: Sequence[Late], device: torch.device) -> None:
    """Give `module` buffers of the saved shapes, to be loaded. One that this program begins otherwise stays as it is."""
    layers: Mapping[str, nn.Module] = {own_name(path): layer for path, layer in module.named_modules()}
    now = shapes(module)
    for full, began, shape, dtype in late:
        path, _, name = full.rpartition(".")
        layer = layers.get(path)
        if layer is None or now.get(full) != began or (name not in layer._buffers and hasattr(layer, name)):
            continue
        layer.register_buffer(name, torch.zeros(shape, dtype=getattr(torch, dtype), device=device))


class Buffers(Part):
    """The buffers of models and registered modules. same: every rank gets the same ones, as with --evaluate."""

    def __init__(self, engine: Engine, objects: Objects, *, same: bool):
        self._engine, self._objects, self._same = engine, objects, same
        self._shapes: dict[str, Shapes] = {}  # when training began, by module
        self._modules: dict[str, nn.Module] = {}

    def watch(self, modules: Mapping[str, nn.Module], content: Content | None) -> None:
        """Note the shapes that these modules begin with, and make room for what a checkpoint has."""
        self._modules |= modules
        self._shapes |= {name: shapes(module) for name, module in modules.items()}
        for name, module in modules.items() if content is not None else ():
            assert content is not None
            make_room(module, content.facts["late"].get(name, []), self._engine.device)

    def _models(self) -> list[nn.Module]:
        return self._objects.models

    def save(self, content: Content) -> None:
        content.facts["late"] = self._late()
        each = {"buffers": of_each_rank(self._models()), **statistics_of(self._objects.registered)}
        for name, mine in each.items():
            whole = self._engine.all_gather(flatten(mine.values()).cpu(), f"checkpoint.{name}")
            content.tensors[name] = whole
        content.facts["own"] = {
            name: [self._engine.size, {one: list(tensor.shape) for one, tensor in mine.items()}]
            for name, mine in each.items()
        }

    def _late(self) -> dict[str, list[Late]]:
        """Return the buffers that were made while training, by module. A collective: ranks must have the same."""
        late = {name: changed(module, self._shapes[name]) for name, module in self._modules.items()}
        late = {name: buffers for name, buffers in late.items() if buffers}
        remedy = "make it alike on every rank, or register_buffer(..., persistent=False), which no checkpoint holds"
        self._engine.require_equal("the shapes of buffers that were made while training", late, remedy)
        return late

    def restore(self, content: Content) -> None:
        models = self._models()
        self._restore_own(content, "buffers", of_each_rank(models), running_statistics(models))

    def restore_statistics(self, objects: Mapping[str, Any], content: Content) -> None:
        """Restore this rank's running statistics of registered modules. A collective."""
        for name, statistics in statistics_of(objects).items():
            self._restore_own(content, name, statistics, list(statistics.values()))

    def _restore_own(
        self, content: Content, name: str, tensors: Mapping[str, Tensor], statistics: Sequence[Tensor]
    ) -> None:
        """Restore `tensors`, of which each rank has its own: with a different number of ranks, the mean of those that are in
        `statistics`, and rank 0's of the others. A collective. They are in the order of the checkpoint."""
        ranks, there = content.facts["own"].get(name, (0, {}))
        here = {one: list(tensor.shape) for one, tensor in tensors.items()}
        if unlike := [one for one in {**there, **here} if there.get(one) != here.get(one)]:
            remedy = f"{unlike[0]} is not the same buffer in both: check --model"
            raise UserError(f"the checkpoint does not match the model: {remedy}", everywhere=True)
        if not there:
            return
        ordered = [tensors[one] for one in there]
        own = flatten(ordered)
        rows = torch.zeros(ranks, len(own), dtype=own.dtype)
        if content.held is not None:
            rows.copy_(content.tensors[name])
        self._engine.broadcast_(rows, f"checkpoint.{name}")
        same = self._same
        if ranks == self._engine.size and not same:
            mine = rows[self._engine.rank]
        elif same and bool((rows == rows[0]).all()):  # rank 0's, not their mean, which is rounded
            mine = rows[0]
        else:
            averaged = {id(tensor) for tensor in statistics}
            mine = rows.mean(0)
            parts = zip(ordered, mine.split([tensor.numel() for tensor in ordered]), strict=True)
            firsts = rows[0].split([tensor.numel() for tensor in ordered])
            mine = torch.cat(
                [mean if id(tensor) in averaged else first for (tensor, mean), first in zip(parts, firsts, strict=True)]
            )
        unflatten(mine, ordered)
