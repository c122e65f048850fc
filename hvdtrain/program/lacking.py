"""What no checkpoint has of optimizers and registered objects: each is said once, when it has changed."""

import contextlib
import copy
import functools
import io
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from hvdtrain.engines.accelerators import tensors_in
from hvdtrain.program.carried import Carried
from hvdtrain.program.marks import as_tensor, mark_of, names_changed, numbers_of, tensors_held
from hvdtrain.program.uses import OF_THE_PROGRAM

SLOW = re.compile("slow|shadow|ema|avg|average")  # keys of weights that an optimizer averages
MOST_COPIED = 10_000_000  # values


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

    def register(self, objects: Mapping[str, Any]) -> None:
        """Look at these, too, which are not restored yet."""
        self._began |= {name: state_of(what) for name, what in objects.items()}

    def look(self) -> None:
        """Say what has changed since, each once. Call it for each checkpoint."""
        if self.carried is not None:
            self.carried.look(in_steps=True)
        for optimizer, marks in zip(self._optimizers, self._marks, strict=True):
            with OF_THE_PROGRAM:
                self._look_at_optimizer(optimizer, marks)
        parameters = [one for model in self._models for one in model.parameters()]
        shared = {id(one): one for one in (*self._models, *self._optimizers, *parameters)}
        for name, what in self._registered.items():
            with OF_THE_PROGRAM:
                self._look_at_registered(name, what, shared)

    def _warn(self, message: str, remedy: str) -> None:
        self._say(f"warning: {message}: {remedy}")

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
        slow = [key for key in {key: None for x in own for key in x} if SLOW.search(str(key))]
        states[f"the slow weights of {kind}"] = [*tensors_in([x[key] for x in own for key in slow if key in x])]
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
