"""What a program itself carries from step to step or from epoch to epoch, and no checkpoint has: the best value so far in a
variable of main(), a count in an object of its own.

What is set anew in each step or epoch is not lost, so the code of the loop is read: whether it may use a name before it
sets it.
"""

import contextlib
import inspect
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any
from weakref import WeakValueDictionary

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset, Sampler

from hvdtrain.checkpoint.uses import ATTRIBUTES, VARIABLES, first_uses, of_batches, stores

PLAIN_NUMBERS = (bool, int, float, type(None))
CONTAINERS = (list, dict, set, deque)
MOST_ELEMENTS = 1_000
THE_GLOBAL = "the global "  # before the name of a variable of the module
CLOCKS = (time.time, time.perf_counter, time.monotonic)
SHOWN = 3  # names
# Around what reads values and code of the program: none of them may end a training, which runs without a warning, too.
OF_THE_PROGRAM = contextlib.suppress(Exception)


def size_of(held: Any) -> tuple[Any, ...]:
    """Return the length of a list or dictionary, and its first parts: numbers, and the identity of others."""
    parts = list(held.values() if isinstance(held, dict) else held)[:MOST_ELEMENTS]
    return len(held), *(one if type(one) in PLAIN_NUMBERS else id(one) for one in parts)


class Carried:
    """The variables of the function that has the loop over `run.epochs`, in this frame.

    saved: by name, the objects that a checkpoint has. of_run: what a resumed run knows, by its name in `run`.
    """

    def __init__(
        self, frame: FrameType, say: Callable[[str], None], saved: Mapping[str, Any], models: Iterable[nn.Module],
        of_run: Callable[[], Mapping[str, Any]],
    ):  # fmt: skip
        self._frame: FrameType | None = frame
        self._code, self._offset, self._say, self._saved, self._of_run = frame.f_code, frame.f_lasti, say, saved, of_run
        modules = [*models, *(one for one in saved.values() if isinstance(one, nn.Module))]
        self._shared = {id(one) for module in modules for one in (*module.parameters(), *module.buffers())}
        self._globals = frame.f_globals
        self._loops = [(frame.f_code, frame.f_lasti)]  # of epochs, and of steps
        self._modules = WeakValueDictionary[
            str, nn.Module
        ]()  # the program's own, of whose layers attributes are looked at
        self._clocks = [clock() for clock in CLOCKS]
        self._began, self._first = dict[str, Any](), dict[str, Any]()
        with OF_THE_PROGRAM:
            self._began = self._marks()

    def end(self) -> None:
        """Look no longer, and let the frame go."""
        self._frame = None

    def begin_steps(self, frame: FrameType) -> None:
        """Look whether something has changed since the steps of the first epoch began. frame: of whoever takes them."""
        self._loops = [self._loops[0], (frame.f_code, frame.f_lasti)]
        with OF_THE_PROGRAM:
            self._first = self._first or self._marks()
        self.look()

    def look(self, *, numbers: bool = False) -> None:
        """Warn once of what has changed. numbers: of numbers only: within an epoch, others may be emptied at its end."""
        with OF_THE_PROGRAM:
            self._look(numbers)

    def _look(self, numbers: bool) -> None:
        now = self._marks(numbers=numbers) if self._frame is not None else {}
        changed = [
            name for name, mark in now.items()
            if name in self._began and self._first.get(name, mark) is not mark and repr(self._first[name]) != repr(mark)
        ]  # fmt: skip
        if not (lost := [name for name in changed if self._is_carried(name)]):
            return
        known = tree_leaves([held for name, held in self._of_run().items() if name in self._code.co_names])
        known += tree_leaves([one.state_dict() for one in self._saved.values() if not isinstance(one, nn.Module)])
        texts = {repr(one) for one in known if type(one) in PLAIN_NUMBERS}
        clocks = [(began, clock()) for began, clock in zip(self._clocks, CLOCKS, strict=True)]
        lost = [
            name for name in lost
            if repr(now[name]) not in texts
            and not (isinstance(now[name], float) and any(low <= now[name] <= high for low, high in clocks))
        ]  # fmt: skip
        if lost:
            self.end()
            what = ", ".join(lost[:SHOWN]) + (", ..." if len(lost) > SHOWN else "")
            remedy = "keep it in an object with state_dict and load_state_dict, and give that to run.register"
            where = "the program" if self._code.co_name == "<module>" else f"{self._code.co_name}()"
            message = f"{what} of {where} is carried on from step to step or epoch to epoch, and no checkpoint has it"
            self._say(f"warning: {message}: {remedy}")

    def is_set_anew(self, models: Iterable[nn.Module], name: str) -> bool:
        """Return whether the program sets this attribute of layers before it trains, in each forward pass, step or epoch.
        What it sets after the steps of an epoch is lost if the run is resumed at its end."""
        path, _, attribute = name.rpartition(".")
        layers = [layer for model in models for at, layer in model.named_modules() if at == path]
        with OF_THE_PROGRAM:
            return all(self._is_set_anew(type(one), attribute) for one in layers if hasattr(one, attribute))
        return False

    def _is_set_anew(self, kind: type, attribute: str) -> bool:
        functions = (self._globals | dict(vars(kind))).items()
        setters = tuple(name for name, one in functions if stores(one, attribute) == {"STORE"})
        if stores(getattr(kind, "forward", None), attribute) == {"STORE"}:
            return True
        stops = ("steps", "batches", *(code.co_name for code, _ in self._loops[1:]))
        return any(
            first_uses(code, start, attribute, of=ATTRIBUTES, calls=setters, stops=stops) == {"STORE"}
            for code, start in [*self._loops, *(one for code, _ in self._loops for one in of_batches(code))]
        )

    def _numbers_in(self, name: str, what: object) -> dict[str, Any]:
        """Return the numbers, and lengths of lists, of an object or a class, but for those that a method sets anew."""
        held, kind = dict[str, Any](), what if isinstance(what, type) else type(what)
        called, data = {word for code, _ in self._loops for word in code.co_names}, isinstance(what, Dataset)
        for attribute, number in getattr(what, "__dict__", {}).items():
            number = size_of(number) if isinstance(number, CONTAINERS) else number
            if type(number) in (*PLAIN_NUMBERS, tuple) and not attribute.startswith("__"):
                methods = [pair for base in kind.__mro__ for pair in vars(base).items()]
                if data:  # what reading changes has a line of its own
                    methods = [(method, one) for method, one in methods if method in called]
                    codes = [one.__code__ for _, one in methods if isinstance(one, FunctionType)]
                    if attribute not in called and not any(attribute in code.co_names for code in codes):
                        continue
                uses = {method: used for method, one in methods if (used := stores(one, attribute))}
                at_times = not data and called & uses.keys() and not self._is_set_anew(kind, attribute)
                if not uses or at_times or any("LOAD" in used for used in uses.values()):  # else as by set_epoch
                    held[f"{name}.{attribute}"] = number
        return held

    def _is_carried(self, name: str) -> bool:
        variable, _, inner = name.partition(".")
        if name.startswith(THE_GLOBAL):
            variable, of = name.removeprefix(THE_GLOBAL), ("_GLOBAL",)
            functions = [one.__code__ for one in self._globals.values() if isinstance(one, FunctionType)]
            in_loop = first_uses(self._code, self._offset, variable, of=of)
            others = [code for code in functions if variable in code.co_names and code is not self._code]
            uses = [in_loop, *(first_uses(code, None, variable, of=of) for code in others)]
            return in_loop != {"STORE"} and any("LOAD" in use for use in uses)
        if ".sampler." in name and self._is_set_anew(Sampler, name.rpartition(".")[2]):
            return False
        if inner and variable in self._modules and self.is_set_anew([self._modules[variable]], inner):
            return False
        if variable in self._code.co_cellvars or isinstance(self._globals.get(variable), type):
            return True
        return "LOAD" in first_uses(self._code, self._offset, variable, of=VARIABLES)

    def _marks(self, *, numbers: bool = False) -> dict[str, Any]:
        """Return what shows whether variables change, and numbers of the program's own objects in them, by name."""
        from hvdtrain.checkpoint.objects import held_by, mark_of, tensors_held

        assert self._frame is not None
        saved, marks = {id(one) for one in self._saved.values()}, dict[str, Any]()
        held = self._frame.f_locals
        for name, value in held.items():
            if type(value) in PLAIN_NUMBERS:
                marks[name] = value
            elif numbers or id(value) in saved or isinstance(value, Sampler):
                continue
            elif isinstance(value, CONTAINERS):
                marks[name] = size_of(value)
            elif isinstance(value, (Tensor, nn.Module)):
                tensors = [value] if isinstance(value, Tensor) else [*value.parameters(), *value.buffers()]
                if not any(id(one) in self._shared or one.grad_fn is not None for one in tensors):
                    marks[name] = mark_of(tensors)
                    if isinstance(value, nn.Module) and self._is_own(type(value)):
                        marks |= {f"{name}.{inner}": mark for inner, mark in held_by([value]).items()}
                        self._modules[name] = value
            elif isinstance(value, DataLoader):
                for sampler in (value.sampler, getattr(value.batch_sampler, "sampler", None)):
                    for attribute, tensors in tensors_held(sampler).items():
                        marks[f"{name}.sampler.{attribute}"] = mark_of(tensors)
                if self._is_own(type(value.dataset)) and not any(value.dataset is one for one in held.values()):
                    marks |= self._numbers_in(f"{name}.dataset", value.dataset)
            elif self._is_own(type(value)):
                marks |= self._numbers_in(name, value)
        if held is not self._globals:
            for name, value in self._globals.items():
                if type(value) in PLAIN_NUMBERS:
                    marks[THE_GLOBAL + name] = value
                elif isinstance(value, type) and not numbers and value.__module__ == self._globals.get("__name__"):
                    marks |= self._numbers_in(name, value)
        # Of a function, before Python 3.13, a copy that would stay; of others, the program's own names.
        if type(held) is dict and self._code.co_flags & inspect.CO_OPTIMIZED:
            held.clear()
        return marks

    def _is_own(self, kind: type) -> bool:
        """Return whether a class is the program's own: beside it."""
        if kind.__module__.partition(".")[0] == "hvdtrain":
            return False
        file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
        return "site-packages" not in file and file.startswith(str(Path(self._code.co_filename).parent))
