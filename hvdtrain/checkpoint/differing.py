"""What differs between ranks: registered objects, such as a buffer of images that each rank has made, and buffers of models.

A checkpoint has rank 0's of every registered object, and of every buffer that is no floating-point number. If that of
another rank differs, it also has:

differing        JSON as uint8: of each rank, the states by name, with shape and type of their tensors
differing.rows   int64 [ranks, n]: of each rank, the bytes of their tensors, one after the other, padded
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hvdtrain.checkpoint import contents
from hvdtrain.checkpoint.checksums import checksum
from hvdtrain.checkpoint.loading import load_registered
from hvdtrain.checkpoint.parts import Content, Part
from hvdtrain.checkpoint.saved_buffers import persistent_buffers
from hvdtrain.engines.modules import prefixes, running_statistics
from hvdtrain.engines.portable import to_json, unflattened
from hvdtrain.loop.feature import Feature
from hvdtrain.loop.run import Run

INTEGERS = "integer buffers"  # as if they were registered under this name
HOW = "leave it out, or register an object whose state_dict has only numbers, strings and tensors"


def state_of(what: Any) -> Any:
    """Return the state of a registered object; of a module, without running statistics, of which each rank has its own."""
    if not isinstance(what, nn.Module):
        return what.state_dict()
    statistics = {buffer.data_ptr() for buffer in running_statistics([what])}
    return {name: held for name, held in contents.tensors_of(what).items() if held.data_ptr() not in statistics}


def integers_of(models: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Return the buffers in state_dicts that are no floating-point numbers, such as the position in a queue of samples."""
    return {
        prefix + name: buffer
        for prefix, model in zip(prefixes(models), models, strict=True)
        for name, buffer in persistent_buffers(model)
        if buffer is not None and buffer.layout is torch.strided and not buffer.is_floating_point()
        if not name.endswith("num_batches_tracked")  # the same everywhere
    }


def digest(state: Any) -> str:
    """Return a hash of nested values."""

    def put(tensor: Tensor) -> object:
        return int(checksum(tensor))

    return hashlib.sha256(json.dumps(to_json(state, put)).encode()).hexdigest()


class Differing(Feature, Part):
    """Saves and restores them."""

    def prepare(self, run: Run) -> None:
        self._run, self._own = run, dict[str, dict[str, Any]]()
        self._models = run.prepared().models
        self._announced = False

    def parts(self) -> Sequence[Part]:
        return [self]

    def ready(self) -> None:
        """Tell, also in a training without evaluations, that buffers differ."""
        if not self._announced:
            self._announced = True
            self._run.buffers.compare()
            if line := self._run.buffers.warning():
                self._run.say(line)

    def save(self, content: Content) -> None:
        engine, states = self._run.engine, {}
        if engine.size == 1:
            return
        for name, what in self._run.checkpoints.registered.items():
            with contents.storable(f"run.register({name}=...): its state_dict", HOW):
                states[name] = digest(state := state_of(what)), state
        if integers := integers_of(self._models):
            states[INTEGERS] = digest(integers), integers
        everyone = (
            engine.all_gather_object({name: own for name, (own, _) in states.items()}, "registered") if states else []
        )
        unlike = [name for name in states if any(theirs.get(name) != everyone[0][name] for theirs in everyone)]
        if unlike:
            own = {name: {"state": states[name][1]} for name in unlike}
            packed, rows = engine.all_gather_nested(own, "checkpoint.differing")
            content.tensors |= {"differing": contents.encoded(packed), "differing.rows": rows}

    def restore(self, content: Content) -> None:
        engine, tensors, saved = self._run.engine, content.tensors, None
        if "differing" in tensors:
            saved = (contents.decoded(tensors["differing"]), tensors["differing.rows"])
        if not engine.broadcast_object(saved is not None, "checkpoint.differing.any"):
            return
        packed, rows = engine.broadcast_nested(saved, "checkpoint.differing")
        if len(packed) == engine.size:
            self._own = unflattened(packed[engine.rank]["value"], rows[engine.rank])
            if self._run.flags.evaluate is None:
                buffers = integers_of(self._models)
                for name, value in self._own.get(INTEGERS, {"state": {}})["state"].items():
                    buffers[name].copy_(value)
        else:
            names = ", ".join(packed[0]["value"])
            self._run.say(f"each rank had its own {names}: on another number of ranks, all begin with rank 0's")

    def registered(self, objects: Mapping[str, Any]) -> None:
        for name, what in objects.items():
            if name in self._own:
                state = self._own[name]["state"]
                whole = contents.tensors_of(what) | state if isinstance(what, nn.Module) else state
                load_registered(name, what, whole)
