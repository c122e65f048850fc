"""What no checkpoint has of models, optimizers and registered objects: each is said once, when it has changed."""

import contextlib
import copy
import functools
import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from hvdtrain.engines.portable import has_memory
from hvdtrain.program.carried import BEGAN_ANEW, OF_THE_PROGRAM, Carried
from hvdtrain.program.reached import mark_of


def numbers_of(what: object, apart: Sequence[object] = (), *, within: bool = True) -> dict[str, Any]:
    """Return the numbers among an object's attributes: the public ones, and others where the program itself has the class.

    `training` is the mode of a module. within: also those of attributes with a state, but for `apart`, such as
    `after.last_epoch` of a warm-up before another scheduler.
    """
    # Private numbers of a library's object are often caches, such as those of torchmetrics.
    own, numbers = type(what).__module__ == "__main__", dict[str, Any]()
    for name, value in getattr(what, "__dict__", {}).items():
        if type(value) in (bool, int, float) and name != "training" and (own or not name.startswith("_")):
            numbers[name] = value
        elif (
            within
            and callable(getattr(value, "load_state_dict", None))
            and not isinstance(value, (nn.Module, torch.optim.Optimizer))
            and not any(value is one for one in apart)
        ):
            numbers |= {f"{name}.{inner}": number for inner, number in numbers_of(value, within=False).items()}
    return numbers


def tensors_held(what: object) -> dict[str, list[Tensor]]:
    """Return the tensors among an object's attributes, also those in a list, and arrays of numpy, which share their memory;
    of which attributes, see `numbers_of`."""
    own, held = type(what).__module__ == "__main__", dict[str, list[Tensor]]()
    for name, value in getattr(what, "__dict__", {}).items():
        some = value if isinstance(value, (list, tuple)) and len(value) <= MOST_HELD else [value]
        if (own or not name.startswith("_")) and (tensors := [one for one in map(as_tensor, some) if one is not None]):
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


def loaded_copy(what: Any, state: Any, shared: Mapping[int, object], reset: Callable[[Any], object]) -> Any:
    """Return a copy of an object that has loaded its state, as a resumed run does. shared: by id, what is not copied. reset:
    gives the copy other values before. What its load_state_dict prints is not shown."""
    copied = copy.deepcopy(what, dict(shared))
    reset(copied)
    with contextlib.redirect_stdout(io.StringIO()):
        copied.load_state_dict(copy.deepcopy(state))
    return copied


def is_restored(what: Any, attribute: str, shared: Mapping[int, object]) -> bool:
    """Return whether the load_state_dict of an object sets the tensors of an attribute as they are now. A copy is tried,
    whose tensors are zeros. shared: by id, what the copy does not copy."""
    state, held = what.state_dict(), tensors_held(what)[attribute]
    parts = [*tree_leaves(state), *held]
    if sum(one.numel() for one in map(as_tensor, parts) if one is not None) > MOST_COPIED:
        return True  # a copy might not fit into memory
    others = {id(one): one for name, value in vars(what).items() if name != attribute for one in tree_leaves(value)}
    others = {place: one for place, one in others.items() if as_tensor(one) is not None}
    with contextlib.suppress(Exception):  # any: of the author's own
        twin = loaded_copy(
            what, state, {**shared, **others}, lambda one: [x.zero_() for x in tensors_held(one)[attribute]]
        )
        # Of a buffer that is not full, the rest may be zeros, which no state has.
        pairs = zip(tensors_held(twin)[attribute], held, strict=True)
        return all(torch.equal(one[now != 0], now[now != 0]) for one, now in pairs)
    return True


SLOW = re.compile("slow|shadow|ema|avg|average")  # keys of weights that an optimizer averages
MOST_HELD = 1_000  # parts of a list
MOST_COPIED = 10_000_000  # values


def marks_of(optimizer: torch.optim.Optimizer) -> dict[str, object]:
    """Return what shows whether attributes of an optimizer change that torch's state_dict has not, such as the slow weights
    of Lookahead: of numbers, these; of tensors, also in a list or a dictionary, where they are and how often they changed.
    """
    if any(
        getattr(type(optimizer), one).__qualname__ != f"Optimizer.{one}" for one in ("state_dict", "load_state_dict")
    ):
        return {}
    groups = optimizer.param_groups
    parameters = {id(one) for group in groups for one in (*group["params"], *(p.grad for p in group["params"]))}
    marks: dict[str, object] = dict(numbers_of(optimizer))
    for name, value in vars(optimizer).items():
        if name not in ("state", "param_groups", "defaults") and isinstance(value, (Tensor, list, tuple, dict)):
            tensors = [one for one in tree_leaves(value) if isinstance(one, Tensor) and id(one) not in parameters]
            marks |= {name: [(one.data_ptr(), one._version) for one in tensors]} if tensors else {}
    return marks


def forgotten(
    what: Any, began: dict[str, Any], shared: Mapping[int, object], apart: Sequence[object]
) -> dict[str, Any]:
    """Return the attributes that a resume would lose: by name, the number that each would have then.

    began: `numbers_of` the object when it was registered. Those are lost that have changed since, are not in its state, and
    are not computed from it by its `load_state_dict`. For this, a copy is tried. Of an attribute's own numbers, such a copy
    alone shows that they come back: then they are taken out of `began`. apart: what is saved itself.
    """
    now = numbers_of(what, apart)
    changed = {name: value for name, value in now.items() if repr(began.get(name, value)) != repr(value)}
    if not changed:
        return {}
    leaves = tree_leaves(state := what.state_dict())
    # Of a module, load_state_dict sets no numbers, and a count in its state, such as that of batch norm, may be the same.
    numbers = [] if isinstance(what, nn.Module) else leaves
    kept = {repr(one.item() if getattr(one, "shape", None) == () else one) for one in numbers}
    resumed = began | {name: value for name, value in changed.items() if repr(value) in kept}
    changed = {name: value for name, value in changed.items() if "." in name or repr(value) not in kept}

    def begin_anew(copied: Any) -> None:
        for name in changed:
            *path, last = name.split(".")
            vars(functools.reduce(getattr, path, copied))[last] = began[name]

    if changed:
        tensors = [one for one in leaves if isinstance(one, Tensor)]
        if isinstance(what, nn.Module):
            tensors += [*what.parameters(), *what.buffers()]
        with contextlib.suppress(Exception):  # any: of the author's own
            # By identity, the copy shares tensors and `shared`: its load_state_dict writes the same values into them.
            resumed = numbers_of(loaded_copy(what, state, {**shared, **{id(one): one for one in tensors}}, begin_anew))
    lost = {name: resumed.get(name) for name, value in changed.items() if repr(resumed.get(name)) != repr(value)}
    for name in [name for name in changed if "." in name and name not in lost]:
        del began[name]
    return lost


def held_by(models: Sequence[nn.Module]) -> dict[str, object]:
    """Return what shows whether the numbers and tensors change that modules hold beside parameters and saved buffers, by
    name. Of a module with an extra state, nothing: that may have them."""
    held = dict[str, object]()
    for model in models:
        kept = {one.data_ptr() for one in (*model.parameters(), *model.state_dict().values()) if has_memory(one)}
        for path, module in model.named_modules():
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                continue
            tensors, buffers = tensors_held(module), module._buffers
            tensors |= {
                name: [one] for name in module._non_persistent_buffers_set if (one := buffers.get(name)) is not None
            }
            for name, some in tensors.items():  # not another name of a weight, nor an output
                if not any(one.data_ptr() in kept or one.grad_fn is not None for one in some):
                    held[f"{path}.{name}".lstrip(".")] = mark_of(some)
            # By its name, the length of a table that is computed again, as of a rotary embedding, is no state.
            numbers = {name: value for name, value in numbers_of(module).items() if "cached" not in name}
            held |= {f"{path}.{name}".lstrip("."): repr(value) for name, value in numbers.items()}
    return held


def kept_by(models: Sequence[nn.Module]) -> dict[str, object]:
    """Return what shows whether the buffers of modules change that checkpoints have, by name."""
    return {
        f"{path}.{name}".lstrip("."): mark_of([one])
        for model in models
        for path, module in model.named_modules()
        for name, one in module._buffers.items()
        if one is not None and name not in module._non_persistent_buffers_set
    }


def empty_in(models: Sequence[nn.Module]) -> dict[str, object]:
    """Return the attributes of modules that are None, by name, as a state is before the first step."""
    layers = [(path, vars(module)) for model in models for path, module in model.named_modules()]
    return {f"{path}.{name}".lstrip("."): None for path, held in layers for name, one in held.items() if one is None}


def optimizers_in(what: Any) -> Iterator[tuple[str, torch.optim.Optimizer]]:
    """Yield the optimizers that an object, or a layer of a module, has as attributes, by path."""
    for path, holder in what.named_modules() if isinstance(what, nn.Module) else [("", what)]:
        for name, one in getattr(holder, "__dict__", {}).items():
            if isinstance(one, torch.optim.Optimizer):
                yield ".".join(filter(None, (path, name))), one


class Lacking:
    """Looks at what changes and is not saved. registered: the objects of the run, by name; more may come."""

    def __init__(
        self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer], registered: Mapping[str, Any],
        say: Callable[[str], object],
    ):  # fmt: skip
        self._models, self._optimizers, self._registered, self._say = models, optimizers, registered, say
        self.carried: Carried | None = None  # on the rank that writes, from the loop over `run.epochs` on
        self._began: dict[str, dict[str, Any]] = {}  # numbers of registered objects, before they are restored
        self._held: dict[str, dict[str, object]] = {}  # marks of their tensors, until a checkpoint has them
        self._compared = set[tuple[str, str]]()  # registered objects, and optimizers in them
        self._marks = [marks_of(optimizer) for optimizer in optimizers]
        self._beside: dict[str, object] | None = None  # what modules held when training began
        self._kept = dict[str, object]()  # the buffers with which the loop began
        self._at_head = dict[str, object]()  # what modules held at the head of a resumed epoch
        self._resumed = 0  # samples of that epoch before

    def register(self, objects: Mapping[str, Any]) -> None:
        """Look at these, too, which are not restored yet."""
        self._began |= {name: numbers_of(what) for name, what in objects.items()}
        for name, what in objects.items():
            self._held[name] = {attribute: mark_of(tensors) for attribute, tensors in tensors_held(what).items()}

    def _warn(self, message: str, remedy: str) -> None:
        self._say(f"warning: {message}: {remedy}")

    def begin_training(self) -> None:
        """Note what modules hold that no checkpoint has."""
        if self._beside is None:
            self._beside = held_by(self._models)

    def begin_loop(self, carried: Carried) -> None:
        """Look at what a program carries on in its loop over `run.epochs`, and at the buffers with which it begins."""
        self.carried = carried
        with OF_THE_PROGRAM:
            self._kept = kept_by(self._models)

    def begin_steps(self, frame: FrameType, resumed: int) -> None:
        """See Carried."""
        self._resumed, self._at_head = resumed, {}
        if self.carried is not None:
            self.carried.begin_steps(frame, resumed)
            with OF_THE_PROGRAM:
                now = kept_by(self._models) if resumed else {}
                changed = {name: mark for name, mark in now.items() if self._kept.get(name, mark) != mark}
                self._at_head = empty_in(self._models) | held_by(self._models) | changed if resumed else {}

    def end_steps(self, samples: int) -> None:
        """See Carried. And look what a model has gathered since the head of a resumed epoch, which set it back."""
        if self.carried is not None:
            self.carried.end_steps(samples)
            with OF_THE_PROGRAM:
                self._warn_of_gathered(self.carried)

    def _warn_of_gathered(self, carried: Carried) -> None:
        now = held_by(self._models) | kept_by(self._models) if self._at_head else {}
        for name in [name for name, mark in self._at_head.items() if now.get(name, mark) != mark]:
            path, _, attribute = name.rpartition(".")
            layers = [layer for model in self._models for at, layer in model.named_modules() if at == path]
            if any(carried.begins_anew(one, attribute, at_head=name in self._kept) for one in layers):
                remedy = "keep it in a buffer, and set it back in another epoch only"
                self._warn(f"{name} of a model {BEGAN_ANEW.format(self._resumed)}", remedy)
                return

    def _warn_of_modules(self) -> None:
        """Say once what the program changes in a model that no checkpoint has."""
        now = held_by(self._models) if self._beside else {}
        for name, began in (self._beside or {}).items():
            if now.get(name, began) != began and not (self.carried and self.carried.is_set_anew(self._models, name)):
                message = f"{name} of a model has changed, and no checkpoint has it"
                remedy = "keep it in a buffer with persistent=True, or set it anew in each step, as from run.progress"
                self._warn(message, remedy)
                self._beside = {}
                return

    def look(self) -> None:
        """Say what has changed since, each once. Call it for each checkpoint."""
        if self.carried is not None:
            self.carried.look(numbers=True)
        self._warn_of_modules()
        models, optimizers = self._models, self._optimizers
        shared = {id(one): one for one in (*models, *optimizers, *(p for model in models for p in model.parameters()))}
        for optimizer, marks in zip(optimizers, self._marks, strict=True):
            now, leaves = marks_of(optimizer), tree_leaves(optimizer.state_dict())
            held = {id(one) if isinstance(one, Tensor) else repr(one) for one in leaves}
            for attribute in [name for name, mark in marks.items() if now.get(name, mark) != mark]:
                parts = tree_leaves(getattr(optimizer, attribute))
                if not all((id(one) if isinstance(one, Tensor) else repr(one)) in held for one in parts):
                    del marks[attribute]
                    message = f"{attribute} of {type(optimizer).__name__} has changed, and no checkpoint has it"
                    remedy = "keep it in the optimizer's state or in a registered object"
                    self._warn(message, remedy)
            self._warn_of_inner(optimizer)
        apart = [*self._registered.values()]
        for name, what in self._registered.items():
            for attribute, value in forgotten(what, began := self._began[name], shared, apart).items():
                del began[attribute]
                message = f"its {attribute} has changed, and a resumed run would begin with {value}"
                remedy = "add it to its state_dict and load_state_dict"
                self._warn(f"run.register({name}=...): {message}", remedy)
            self._warn_of_tensors(name, what, shared)
            self._warn_of_optimizers(name, what)

    def _warn_of_inner(self, optimizer: torch.optim.Optimizer) -> None:
        """Say that what an optimizer saves has not the state of one in it, or not its own slow weights, as Lookahead often
        has both. Each is compared once, when there is one."""
        kind = type(optimizer).__name__
        states = {f"the state of {path} in {kind}": tree_leaves(one.state) for path, one in optimizers_in(optimizer)}
        own = [held for held in optimizer.state.values() if isinstance(held, dict)]
        states[f"the slow weights of {kind}"] = [held[key] for held in own for key in held if SLOW.search(str(key))]
        for what, leaves in states.items():
            tensors = [one for one in leaves if isinstance(one, Tensor)]
            if not tensors or (kind, what) in self._compared:
                continue
            self._compared.add((kind, what))
            largest = max(tensors, key=Tensor.numel)
            kept = [one for one in tree_leaves(optimizer.state_dict()) if isinstance(one, Tensor)]
            if not any(one is largest or (one.shape == largest.shape and torch.equal(one, largest)) for one in kept):
                remedy = "let its state_dict() have it in 'state', and its load_state_dict() take it from there"
                self._warn(f"no checkpoint has {what}", remedy)

    def _warn_of_optimizers(self, name: str, what: Any) -> None:
        """Say that a registered object steps an optimizer that its state has not, as a loss with a critic does. Each is
        compared once, when it has a state."""
        for path, one in optimizers_in(what):
            state = [part for part in tree_leaves(one.state) if isinstance(part, Tensor)]
            known = any(one is other for other in (*self._optimizers, *self._registered.values()))
            if known or not state or (name, path) in self._compared:
                continue
            self._compared.add((name, path))
            kept = [part for part in tree_leaves(what.state_dict()) if isinstance(part, Tensor)]
            if not any(part.shape == state[0].shape and torch.equal(part, state[0]) for part in kept):
                message = f"the state of its {path} is not in its own state"
                remedy = f"register it, too, as {path.rpartition('.')[2]}={name}.{path}"
                self._warn(f"run.register({name}=...): {message}", remedy)

    def _warn_of_tensors(self, name: str, what: Any, shared: Mapping[int, object]) -> None:
        """Say once that a registered object keeps what it learns in tensors or arrays that its state has not, as a metric of
        torchmetrics does. They may be computed from what its state has."""
        held, now = self._held[name], tensors_held(what)
        for attribute in [attribute for attribute, mark in held.items() if mark != mark_of(now.get(attribute, []))]:
            del held[attribute]
            if attribute not in now or is_restored(what, attribute, shared):
                continue
            if self.carried is not None and not self.carried.is_used_before_set(what, attribute):
                continue
            held.clear()
            torchs = callable(getattr(what, "persistent", None))
            remedy = "call its persistent(True)" if torchs else "add it to its state_dict and load_state_dict"
            message = f"its {attribute} has changed, and a resumed run would begin with that of a new one"
            self._warn(f"run.register({name}=...): {message}", remedy)
            return
