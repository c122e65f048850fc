"""What no checkpoint has of models, optimizers and registered objects: each is said once, when it has changed."""

import contextlib
import copy
import functools
import io
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from hvdtrain.checkpoint.own import persistent_buffers
from hvdtrain.engines.accelerators import tensors_in
from hvdtrain.engines.modules import uncompiled_name
from hvdtrain.engines.portable import has_memory
from hvdtrain.program.carried import BEGAN_ANEW, Carried
from hvdtrain.program.reached import mark_of
from hvdtrain.program.uses import OF_THE_PROGRAM

SLOW = re.compile("slow|shadow|ema|avg|average")  # keys of weights that an optimizer averages
MOST_HELD = 1_000  # parts of a list
MOST_COPIED = 10_000_000  # values


def attributes_held(what: object) -> Iterator[tuple[str, Any]]:
    """Yield the public attributes of an object, and others where the program itself has the class: private ones of a
    library's object are often caches, such as those of torchmetrics."""
    own = type(what).__module__ == "__main__"
    yield from (pair for pair in getattr(what, "__dict__", {}).items() if own or not pair[0].startswith("_"))


def numbers_of(what: object, apart: Collection[object] = ()) -> dict[str, Any]:
    """Return the numbers among an object's attributes, but for the mode of a module; also those of attributes with a state,
    such as `after.last_epoch` of a warm-up before another scheduler. apart: what is saved itself."""
    held = list(attributes_held(what))
    pairs = [pair for pair in held if type(pair[1]) in (bool, int, float)]
    for name, value in held:
        has_state = callable(getattr(value, "load_state_dict", None)) and not any(value is one for one in apart)
        if has_state and not isinstance(value, nn.Module | torch.optim.Optimizer):
            inner = [(f"{name}.{key}", one) for key, one in attributes_held(value)]
            pairs += [pair for pair in inner if type(pair[1]) in (bool, int, float)]
    return {name: number for name, number in pairs if name.rpartition(".")[2] != "training"}


def tensors_held(what: object) -> dict[str, list[Tensor]]:
    """Return the tensors among an object's attributes, also those in a list, and arrays of numpy with the same memory."""
    held = dict[str, list[Tensor]]()
    for name, value in attributes_held(what):
        some = value if isinstance(value, list | tuple) and len(value) <= MOST_HELD else [value]
        if tensors := [one for one in map(as_tensor, some) if one is not None]:
            held[name] = tensors
    return held


def as_tensor(value: Any) -> Tensor | None:
    """Return a tensor, or one with the memory of an array; None for another object."""
    if isinstance(value, Tensor):
        return value
    # An array that nobody can write into does not change.
    if hasattr(value, "__array_interface__") and getattr(value, "shape", None) and value.flags.writeable:
        with contextlib.suppress(TypeError, ValueError):  # of texts or objects; a view that torch has not
            return torch.as_tensor(value)
    return None


def names_changed(began: Mapping[str, object], now: Mapping[str, object]) -> list[str]:
    """Return the names of which the marks are others now; of one that is gone, nothing is known."""
    return [name for name, mark in began.items() if now.get(name, mark) != mark]


def marks_of(optimizer: torch.optim.Optimizer) -> dict[str, object]:
    """Return what shows whether attributes of an optimizer change that torch's state_dict has not, such as the slow weights
    of Lookahead: of numbers, these; of tensors, also in a list or a dictionary, where they are and how often they changed.
    """
    of_class = [getattr(type(optimizer), name).__qualname__ for name in ("state_dict", "load_state_dict")]
    if of_class != ["Optimizer.state_dict", "Optimizer.load_state_dict"]:
        return {}
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    known = {id(one) for one in (*parameters, *(parameter.grad for parameter in parameters))}
    marks: dict[str, object] = dict(numbers_of(optimizer))
    for name, value in vars(optimizer).items():
        if name not in ("state", "param_groups", "defaults") and isinstance(value, Tensor | list | tuple | dict):
            tensors = [one for one in tensors_in(value) if id(one) not in known]
            marks |= {name: [(one.data_ptr(), one._version) for one in tensors]} if tensors else {}
    return marks


def named_layers(models: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yield each layer, with what the names of its attributes begin with."""
    for path, layer in (pair for model in models for pair in model.named_modules()):
        yield uncompiled_name(f"{path}." if path else ""), layer


def held_by(models: Sequence[nn.Module]) -> dict[str, object]:
    """Return what shows whether the numbers and tensors change that layers hold beside parameters and saved buffers, by
    name. Of a layer with an extra state, nothing: that may have them."""
    held, kept = dict[str, object](), set[int]()
    for model in models:
        tensors = (*model.parameters(), *model.state_dict().values())
        kept |= {one.data_ptr() for one in tensors if has_memory(one)}
    for prefix, layer in named_layers(models):
        if type(layer).get_extra_state is nn.Module.get_extra_state:
            unsaved = {name: layer._buffers.get(name) for name in layer._non_persistent_buffers_set}
            for name, some in (
                tensors_held(layer) | {k: [one] for k, one in unsaved.items() if one is not None}
            ).items():
                # Not another name of a weight, nor an output.
                if not any(one.data_ptr() in kept or one.grad_fn is not None for one in some):
                    held[prefix + name] = mark_of(some)
            # By its name, the length of a table that is computed again, as of a rotary embedding, is no state.
            held |= {prefix + name: repr(one) for name, one in numbers_of(layer).items() if "cached" not in name}
    return held


def buffers_by_name(models: Sequence[nn.Module]) -> dict[str, object]:
    """Return what shows whether the buffers of modules change that checkpoints have."""
    buffers = [pair for model in models for pair in persistent_buffers(model)]
    return {name: mark_of([buffer]) for name, buffer in buffers if buffer is not None}


def empty_in(models: Sequence[nn.Module]) -> dict[str, object]:
    """Return the attributes of layers that are None, by name, as a state is before the first step."""
    return {prefix + name: None for prefix, x in named_layers(models) for name, one in vars(x).items() if one is None}


def optimizers_in(what: Any) -> Iterator[tuple[str, torch.optim.Optimizer]]:
    """Yield the optimizers that an object, or a layer of a module, has as attributes, by path."""
    for path, holder in what.named_modules() if isinstance(what, nn.Module) else [("", what)]:
        for name, one in getattr(holder, "__dict__", {}).items():
            if isinstance(one, torch.optim.Optimizer):
                yield ".".join(filter(None, (path, name))), one


class Began(NamedTuple):
    """What an object had in an attribute. mark: what shows whether it changes. number: none, if it is tensors."""

    mark: object
    number: Any = None


def state_of(what: object, apart: Collection[object] = ()) -> dict[str, Began]:
    """Return what an object has in attributes that may change, by name. apart: what is saved itself."""
    held = {name: Began(repr(number), number) for name, number in numbers_of(what, apart).items()}
    return held | {name: Began(mark_of(tensors)) for name, tensors in tensors_held(what).items()}


def lost_at_a_resume(what: Any, changed: Mapping[str, Began], shared: Mapping[int, object]) -> dict[str, Any]:
    """Return which attributes a resumed run would have otherwise than an object has them now, and the number that each
    would have then: they are not in its state, and are not computed from it by its `load_state_dict`. For this, a copy is
    tried. changed: with what they began. shared: by id, what is not copied."""
    leaves, now = tree_leaves(state := what.state_dict()), state_of(what)
    # Of a module, load_state_dict sets no numbers, and a count in its state, such as that of batch norm, may be the same.
    in_state = [] if isinstance(what, nn.Module) else leaves
    kept = {repr(one.item() if getattr(one, "shape", None) == () else one) for one in in_state}
    lost = {name: one.number for name, one in changed.items() if one.number is not None and now[name].mark not in kept}
    # That the number of an attribute's attribute is in the state does not show that it comes back.
    tried = {name: one for name, one in changed.items() if name in lost or "." in name}
    tensors = {name: one for name, one in changed.items() if one.number is None}
    if sum(one.numel() for one in map(as_tensor, leaves) if one is not None) <= MOST_COPIED:  # else it might not fit
        tried |= tensors
    with contextlib.suppress(Exception):  # any: of the author's own
        then = resumed_copy(what, state, tried, shared) if tried else what
        numbers, filled = numbers_of(then), tensors_held(then)
        come_back = [name for name in tensors if all(map(is_filled, filled.get(name, ()), tensors_held(what)[name]))]
        others = [name for name in tried if name not in come_back]
        lost = {name: numbers.get(name) for name in others if repr(numbers.get(name)) != now[name].mark}
    return lost


def resumed_copy(what: Any, state: Any, began: Mapping[str, Began], shared: Mapping[int, object]) -> Any:
    """Return a copy of an object that has loaded its state, as in a resumed run. began: what it has before; as tensors,
    zeros. Other tensors are not copied: its load_state_dict writes the values that they have. Nothing is printed."""
    own = {id(one) for name, held in began.items() if held.number is None for one in tree_leaves(vars(what)[name])}
    leaves = tree_leaves([state, *vars(what).values()])
    leaves += [*what.parameters(), *what.buffers()] if isinstance(what, nn.Module) else []
    apart = {id(one): one for one in leaves if as_tensor(one) is not None and id(one) not in own}
    copied = copy.deepcopy(what, apart | dict(shared))
    for name, held in began.items():
        *path, last = name.split(".")
        if held.number is not None:
            vars(functools.reduce(getattr, path, copied))[last] = held.number
        else:
            for tensor in tensors_held(copied)[name]:
                tensor.zero_()
    with contextlib.redirect_stdout(io.StringIO()):
        copied.load_state_dict(copy.deepcopy(state))
    return copied


def is_filled(copied: Tensor, now: Tensor) -> bool:
    """Return whether a tensor has the values of another one, but for zeros: the rest of a buffer, which no state has."""
    return copied.shape != now.shape or torch.equal(copied[now != 0], now[now != 0])


class Lacking:
    """Looks at what changes and is not saved. registered: the objects of the run, by name; more may come."""

    def __init__(
        self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer], registered: Mapping[str, Any],
        say: Callable[[str], object],
    ):  # fmt: skip
        self._models, self._optimizers, self._registered, self._say = models, optimizers, registered, say
        self.carried: Carried | None = None  # on the rank that writes, from the loop over `run.epochs` on
        self._began: dict[str, dict[str, Began]] = {}  # registered objects, before they are restored
        self._compared = set[tuple[str, str]]()  # registered objects, and optimizers in them
        self._marks = [marks_of(optimizer) for optimizer in optimizers]
        self._beside: dict[str, object] | None = None  # what modules held when training began
        self._buffers = dict[str, object]()  # with which the loop began
        self._at_head = dict[str, object]()  # what modules held at the head of a resumed epoch
        self._resumed = 0  # samples of that epoch before

    def register(self, objects: Mapping[str, Any]) -> None:
        """Look at these, too, which are not restored yet."""
        self._began |= {name: state_of(what) for name, what in objects.items()}

    def begin_training(self) -> None:
        """Note what modules hold that no checkpoint has."""
        if self._beside is None:
            self._beside = held_by(self._models)

    def begin_loop(self, carried: Carried) -> None:
        """Look at what a program carries on in its loop over `run.epochs`, and at the buffers with which it begins."""
        self.carried = carried
        with OF_THE_PROGRAM:
            self._buffers = buffers_by_name(self._models)

    def begin_steps(self, frame: FrameType, resumed: int) -> None:
        """See Carried."""
        self._resumed, self._at_head = resumed, {}
        if self.carried is not None:
            self.carried.begin_steps(frame, resumed)
            with OF_THE_PROGRAM:
                now = buffers_by_name(self._models) if resumed else {}
                set_back = {name: now[name] for name in names_changed(self._buffers, now)}
                self._at_head = empty_in(self._models) | held_by(self._models) | set_back if resumed else {}

    def end_steps(self, samples: int) -> None:
        """See Carried. And look what a model has gathered since the head of a resumed epoch, which set it back."""
        if self.carried is not None:
            self.carried.end_steps(samples)
            with OF_THE_PROGRAM:
                now = held_by(self._models) | buffers_by_name(self._models) if self._at_head else {}
                for name in names_changed(self._at_head, now):
                    kinds, attribute = self._kinds_with(name)
                    at_head = name in self._buffers
                    if any(self.carried.loops.begins_anew(kind, attribute, at_head=at_head) for kind in kinds):
                        remedy = "keep it in a buffer, and set it back in another epoch only"
                        self._warn(f"{name} of a model {BEGAN_ANEW.format(self._resumed)}", remedy)
                        return

    def look(self) -> None:
        """Say what has changed since, each once. Call it for each checkpoint."""
        if self.carried is not None:
            self.carried.look(in_steps=True)
        with OF_THE_PROGRAM:
            self._look_at_models()
        for optimizer, marks in zip(self._optimizers, self._marks, strict=True):
            with OF_THE_PROGRAM:
                self._look_at_optimizer(optimizer, marks)
        parameters = [one for model in self._models for one in model.parameters()]
        shared = {id(one): one for one in (*self._models, *self._optimizers, *parameters)}
        for name, what in self._registered.items():
            with OF_THE_PROGRAM:
                self._look_at_registered(name, what, shared)

    def _kinds_with(self, name: str) -> tuple[list[type], str]:
        """Return the classes of the layers that have an attribute of this name, such as `head.scale`, and its last part."""
        attribute = name.rpartition(".")[2]
        layers = [one for prefix, one in named_layers(self._models) if prefix + attribute == name]
        return [type(one) for one in layers if hasattr(one, attribute)], attribute

    def _warn(self, message: str, remedy: str) -> None:
        self._say(f"warning: {message}: {remedy}")

    def _look_at_models(self) -> None:
        now = held_by(self._models) if self._beside else {}
        for name in names_changed(self._beside or {}, now):
            kinds, attribute = self._kinds_with(name)
            if self.carried is None or not all(self.carried.loops.is_set_anew(kind, attribute) for kind in kinds):
                message = f"{name} of a model has changed, and no checkpoint has it"
                remedy = "keep it in a buffer with persistent=True, or set it anew in each step, as from run.progress"
                self._warn(message, remedy)
                self._beside = {}
                return

    def _look_at_optimizer(self, optimizer: torch.optim.Optimizer, marks: dict[str, object]) -> None:
        """Say which of its attributes an optimizer does not save; and the state of one in it, or its slow weights, as
        Lookahead often has both."""
        kind = type(optimizer).__name__
        if others := names_changed(marks, marks_of(optimizer)):
            held = {id(one) if isinstance(one, Tensor) else repr(one) for one in tree_leaves(optimizer.state_dict())}
            for attribute in others:
                parts = tree_leaves(getattr(optimizer, attribute))
                if not held.issuperset(id(one) if isinstance(one, Tensor) else repr(one) for one in parts):
                    del marks[attribute]
                    remedy = "keep it in the optimizer's state or in a registered object"
                    self._warn(f"{attribute} of {kind} has changed, and no checkpoint has it", remedy)
        states = {f"the state of {path} in {kind}": [*tensors_in(one.state)] for path, one in optimizers_in(optimizer)}
        own = [held for held in optimizer.state.values() if isinstance(held, dict)]
        states[f"the slow weights of {kind}"] = [
            *tensors_in([x[key] for x in own for key in x if SLOW.search(str(key))])
        ]
        for what, tensors in states.items():
            if self._is_missing((kind, what), tensors, optimizer):
                remedy = "let its state_dict() have it in 'state', and its load_state_dict() take it from there"
                self._warn(f"no checkpoint has {what}", remedy)

    def _look_at_registered(self, name: str, what: Any, shared: Mapping[int, object]) -> None:
        """Say what of an object its state has not: numbers, and once that it learns in tensors or arrays, as a metric of
        torchmetrics does; and an optimizer that it steps, as a loss with a critic does."""
        began, others = self._began[name], self._registered.values()
        now = state_of(what, others)
        first = {key: one for key, one in began.items() if key in now and now[key].mark != one.mark}
        lost = lost_at_a_resume(what, first, shared) if first else {}
        for attribute, held in first.items():
            is_number = held.number is not None
            if attribute in lost or not is_number or "." in attribute:  # a copy has shown of these, once, what they are
                del began[attribute]
            if attribute not in lost or not (is_number or self._is_learned(name, what, attribute)):
                continue
            begins = lost[attribute] if is_number else "that of a new one"
            keeps = not is_number and callable(getattr(what, "persistent", None))
            remedy = "call its persistent(True)" if keeps else "add it to its state_dict and load_state_dict"
            message = f"its {attribute} has changed, and a resumed run would begin with {begins}"
            self._warn(f"run.register({name}=...): {message}", remedy)
        for path, one in optimizers_in(what):
            known = any(one is other for other in (*self._optimizers, *others))
            if not known and self._is_missing((name, path), [*tensors_in(one.state)], what):
                remedy = f"register it, too, as {path.rpartition('.')[2]}={name}.{path}"
                self._warn(f"run.register({name}=...): the state of its {path} is not in its own state", remedy)

    def _is_learned(self, name: str, what: Any, attribute: str) -> bool:
        """Return whether these tensors of an object are used before they are set anew, and others of it were not yet."""
        loops = self.carried and self.carried.loops
        if (name, "") in self._compared or (loops and not loops.is_used_before_set(type(what), attribute)):
            return False
        self._compared.add((name, ""))
        return True

    def _is_missing(self, key: tuple[str, str], tensors: Sequence[Tensor], saved: Any) -> bool:
        """Return whether the state of an object has not the largest of these tensors. Each is compared once."""
        if not tensors or key in self._compared:
            return False
        self._compared.add(key)
        largest = max(tensors, key=Tensor.numel)
        kept = tensors_in(saved.state_dict())
        return not any(one is largest or (one.shape == largest.shape and torch.equal(one, largest)) for one in kept)
