"""Whether a program sets something anew before it uses it: in each step, epoch or forward pass. Then a resumed run loses
nothing.

Its loops are read, and the functions and classes of its own modules, by their bytecode: see uses.py.
"""

import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from inspect import getattr_static
from pathlib import Path
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

from torch import nn
from torch.utils.data import Dataset, Sampler

from hvdtrain.program.computed import computed_once_from, is_overwritten
from hvdtrain.program.reached import HOOK, GeneratorMark, Reading, is_plain
from hvdtrain.program.shown import only_decides_prints, only_sets_keys
from hvdtrain.program.source import syntax_of
from hvdtrain.program.uses import (
    OF_ALL_NAMES,
    OF_ATTRIBUTES,
    OF_VARIABLES,
    attributes_set,
    codes_of,
    first_uses,
    is_closed_over,
    looks_for_keys,
    of_batches,
    only_sets,
    reads,
    stores,
    words_from,
)

THE_GLOBAL = "the global "  # before the name of a variable of the module
SEEDS = {"manual_seed", "seed", "set_state", "setstate"}
HOOKING = re.compile(r"register_\w*hook$")
OF_OTHERS = re.compile(r"/(site-packages|dist-packages|lib/python[0-9.]+)/")  # in the names of files


def variable_of(name: str) -> str:
    """Return the variable from which the path of a value begins."""
    return re.split(r"[.\[]", name.removeprefix(THE_GLOBAL))[0]


def codes_in(values: Iterable[object]) -> list[CodeType]:
    """Return the code of the functions among these."""
    return [one.__code__ for one in values if isinstance(one, FunctionType)]


class Loops:
    """The loop over `run.epochs`, in this frame, that over steps in it, and the modules of the program.

    all: code, and the offset from which each loop begins; of the steps, once they have begun.
    """

    def __init__(self, frame: FrameType):
        self.code, self.offset, self.globals = frame.f_code, frame.f_lasti, frame.f_globals
        self.all = [(frame.f_code, frame.f_lasti)]
        self._callers = list[CodeType]()  # the code that is running
        self._judged = dict[str, bool]()  # by the name of a module: whether it is the program's own
        outer: FrameType | None = frame
        while outer is not None:
            self._callers += [outer.f_code] if outer.f_globals is self.globals else []
            outer = outer.f_back

    def begin_steps(self, frame: FrameType) -> None:
        """Note the loop over the steps of an epoch."""
        self.all = [self.all[0], (frame.f_code, frame.f_lasti)]

    # ---- the program's own modules, classes and functions

    def is_own(self, what: Any) -> bool:
        """Return whether a class or function is the program's own."""
        name = getattr(what, "__module__", None)
        return name == self.globals.get("__name__") or self._is_own_module(name)

    def _is_own_module(self, name: Any) -> bool:
        """Return whether the module of this name is the program's own: beside it, or below."""
        if not isinstance(name, str) or name not in sys.modules:
            return False
        if name not in self._judged:  # the question is asked of each value, at each epoch
            file = getattr(sys.modules[name], "__file__", None) or ""
            known = name.partition(".")[0] == "hvdtrain" or OF_OTHERS.search(file)
            self._judged[name] = not known and file.startswith(str(Path(self.code.co_filename).parent))
        return self._judged[name]

    def own_modules(self) -> dict[str, ModuleType]:
        """Return the program's other modules, from which it has its names, by the last part of theirs."""
        found, waiting = dict[str, ModuleType](), [self.globals]
        while waiting:
            for value in list(waiting.pop().values()):
                of: Any = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
                if self._is_own_module(of) and of not in (*found, self.globals.get("__name__")):
                    found[of] = sys.modules[of]
                    waiting.append(vars(found[of]))
        return {name.rpartition(".")[2]: module for name, module in found.items()}

    def _functions(self, kind: type, but: type | tuple[()] = ()) -> Iterator[tuple[str, Any]]:
        """Yield the functions of the program, and the methods of its classes, `but` these, and of this one, with names."""
        classes = {one for one in self.globals.values() if isinstance(one, type) and self.is_own(one)}
        classes = {one for one in classes if not issubclass(one, but)} | {kind}
        yield from (pair for held in (self.globals, *map(vars, classes)) for pair in held.items())

    def called(self) -> set[str]:
        """Return the names that the loops have."""
        return {name for loop in self.all for name in words_from(*loop)}

    # ---- of any value that has changed

    def is_carried(self, name: str, leaf: Reading) -> bool:
        """Return whether the loops, or what they call, may use a value before they set it. name: see `Reached`."""
        owner, variable, attribute = leaf.owner, variable_of(name), name.rpartition(".")[2].partition("[")[0]
        if isinstance(leaf.mark, GeneratorMark) and self._is_seeded_anew(owner):
            return False
        if owner is not None and not self._is_kept_by(owner, attribute):
            return False
        if owner is None and (syntax := syntax_of(self.code)) is not None and is_overwritten(syntax[1], variable):
            return False
        here = owner is None or self._is_here(owner)
        if here and only_decides_prints(self.code, variable if owner is None else attribute):
            return False
        if name == THE_GLOBAL + variable and only_sets_keys(self.code, variable, self.globals.get(variable)):
            return False
        of_function = isinstance(owner, FunctionType)
        if (owner is None or of_function) and self._is_set_by_hooks(attribute if of_function else variable):
            return False
        if name.startswith(THE_GLOBAL):
            return self._is_global_used(name, emptied=owner is None)
        of_class = isinstance(self.globals.get(variable), type)
        if is_closed_over(self.code, self.offset, variable) or of_class or HOOK in name.split("."):
            return True
        return self.is_loaded(variable, emptied=owner is None or not self.is_own(type(owner)))

    def is_loaded(self, variable: str, *, emptied: bool = False) -> bool:
        """Return whether the loop over the epochs may use a variable before it sets it."""
        return "LOAD" in first_uses(self.code, self.offset, variable, of=OF_VARIABLES, emptied=emptied)

    def _is_global_used(self, name: str, *, emptied: bool) -> bool:
        """Return whether the loop, or a function, may use a variable of the module, or of another one, before it is set."""
        variable, modules = variable_of(name), self.own_modules()
        if variable in modules:
            inner = re.split(r"[.\[]", name.removeprefix(THE_GLOBAL))[1]
            return inner in self.called() or self._is_used_in(vars(modules[variable]), inner)
        in_loop = first_uses(self.code, self.offset, variable, of=("_GLOBAL",), emptied=emptied)
        return in_loop != {"STORE"} and ("LOAD" in in_loop or self._is_used_in(self.globals, variable))

    def _is_used_in(self, module: Mapping[str, Any], variable: str) -> bool:
        """Return whether a function of a module may use its variable before it sets it."""
        others = [code for code in codes_in(module.values()) if variable in code.co_names and code is not self.code]
        return any("LOAD" in first_uses(code, None, variable, of=("_GLOBAL",)) for code in others)

    def is_gathered(self, name: str, owner: object) -> bool:
        """Return whether an epoch begins with a new value, which its steps then use and change."""
        (epochs, first), (code, start) = self.all
        variable, kind, attribute = variable_of(name), type(owner), name.rpartition(".")[2]
        emptied = owner is None or not self.is_own(kind)  # of an own class, reset() need not set all
        if "LOAD" not in first_uses(code, start, variable, of=OF_VARIABLES, emptied=emptied):
            return False
        if owner is not None and self._is_set_first(kind, attribute, self.all[-1:]):
            return False  # in each step: the last value only
        at_head = first_uses(code, first if code is epochs else None, variable, of=OF_VARIABLES, emptied=emptied)
        return at_head == {"STORE"} or (owner is not None and self.is_set_anew(kind, attribute))

    # ---- of attributes

    def _is_kept_by(self, owner: object, attribute: str) -> bool:
        """Return whether an object keeps this attribute for a later step, or a function what it closes over."""
        if isinstance(owner, FunctionType):
            if first_uses(owner.__code__, None, attribute, of=("_DEREF",)) == {"STORE"}:
                return False
            return attribute not in vars(owner) or not self._is_set_by_call(owner, attribute)
        kind = owner if isinstance(owner, type) else type(owner)
        if self.is_set_anew(kind, attribute):
            return False
        if isinstance(owner, nn.Module | Sampler):
            return True
        return self._is_kept(owner, kind, attribute) and self._is_read(kind, attribute)

    def is_set_anew(self, kind: type, attribute: str) -> bool:
        """Return whether each forward pass, step or epoch sets this attribute, before steps or micro-batches may use it.
        What is set after the steps of an epoch is lost if the run is resumed at its end."""
        stops = ("steps", "batches", *(code.co_name for code, _ in self.all[1:]))
        return self._is_set_first(kind, attribute, self.all, stops)

    def begins_anew(self, kind: type, attribute: str, *, at_head: bool) -> bool:
        """Return whether an epoch begins with a new value of this attribute of a layer, which its steps then use. at_head:
        its head has changed it."""
        anew = self.is_own(kind) if at_head else self.is_set_anew(kind, attribute)
        return anew and not self._is_set_first(kind, attribute, self.all[-1:])

    def is_kept_in_steps(self, owner: object, attribute: str) -> bool:
        """Return whether an object of the program keeps this attribute for the next step. Layers have lines of their own."""
        if isinstance(owner, nn.Module | Sampler | Dataset | type | FunctionType):
            return False
        read = [
            name for name, one in self._functions(type(owner)) for code in codes_in([one]) if reads(code, attribute)
        ]
        setters = self._setters(type(owner), attribute)
        anew = self._is_set_first(type(owner), attribute, self.all[-1:], tuple({*read}.difference(setters)))
        return not anew and (
            attribute in attributes_set(self.all[-1][0]) or self._is_kept(owner, type(owner), attribute)
        )

    def is_used_before_set(self, kind: type, attribute: str) -> bool:
        """Return whether a method of a registered object, or the loop, may read this attribute before it is set anew."""
        skipped = ("__init__", "state_dict", "load_state_dict")
        methods = [one for base in kind.__mro__ for name, one in vars(base).items() if name not in skipped]
        if any("LOAD" in first_uses(code, None, attribute, of=OF_ATTRIBUTES) for code in codes_in(methods)):
            return not self.is_set_anew(kind, attribute)
        setters = self._setters(kind, attribute)
        return any("LOAD" in first_uses(*loop, attribute, of=OF_ATTRIBUTES, calls=setters) for loop in self.all)

    def _is_set_first(
        self, kind: type, attribute: str, loops: Sequence[tuple[CodeType, int]], stops: tuple[str, ...] = ()
    ) -> bool:
        """Return whether each forward pass, or each time around one of these loops, sets this attribute before its use.
        stops: see `first_uses`."""
        if {"STORE"} in (stores(getattr(kind, name, None), attribute) for name in ("forward", "__call__")):
            return True
        setters = self._setters(kind, attribute)
        return any(
            first_uses(code, start, attribute, of=OF_ATTRIBUTES, calls=setters, stops=stops, emptied=True) == {"STORE"}
            for code, start in [*loops, *(one for code, _ in loops for one in of_batches(code))]
        )

    def _setters(self, kind: type, attribute: str) -> tuple[str, ...]:
        """Return the functions that set this attribute anew."""
        return tuple(name for name, one in self._functions(kind) if stores(one, attribute) == {"STORE"})

    def _is_kept(self, owner: object, kind: type, attribute: str) -> bool:
        """Return whether an object keeps this attribute, and no method sets it anew."""
        called, data = self.called(), isinstance(owner, Dataset)
        methods = [pair for base in reversed(kind.__mro__) for pair in vars(base).items()]
        if data:  # what reading changes has a line of its own
            others = [one for name, one in self._functions(object, but=Dataset) if name in called]
            called = called.union(*(code.co_names for code in codes_in([*self.globals.values(), *others])))
            methods = [(name, one) for name, one in methods if name in called]
            codes = codes_in(one for _, one in methods)
            if attribute not in called and not any(attribute in code.co_names for code in codes):
                return False
        uses = {name: used for name, one in methods if (used := stores(one, attribute))}
        at_times = not data and bool(called & uses.keys())  # else as by set_epoch
        return not uses or at_times or any("LOAD" in used for used in uses.values())

    def _is_read(self, kind: type, attribute: str) -> bool:
        """Return whether the program or a library reads this attribute of a class, or may do so. Of a class of the program,
        only its own functions do."""
        bases = [base for base in kind.__mro__ if base is not object]
        modules = [self.globals, *map(vars, self.own_modules().values())]
        held = [one for names in modules for one in names.values() if isinstance(one, FunctionType | type)]
        own = [one for one in held if self.is_own(one) and one not in bases]
        functions = [one for one in own if isinstance(one, FunctionType)]
        codes = self._callers + [code for one in (*bases, *functions) for code in codes_of(one)]
        if not all(map(self.is_own, bases)) or any(OF_ALL_NAMES & set(code.co_names) for code in codes):
            return True  # of another class, `vars(self)` is of its own attributes
        codes += [code for one in own if isinstance(one, type) for code in codes_of(one)]
        return any(reads(code, attribute) for code in codes)

    def _is_here(self, owner: object) -> bool:
        """Return whether the class of an object, or a function, is in the file of the loop."""
        kind = owner if isinstance(owner, type | FunctionType) else type(owner)
        return getattr(kind, "__module__", None) == self.globals.get("__name__")

    # ---- of generators, functions, hooks and caches

    def _is_seeded_anew(self, owner: object) -> bool:
        """Return whether the program seeds generators in its loops, or in what it calls there."""
        called = self.called()
        codes = codes_in(one for name, one in self._functions(type(owner)) if name in called)
        return bool(SEEDS & called.union(*(code.co_names for code in codes)))

    def _is_set_by_call(self, function: FunctionType, attribute: str) -> bool:
        """Return whether each step or epoch sets this attribute of a function before its use, and no other one reads it."""
        codes = codes_in(one for _, one in self._functions(FunctionType))
        read = any(reads(code, attribute) for code in codes if code not in (function.__code__, self.code))
        anew = self.is_set_anew(FunctionType, attribute)
        return anew or (not read and self._is_set_first(FunctionType, attribute, self.all))

    def _is_set_by_hooks(self, variable: str) -> bool:
        """Return whether hooks of an optimizer or a layer set a collection, each time anew, and a step reads it after its
        micro-batches alone."""
        code, start = self.all[-1]
        if first_uses(code, start, variable, of=OF_VARIABLES, calls=("batches",)) != {"STORE"}:
            return False
        codes = codes_in(self.globals.values()) + [one for one in self.code.co_consts if isinstance(one, CodeType)]
        having = [one for one in codes if variable in one.co_names + one.co_freevars]
        hooked = any(HOOKING.match(name) for name in self.code.co_names)
        return hooked and bool(having) and all(one is self.code or only_sets(one, variable) for one in having)

    def is_computed_once(self, name: str, owner: object) -> bool:
        """Return whether what was empty is computed from what does not change, in the file of the loop."""
        tree, _ = syntax_of(self.code) or (None, None)
        last = name.removeprefix(THE_GLOBAL).rpartition(".")[2]
        if tree is None or not (owner is None or self._is_here(owner)):
            return False
        read = computed_once_from(tree, last)
        return read is not None and all(is_plain(getattr_static(owner, one, None)) for one in read - {last})

    def is_cache(self, name: str) -> bool:
        """Return whether each function that has this name of a module or a class looks first whether a key is there."""
        last = name.rpartition(".")[2]
        codes = codes_in(one for _, one in self._functions(object))
        having = [code for code in codes if last in code.co_names and code is not self.code]
        return bool(having) and all(looks_for_keys(code, last) for code in having)
