"""State of layers that is neither parameter nor buffer: what `get_extra_state` returns, and what hooks add to a state_dict.

Each rank has its own. In a checkpoint, if there is any:

extra        JSON as uint8: of each rank, the state by module and name, with shape and type of its tensors
extra.rows   int64 [ranks, n]: of each rank, the bytes of its tensors, one after the other, padded
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from hvdtrain.checkpoint import contents
from hvdtrain.checkpoint.objects import Objects
from hvdtrain.checkpoint.parts import Content, Part
from hvdtrain.engines.base import Engine
from hvdtrain.engines.errors import UserError
from hvdtrain.engines.modules import is_extra, own_name
from hvdtrain.engines.portable import require_no_meta, to_json, unflattened

HOW = "let get_extra_state return numbers, strings, bytes or tensors, also in lists and dictionaries"
States = dict[str, dict[str, Any]]  # by module, and by the name in its state_dict


def of(modules: Mapping[str, nn.Module]) -> States:
    """Return the state of each module that has some."""
    states_of = {}
    for name, module in modules.items():
        states = {own_name(key): value for key, value in module.state_dict().items() if is_extra(key, value)}
        if states:
            states_of[name] = states
    return states_of


def require_storable(states: States) -> None:
    """Raise UserError for a value that a checkpoint cannot store."""
    for module in states.values():
        for name, value in module.items():
            with contents.storable(name, HOW):
                to_json(value, require_no_meta)


def gather(engine: Engine, modules: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """Return the tensors for a checkpoint. A collective, if the modules have such state."""
    states = of(modules)
    if not states:
        return {}
    require_storable(states)
    packed, rows = engine.all_gather_nested(states, "checkpoint.extra")
    return {"extra": contents.encoded(packed), "extra.rows": rows}


def from_file(tensors: Mapping[str, Tensor], rank: int = 0) -> States:
    """Return what a checkpoint has of a rank."""
    if "extra" not in tensors:
        return {}
    states: States = unflattened(contents.decoded(tensors["extra"])[rank]["value"], tensors["extra.rows"][rank])
    return states


def load(engine: Engine, tensors: Mapping[str, Tensor] | None, *, same: bool) -> States:
    """Return this rank's states in a checkpoint, or rank 0's if that has another number of ranks. A collective.

    tensors: of the checkpoint, on rank 0. same: rank 0's on every rank.
    """
    saved = None
    if tensors is not None and "extra" in tensors:
        saved = (contents.decoded(tensors["extra"]), tensors["extra.rows"])
    if not engine.broadcast_object(saved is not None, "checkpoint.extra.any"):
        return {}
    packed, rows = engine.broadcast_nested(saved, "checkpoint.extra")
    rank = engine.rank if len(packed) == engine.size and not same else 0
    states: States = unflattened(packed[rank]["value"], rows[rank])
    return states


def share(engine: Engine, modules: Mapping[str, nn.Module]) -> None:
    """Give every rank rank 0's. A collective, if the modules have such state."""
    if states := of(modules):
        packed, rows = engine.all_gather_nested(states, "extra.share")
        restore(modules, unflattened(packed[0]["value"], rows[0]))


def restore(modules: Mapping[str, nn.Module], held: States) -> None:
    """Give each module its state. Raises UserError if a module has other names, or does not take its state."""
    states = of(modules)
    for name, module in modules.items():
        there, here = held.get(name, {}), states.get(name, {})
        for key in sorted({*there} ^ {*here}):
            whose = "the model lacks it" if key in there else "the checkpoint lacks it"
            raise UserError(f"the checkpoint does not match the model: {key}: {whose}: check --model", everywhere=True)
        if not there:
            continue
        own = {key: there[own_name(key)] for key in module.state_dict() if own_name(key) in there}
        try:
            module.load_state_dict(own, strict=False)
        except Exception as error:  # any: set_extra_state is the author's own
            last = (str(error) or type(error).__name__).splitlines()[-1].strip()
            message = f"{next(iter(there))} does not take what it returned when the checkpoint was written ({last})"
            raise UserError(
                f"{message}: let set_extra_state take what get_extra_state returns", everywhere=True
            ) from error


class ExtraStates(Part):
    """These states of models and registered modules. same: every rank gets those of rank 0, as with --evaluate."""

    def __init__(self, engine: Engine, objects: Objects, *, same: bool):
        self._engine, self._objects, self._same = engine, objects, same
        self._held: States = {}  # of this rank in the checkpoint

    def require_storable(self, modules: Mapping[str, nn.Module]) -> None:
        """Raise UserError for a value that a checkpoint cannot store."""
        require_storable(of(modules))

    def save(self, content: Content) -> None:
        modules = self._objects.modules() | self._objects.modules(self._objects.registered)
        content.tensors |= gather(self._engine, modules)

    def restore(self, content: Content) -> None:
        self._held = load(self._engine, content.held, same=self._same)
        self.take(self._objects.modules())

    def take(self, modules: Mapping[str, nn.Module]) -> None:
        """Give each module what the checkpoint has of it. Raises UserError."""
        restore(modules, self._held)
