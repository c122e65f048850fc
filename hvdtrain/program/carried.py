"""What a program itself carries from step to step or from epoch to epoch, and no checkpoint has: the best value so far in a
variable of main(), a count in an object of its own.

What is set anew in each step or epoch is not lost, so the code of the loop is read: whether it may use a name before it
sets it.
"""

import contextlib
import inspect
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset, Sampler

from hvdtrain.checkpoint.randomness import is_generator
from hvdtrain.program.reached import (
    HOOK,
    MOST_PARTS,
    RESULT,
    GeneratorMark,
    Reached,
    Reading,
    differences_of,
    first_values,
    is_plain,
    orders_of,
)
from hvdtrain.program.shown import is_left, only_decides_prints, only_sets_keys
from hvdtrain.program.uses import (
    ATTRIBUTES,
    OF_ALL_NAMES,
    VARIABLES,
    codes_of,
    first_uses,
    is_computed_with,
    looks_for_keys,
    named,
    of_batches,
    only_sets,
    reads,
    stores,
    variables_of,
    words_from,
)

tree_iter = getattr(_pytree, "tree_iter", tree_leaves)  # torch 2.3 has none
Loops = Sequence[tuple[CodeType, int]]  # code, and the offset from which its loop begins
THE_GLOBAL = "the global "  # before the name of a variable of the module
SEEDS = {"manual_seed", "seed", "set_state", "setstate"}
CLOCKS = (time.time, time.perf_counter, time.monotonic)
MOST_LINES = 3
OF_OTHERS = re.compile(r"/(site-packages|dist-packages|lib/python[0-9.]+)/")  # in the names of files
KEEP_IT = "keep it in an object with state_dict and load_state_dict, and give that to run.register"
CARRIED_ON = "is carried on from step to step or epoch to epoch, and no checkpoint has it"
BEGAN_ANEW = "began anew when this epoch was resumed, without its first {} samples"
USED_AT_THE_END = "is set in some epochs and used after the last one, and no checkpoint has it"
HOOKING = re.compile(r"register_\w*hook$")
NOT_FILLED = ("0", "0.0", "(0,)")  # sums, and the marks of collections
# Around what reads values and code of the program: none of them may end a training, which runs without a warning, too.
OF_THE_PROGRAM = contextlib.suppress(Exception)


class Carried:
    """The variables of the function that has the loop over `run.epochs`, in this frame.

    saved: by name, the objects that a checkpoint has. of_run: what a resumed run knows, by its name in `run`. restored:
    the weights and states of optimizers that were, or none. orders: `orders_of` the run so far.
    """

    def __init__(
        self, frame: FrameType, say: Callable[[str], None], saved: Mapping[str, Any], models: Iterable[nn.Module],
        of_run: Callable[[], Mapping[str, Any]], *, restored: Sequence[Tensor], orders: Mapping[str, list[str]],
    ):  # fmt: skip
        self._frame: FrameType | None = frame
        self._code, self._offset, self._say, self._saved, self._of_run = frame.f_code, frame.f_lasti, say, saved, of_run
        modules = [*models, *(one for one in saved.values() if isinstance(one, nn.Module))]
        self._shared = {id(one) for module in modules for one in (*module.parameters(), *module.buffers())}
        self._globals, self._callers = frame.f_globals, list[CodeType]()  # the code that is running
        outer: FrameType | None = frame
        while outer is not None:
            self._callers += [outer.f_code] if outer.f_globals is self._globals else []
            outer = outer.f_back
        self._loops = [(frame.f_code, frame.f_lasti)]  # of epochs, and of steps
        self._clocks = [clock() for clock in CLOCKS]
        # By name: what changes with it, and not whose it is. What the program drops would be kept.
        self._began, self._first = set[str](), dict[str, object]()
        self.orders = dict(orders)
        self._told, self._lines = set[str](), 0
        self._judged = dict[str, bool]()  # by the name of a module: whether it is the program's own
        self._resumed, self._at_head = 0, dict[str, object]()  # the samples of a resumed epoch, what its steps find
        self._results: set[str] | None = None  # names of collections that have results of the model after a step
        self._at_steps: dict[str, Any] = {}  # of whoever takes the steps of an epoch, when they began
        with OF_THE_PROGRAM:
            self._began = set(self._marks())
            # A penalty that holds the weights near the first ones would hold them near the restored ones.
            names = {name.removeprefix(THE_GLOBAL): value for name, value in self._names().items()}
            now = orders_of(Reached(self._is_own, {id(one) for one in self._saved.values()}).collections(names))
            self.orders = {name: orders.get(name, held) for name, held in now.items()}
            for others, what in differences_of(self.orders, now):
                say(f"warning: {named(others, self._code)} {what}")
            if restored and (copies := self._copies(restored)):
                what = f"{named(copies, self._code)} has what was restored, and not what the run began with"
                say(f"warning: {what}: copy it before run.prepare(), or give the copy to run.register")

    def _copies(self, restored: Sequence[Tensor]) -> list[str]:
        """Return the names of modules, lists and dictionaries of tensors that are copies of these, and used as such."""
        assert self._frame is not None
        copies, saved = list[str](), {id(one) for one in self._saved.values()} | self._shared
        alike: dict[object, list[Tensor]] = {}  # by shape and first values: layers of one shape are many and large
        for weight in restored:
            alike.setdefault(first_values(weight), []).append(weight)
        for name, value in variables_of(self._frame, nn.Module | list | tuple | dict).items():  # type: ignore[arg-type]
            held = list(value.parameters()) if isinstance(value, nn.Module) else [*islice(tree_iter(value), MOST_PARTS)]
            tensors = [one for one in held if isinstance(one, Tensor) and one.is_floating_point() and one.numel() > 1]
            if tensors and not any(id(one) in saved for one in (value, *held)) and all(
                any(torch.equal(one, weight) for weight in alike.get(first_values(one), ())) for one in tensors
            ):  # fmt: skip
                used = self._is_loaded(name, emptied=True) or name in self._code.co_cellvars
                copies += [name] if used else []
        return copies

    def end(self) -> None:
        """Look no longer, and let the frame go."""
        self._frame = None

    def begin_steps(self, frame: FrameType, resumed: int) -> None:
        """Look whether something has changed since the steps of the first epoch began. frame: of whoever takes them.
        resumed: the number of samples that this epoch had before the run was resumed."""
        self._loops = [self._loops[0], (frame.f_code, frame.f_lasti)]
        with OF_THE_PROGRAM:
            self._resumed, self._at_head = resumed, {}
            if resumed:
                self._at_head = {name: leaf.mark for name, leaf in self._marks_of(variables_of(frame)).items()}
            self._first = self._first or {name: leaf.mark for name, leaf in self._marks().items()}
            self._at_steps = variables_of(frame, float)
        self.look()

    def end_steps(self, samples: int) -> None:
        """Look what an epoch that was resumed has gathered in its steps, of which this run had the rest alone, or none.
        samples: of the whole epoch."""
        before, self._at_head = self._at_head, {}
        with OF_THE_PROGRAM:
            # In an evaluation, they are plain tensors: here alone, such as a hook's last outputs are told from memories.
            if self._results is None and self._frame is not None:
                self._results = {name for name, leaf in self._marks().items() if RESULT in repr(leaf.mark)}
            # A mean that is printed for the epoch would be that of its last steps.
            now = self._marks_of(variables_of(self._of_steps())) if before else {}
            changed = [
                name for name, leaf in now.items()
                if repr(before.get(name, leaf.mark)) != repr(leaf.mark)
                or (samples == self._resumed and repr(leaf.mark) in NOT_FILLED)
            ]  # fmt: skip
            if gathered := [name for name in changed if name not in self._told and self._is_gathered(name, now[name])]:
                what = named(gathered, self._loops[-1][0])
                self._say(
                    f"warning: {what} {BEGAN_ANEW.format(self._resumed)}: {KEEP_IT}, and empty it in another epoch only"
                )

    def _is_gathered(self, name: str, leaf: Reading) -> bool:
        """Return whether an epoch begins with a new value, which its steps then use and change."""
        (epochs, first), (code, start) = self._loops
        variable, attribute = re.split(r"[.\[]", name)[0], name.rpartition(".")[2]
        own = leaf.owner is not None and self._is_own(type(leaf.owner))  # whose reset() need not set all
        if "LOAD" not in first_uses(code, start, variable, of=VARIABLES, emptied=not own) or self._is_time(leaf.mark):
            return False
        if leaf.owner is not None and self._is_set_first(type(leaf.owner), attribute, self._loops[-1:]):
            return False  # in each step: the last value only
        if first_uses(code, first if code is epochs else None, variable, of=VARIABLES, emptied=not own) == {"STORE"}:
            return True
        return leaf.owner is not None and self._is_set_anew(type(leaf.owner), attribute)

    def look(self, *, numbers: bool = False) -> None:
        """Say what has changed, each once. numbers: of numbers only: within an epoch, others may be emptied at its end."""
        with OF_THE_PROGRAM:
            self._look(numbers)
            if numbers:
                self._look_in_steps()

    def _look_in_steps(self) -> None:
        """Look at the numbers that an epoch sets, and its steps then change and compute with: if it is resumed, it begins
        with the first ones again."""
        code, start = self._loops[-1]
        now = variables_of(self._of_steps(), float) if self._frame is not None else {}
        changed = [name for name, value in now.items() if repr(self._at_steps.get(name, value)) != repr(value)]
        self._warn([name for name in changed if is_computed_with(code, start, name)], code)

    def _of_steps(self) -> FrameType:
        """Return the frame of whoever takes the steps."""
        frame: FrameType | None = sys._getframe()
        while frame is not None and frame.f_code is not self._loops[-1][0]:
            frame = frame.f_back
        assert frame is not None
        return frame

    def _is_time(self, mark: object) -> bool:
        times = [(began, clock()) for began, clock in zip(self._clocks, CLOCKS, strict=True)]
        return isinstance(mark, float) and any(low <= mark <= high for low, high in times)

    def _look(self, numbers: bool) -> None:
        now = self._marks(numbers=numbers) if self._frame is not None else {}
        for name, leaf in now.items() if self._first else ():  # a function has an attribute from its first call on
            if isinstance(leaf.owner, FunctionType):
                self._first.setdefault(name, leaf.mark)
        left = [name for name, leaf in now.items() if repr(self._first.get(name)) != repr(leaf.mark)]
        left = [name for name in left if now[name].owner is None and is_left(self._code, self._offset, name)]
        lost = [
            name for name, leaf in now.items()
            if (name in self._began or leaf.owner is not None) and name not in (self._results or ())
            and repr(self._first.get(name, leaf.mark)) != repr(leaf.mark)
        ]  # fmt: skip
        for name in [name for name in lost if self._is_filled(name, now[name])]:
            self._first[name] = now[name].mark
            lost.remove(name)
        lost = [name for name in lost if self._is_carried(name, now[name])]
        if not (lost or left):
            return
        known = tree_leaves([held for name, held in self._of_run().items() if name in self._code.co_names])
        others = [one for one in self._saved.values() if not isinstance(one, nn.Module) and not is_generator(one)]
        known += tree_leaves([one.state_dict() for one in others])
        texts = {repr(one) for one in known if is_plain(one)}
        marks = {name: now[name].mark for name in (*lost, *left)}
        lacking = {name for name, mark in marks.items() if repr(mark) not in texts and not self._is_time(mark)}
        lost = [name for name in lost if name in lacking]
        generators = all(isinstance(marks[name], GeneratorMark) for name in lost)
        self._warn(lost, self._code, "give it to run.register" if generators else KEEP_IT)
        left = [name for name in left if name in lacking]
        self._warn(left, self._code, f"run.load_best() has the best weights; of others, {KEEP_IT}", USED_AT_THE_END)

    def _is_filled(self, name: str, now: Reading) -> bool:
        """Return whether something was empty, as what the first epoch computes once: an attribute of a layer, which was
        None, or a dictionary of a module or a class. Such a dictionary may also grow, if only what is not in it is added."""
        before, variable = self._first[name], re.split(r"[.\[]", name.removeprefix(THE_GLOBAL))[0]
        if before is None:
            return isinstance(now.owner, nn.Module)
        if variable in self._code.co_varnames + self._code.co_cellvars or not isinstance(before, tuple):
            return False
        kept = isinstance(now.mark, tuple) and now.mark[1 : len(before)] == before[1:]
        return before == (0,) or (kept and self._is_cache(name.removeprefix(THE_GLOBAL)))

    def _is_cache(self, name: str) -> bool:
        """Return whether each function that has this name of a module or a class looks first whether a key is there."""
        last = name.rpartition(".")[2]
        having = [one.__code__ for _, one in self._functions(object) if isinstance(one, FunctionType)]
        having = [code for code in having if last in code.co_names and code is not self._code]
        return bool(having) and all(looks_for_keys(code, last) for code in having)

    def _warn(self, lost: Sequence[str], code: CodeType, remedy: str = KEEP_IT, message: str = CARRIED_ON) -> None:
        if (lost := [name for name in lost if name not in self._told]) and self._lines < MOST_LINES:
            self._told.update(lost)
            self._lines += 1
            self._say(f"warning: {named(lost, code)} {message}: {remedy}")

    def is_used_before_set(self, owner: object, attribute: str) -> bool:
        """Return whether a method of an object, or the loop, may read this attribute before it is set anew."""
        with OF_THE_PROGRAM:
            kind, skipped = type(owner), ("__init__", "state_dict", "load_state_dict")
            methods = [one for base in kind.__mro__ for name, one in vars(base).items() if name not in skipped]
            codes = [one.__code__ for one in methods if isinstance(one, FunctionType)]
            if any("LOAD" in first_uses(code, None, attribute, of=ATTRIBUTES) for code in codes):
                return not self._is_set_anew(kind, attribute)
            setters = tuple(name for name, one in self._functions(kind) if stores(one, attribute) == {"STORE"})
            loops = [first_uses(*loop, attribute, of=ATTRIBUTES, calls=setters) for loop in self._loops]
            return any("LOAD" in uses for uses in loops)
        return True

    def is_set_anew(self, models: Iterable[nn.Module], name: str) -> bool:
        """Return whether the program sets this attribute of layers before it trains, in each forward pass, step or epoch.
        What it sets after the steps of an epoch is lost if the run is resumed at its end."""
        path, _, attribute = name.rpartition(".")
        layers = [layer for model in models for at, layer in model.named_modules() if at == path]
        with OF_THE_PROGRAM:
            return all(self._is_set_anew(type(one), attribute) for one in layers if hasattr(one, attribute))
        return False

    def begins_anew(self, layer: nn.Module, attribute: str, *, at_head: bool) -> bool:
        """Return whether an epoch begins with a new value of this attribute of a layer, which its steps then use. at_head:
        its head has changed it."""
        kind = type(layer)
        with OF_THE_PROGRAM:
            anew = self._is_own(kind) if at_head else self._is_set_anew(kind, attribute)
            return anew and not self._is_set_first(kind, attribute, self._loops[-1:])
        return False

    def _is_set_anew(self, kind: type, attribute: str) -> bool:
        """Return whether each forward pass, step or epoch sets this attribute, before steps or micro-batches may use it."""
        stops = ("steps", "batches", *(code.co_name for code, _ in self._loops[1:]))
        return self._is_set_first(kind, attribute, self._loops, stops)

    def _is_set_first(self, kind: type, attribute: str, loops: Loops, stops: tuple[str, ...] = ()) -> bool:
        """Return whether each forward pass, or each time around one of these loops, sets this attribute before its use.
        stops: see `first_uses`."""
        if {"STORE"} in (stores(getattr(kind, name, None), attribute) for name in ("forward", "__call__")):
            return True
        setters = tuple(name for name, one in self._functions(kind) if stores(one, attribute) == {"STORE"})
        return any(
            first_uses(code, start, attribute, of=ATTRIBUTES, calls=setters, stops=stops, emptied=True) == {"STORE"}
            for code, start in [*loops, *(one for code, _ in loops for one in of_batches(code))]
        )

    def _functions(self, kind: type, but: type | tuple[()] = ()) -> Iterator[tuple[str, Any]]:
        """Yield the functions of the program, and the methods of its classes, `but` these, and of this one, with names."""
        classes = {one for one in self._globals.values() if isinstance(one, type) and self._is_own(one)}
        classes = {one for one in classes if not issubclass(one, but)} | {kind}
        yield from (pair for held in (self._globals, *map(vars, classes)) for pair in held.items())

    def _called(self) -> set[str]:
        """Return the names that the loops have."""
        return {name for loop in self._loops for name in words_from(*loop)}

    def _is_seeded_anew(self, owner: object) -> bool:
        """Return whether the program seeds generators in its loops, or in what it calls there."""
        called = self._called()
        codes = [getattr(one, "__code__", None) for name, one in self._functions(type(owner)) if name in called]
        return bool(SEEDS & called.union(*(code.co_names for code in codes if code is not None)))

    def _is_kept(self, owner: object, attribute: str) -> bool:
        """Return whether an object keeps this attribute, and no method sets it anew."""
        kind = owner if isinstance(owner, type) else type(owner)
        called = self._called()
        methods = [pair for base in reversed(kind.__mro__) for pair in vars(base).items()]
        data = isinstance(owner, Dataset)
        if data:  # what reading changes has a line of its own
            functions = [
                *self._globals.values(),
                *(one for name, one in self._functions(object, but=Dataset) if name in called),
            ]
            called |= {word for one in functions if isinstance(one, FunctionType) for word in one.__code__.co_names}
            methods = [(method, one) for method, one in methods if method in called]
            codes = [one.__code__ for _, one in methods if isinstance(one, FunctionType)]
            if attribute not in called and not any(attribute in code.co_names for code in codes):
                return False
        uses = {method: used for method, one in methods if (used := stores(one, attribute))}
        at_times = not data and called & uses.keys() and not self._is_set_anew(kind, attribute)
        return not uses or bool(at_times) or any("LOAD" in used for used in uses.values())  # else as by set_epoch

    def _is_read(self, kind: type, attribute: str) -> bool:
        """Return whether the program or a library reads this attribute of a class, or may do so. Of a class of the program,
        only its own functions do."""
        bases = [base for base in kind.__mro__ if base is not object]
        names = [self._globals, *map(vars, self._own_modules().values())]
        held = [one for module in names for one in module.values() if isinstance(one, FunctionType | type)]
        others = [one for one in held if self._is_own(one) and isinstance(one, type) and one not in bases]
        functions = [one for one in held if self._is_own(one) and isinstance(one, FunctionType)]
        codes = self._callers + [code for one in (*bases, *functions) for code in codes_of(one)]
        if not all(map(self._is_own, bases)) or any(OF_ALL_NAMES & set(code.co_names) for code in codes):
            return True  # of another class, `vars(self)` is of its own attributes
        codes += [code for one in others for code in codes_of(one)]
        return any(reads(code, attribute) for code in codes)

    def _is_carried(self, name: str, leaf: Reading) -> bool:
        owner = leaf.owner
        if isinstance(leaf.mark, GeneratorMark) and self._is_seeded_anew(owner):
            return False
        variable = re.split(r"[.\[]", name.removeprefix(THE_GLOBAL))[0]
        attribute = re.split(r"\[", name.rpartition(".")[2])[0]
        if isinstance(owner, FunctionType):
            if first_uses(owner.__code__, None, attribute, of=("_DEREF",)) == {"STORE"}:
                return False
            if attribute in vars(owner) and self._is_set_by_call(owner, attribute):
                return False
        elif isinstance(owner, nn.Module | Sampler):
            if self._is_set_anew(type(owner), attribute):
                return False
        elif owner is not None:
            kind = owner if isinstance(owner, type) else type(owner)
            if not self._is_kept(owner, attribute) or self._is_set_anew(kind, attribute):
                return False
            if not self._is_read(kind, attribute):
                return False
        here = owner is None or self._is_here(owner)
        if here and only_decides_prints(self._code, attribute if owner is not None else variable):
            return False
        if name == THE_GLOBAL + variable and only_sets_keys(self._code, variable, self._globals.get(variable)):
            return False
        of_function = isinstance(owner, FunctionType)
        if (owner is None or of_function) and self._is_set_by_hooks(attribute if of_function else variable):
            return False
        if name.startswith(THE_GLOBAL):
            if variable in (modules := self._own_modules()):
                inner = re.split(r"[.\[]", name.removeprefix(THE_GLOBAL))[1]
                return inner in self._called() or self._is_used_in(vars(modules[variable]), inner)
            in_loop = first_uses(self._code, self._offset, variable, of=("_GLOBAL",), emptied=owner is None)
            return in_loop != {"STORE"} and ("LOAD" in in_loop or self._is_used_in(self._globals, variable))
        of_class = isinstance(self._globals.get(variable), type)
        if variable in self._code.co_cellvars or of_class or HOOK in name.split("."):
            return True
        emptied = owner is None or not self._is_own(type(owner))
        return self._is_loaded(variable, emptied=emptied)

    def _is_loaded(self, variable: str, *, emptied: bool = False) -> bool:
        """Return whether the loop over the epochs may use a variable before it sets it."""
        return "LOAD" in first_uses(self._code, self._offset, variable, of=VARIABLES, emptied=emptied)

    def _is_set_by_call(self, function: FunctionType, attribute: str) -> bool:
        """Return whether each step or epoch sets this attribute of a function before its use, and no other one reads it."""
        held = [one.__code__ for _, one in self._functions(FunctionType) if isinstance(one, FunctionType)]
        read = any(reads(code, attribute) for code in held if code not in (function.__code__, self._code))
        anew = self._is_set_anew(FunctionType, attribute)
        return anew or (not read and self._is_set_first(FunctionType, attribute, self._loops))

    def _is_set_by_hooks(self, variable: str) -> bool:
        """Return whether hooks of an optimizer or a layer set a collection, each time anew, and a step reads it after its
        micro-batches alone."""
        code, start = self._loops[-1]
        if first_uses(code, start, variable, of=VARIABLES, calls=("batches",)) != {"STORE"}:
            return False
        functions = [one.__code__ for one in self._globals.values() if isinstance(one, FunctionType)]
        inner = [one for one in self._code.co_consts if isinstance(one, CodeType)]
        having = [one for one in (*functions, *inner) if variable in one.co_names + one.co_freevars]
        hooked = any(HOOKING.match(name) for name in self._code.co_names)
        return hooked and bool(having) and all(one is self._code or only_sets(one, variable) for one in having)

    def _is_used_in(self, module: Mapping[str, Any], variable: str) -> bool:
        """Return whether a function of a module may use its variable before it sets it."""
        codes = [one.__code__ for one in module.values() if isinstance(one, FunctionType)]
        others = [code for code in codes if variable in code.co_names and code is not self._code]
        return any("LOAD" in first_uses(code, None, variable, of=("_GLOBAL",)) for code in others)

    def _marks(self, *, numbers: bool = False) -> dict[str, Reading]:
        """Return what the program's variables reach, by name."""
        return self._marks_of(self._names(numbers=numbers), numbers=numbers)

    def _names(self, *, numbers: bool = False) -> dict[str, Any]:
        """Return the program's variables, those of its other modules, too, by name."""
        assert self._frame is not None
        names = variables_of(self._frame)
        outer = dict[str, Any]()
        if self._code.co_flags & inspect.CO_OPTIMIZED or self._frame.f_locals is not self._globals:
            outer |= self._globals
        for short, module in self._own_modules().items() if not numbers else ():
            outer |= {f"{short}.{name}": one for name, one in vars(module).items() if not name.startswith("__")}
        return names | {THE_GLOBAL + name: one for name, one in outer.items() if not name.startswith("__")}

    def _marks_of(self, names: Mapping[str, Any], *, numbers: bool = False) -> dict[str, Reading]:
        """Return what these names reach."""
        apart = self._shared | {id(one) for one in self._saved.values()}
        for loader in [one for one in names.values() if isinstance(one, DataLoader)]:
            samplers = [loader, loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)]
            drawn = [one for sampler in samplers for one in getattr(sampler, "__dict__", {}).values()]
            # What these draw with is seeded, and a collate_fn has lines of its own.
            apart |= {id(loader.collate_fn), *(id(one) for one in drawn if is_generator(one))}
        reached = Reached(self._is_own, apart)
        # What two variables reach has the name of the one that the loop uses.
        for name, value in sorted(
            names.items(), key=lambda pair: not self._is_loaded(pair[0].removeprefix(THE_GLOBAL))
        ):
            followed = not isinstance(value, FunctionType | type) or self._is_own(value)
            if is_plain(value) or (followed and not numbers and not isinstance(value, ModuleType)):
                with OF_THE_PROGRAM:
                    reached.add(name.removeprefix(THE_GLOBAL) if isinstance(value, type) else name, value)
            elif followed and isinstance(value, FunctionType):
                for attribute, one in vars(value).items():
                    if is_plain(one):
                        reached.add(f"{name}.{attribute}", one, value)
        if "environ" in self._called() and not numbers:
            reached.add(THE_GLOBAL + "os.environ", os.environ)
        return reached.leaves

    def _own_modules(self) -> dict[str, ModuleType]:
        """Return the program's other modules, from which it has its names, by the last part of theirs."""
        found, waiting = dict[str, ModuleType](), [self._globals]
        while waiting:
            for value in list(waiting.pop().values()):
                of: Any = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
                if self._is_own_module(of) and of not in (*found, self._globals.get("__name__")):
                    found[of] = sys.modules[of]
                    waiting.append(vars(found[of]))
        return {name.rpartition(".")[2]: module for name, module in found.items()}

    def _is_own_module(self, name: Any) -> bool:
        """Return whether the module of this name is the program's own: beside it, or below."""
        if not isinstance(name, str) or name not in sys.modules:
            return False
        if name not in self._judged:  # the question is asked of each value, at each epoch
            file = getattr(sys.modules[name], "__file__", None) or ""
            known = name.partition(".")[0] == "hvdtrain" or OF_OTHERS.search(file)
            self._judged[name] = not known and file.startswith(str(Path(self._code.co_filename).parent))
        return self._judged[name]

    def _is_here(self, owner: object) -> bool:
        """Return whether the class of an object, or a function, is in the file of the loop."""
        kind = owner if isinstance(owner, type | FunctionType) else type(owner)
        return getattr(kind, "__module__", None) == self._globals.get("__name__")

    def _is_own(self, what: Any) -> bool:
        """Return whether a class or function is the program's own."""
        name = getattr(what, "__module__", None)
        return name == self._globals.get("__name__") or self._is_own_module(name)
