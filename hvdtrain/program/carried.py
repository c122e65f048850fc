"""What a program itself carries from step to step or from epoch to epoch, and no checkpoint has: the best value so far in a
variable of main(), a count in an object of its own.

What is set anew in each step or epoch is not lost: see anew.py.
"""

import inspect
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from hvdtrain.checkpoint.randomness import is_generator
from hvdtrain.program.anew import THE_GLOBAL, Loops, variable_of
from hvdtrain.program.computed import computed_from, is_asked_again, is_overwritten
from hvdtrain.program.marks import are_in, buffers_by_name, empty_in, held_by, named_layers, names_changed
from hvdtrain.program.reached import RESULT, GeneratorMark, Reached, Reading, is_plain
from hvdtrain.program.restarted import copies_of, differences_of, orders_of
from hvdtrain.program.shown import is_left
from hvdtrain.program.source import syntax_of
from hvdtrain.program.uses import OF_THE_PROGRAM, OF_VARIABLES, first_uses, named, variables_of

CLOCKS = (time.time, time.perf_counter, time.monotonic)
MOST_LINES = 3
KEEP_IT = "keep it in an object with state_dict and load_state_dict, and give that to run.register"
CARRIED_ON = "is carried on from step to step or epoch to epoch, and no checkpoint has it"
BEGAN_ANEW = "began anew when this epoch was resumed, without its first {} samples"
USED_AT_THE_END = "is set in some epochs and used after the last one, and no checkpoint has it"
NOT_FILLED = ("0", "0.0", "(0,)")  # sums, and the marks of collections


class Carried:
    """The variables of the function that has the loop over `run.epochs`, in this frame, and what its models hold.

    saved: by name, the objects that a checkpoint has. of_run: what a resumed run knows, by its name in `run`. restored:
    the weights and states of optimizers that were, or none. orders: `orders_of` the run so far.
    """

    def __init__(
        self, frame: FrameType, say: Callable[[str], None], saved: Mapping[str, Any], models: Sequence[nn.Module],
        of_run: Callable[[], Mapping[str, Any]], *, restored: Sequence[Tensor], orders: Mapping[str, list[str]],
    ):  # fmt: skip
        self._frame: FrameType | None = frame
        self._code, self._say, self._saved, self._of_run = frame.f_code, say, saved, of_run
        modules = [*models, *(one for one in saved.values() if isinstance(one, nn.Module))]
        self._shared = {id(one) for module in modules for one in (*module.parameters(), *module.buffers())}
        self.loops = Loops(frame)
        self._clocks = [clock() for clock in CLOCKS]
        # By name: what changes with it, and not whose it is. What the program drops would be kept.
        self._began, self._first = set[str](), dict[str, object]()
        # Of the layers of models, also by name, what changes with their attributes and with the buffers that are saved.
        self._models, self._buffers = models, dict[str, object]()
        self._layers: dict[str, object] | None = None  # when the first steps began, until one was told
        self._layers_at_head = dict[str, object]()  # of a resumed epoch
        self.orders = dict(orders)
        self._told, self._lines = set[str](), 0
        self._told_of = set[tuple[type, str]]()  # classes of objects, with names of attributes
        self._resumed, self._at_head = 0, dict[str, object]()  # the samples of a resumed epoch, what its steps find
        self._looks = 0  # within epochs
        self._results: set[str] | None = None  # names of collections that have results of the model after a step
        self._at_steps = dict[str, Reading]()  # of whoever takes the steps of an epoch, when they began
        with OF_THE_PROGRAM:
            self._buffers = buffers_by_name(models)
            self._began = set(self._marks())
            names = {name.removeprefix(THE_GLOBAL): value for name, value in self._names().items()}
            registered = {id(one) for one in saved.values()}
            now = orders_of(names, Reached(self.loops.is_own, registered))
            self.orders = {name: orders.get(name, held) for name, held in now.items()}
            for others, what in differences_of(self.orders, now):
                say(f"warning: {named(others, self._code)} {what}")
            # A penalty that holds the weights near the first ones would hold them near the restored ones.
            held = variables_of(frame, nn.Module | list | tuple | dict) if restored else {}  # type: ignore[arg-type]
            copies = copies_of(restored, held, registered | self._shared)
            used = [x for x in copies if self.loops.is_loaded(x, emptied=True) or x in self._code.co_cellvars]
            if used:
                what = f"{named(used, self._code)} has what was restored, and not what the run began with"
                say(f"warning: {what}: copy it before run.prepare(), or give the copy to run.register")

    def end(self) -> None:
        """Look no longer, and let the frame go."""
        self._frame, self._at_steps = None, {}

    def begin_steps(self, frame: FrameType, resumed: int) -> None:
        """Look whether something has changed since the steps of the first epoch began. frame: of whoever takes them.
        resumed: the number of samples that this epoch had before the run was resumed."""
        self.loops.begin_steps(frame)
        with OF_THE_PROGRAM:
            self._resumed, self._at_head = resumed, {}
            self._layers_at_head = self._layers_when_resumed() if resumed else {}
            self._layers = held_by(self._models) if self._layers is None else self._layers
            if resumed:
                self._at_head = {name: leaf.mark for name, leaf in self._marks_of(variables_of(frame)).items()}
            self._first = self._first or {name: leaf.mark for name, leaf in self._marks().items()}
            self._at_steps = self._marks_of(self._computed_with(frame))
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
            others = [name for name in changed if name not in self._told and not self._is_time(now[name].mark)]
            if gathered := [name for name in others if self.loops.is_gathered(name, now[name].owner)]:
                what = f"{named(gathered, self.loops.all[-1][0])} {BEGAN_ANEW.format(self._resumed)}"
                self._say(f"warning: {what}: {KEEP_IT}, and empty it in another epoch only")
        with OF_THE_PROGRAM:
            self._look_at_gathered()

    def look(self, *, in_steps: bool = False) -> None:
        """Say what has changed, each once. in_steps: numbers, and at each second, fourth, eighth time, as it takes longer,
        what the end of an epoch cannot empty."""
        with OF_THE_PROGRAM:
            self._looks += in_steps
            self._look(numbers=in_steps)
            if in_steps:
                self._look_in_steps(numbers=bool(self._looks & (self._looks - 1)))
        with OF_THE_PROGRAM:
            if in_steps:
                self._look_at_layers()

    def _look_at_layers(self) -> None:
        """Look what layers hold beside weights and saved buffers, if it is not set anew."""
        now = held_by(self._models) if self._layers else {}
        for name in names_changed(self._layers or {}, now):
            kinds, attribute = self._kinds_with(name)
            if not all(self.loops.is_set_anew(kind, attribute) for kind in kinds):
                remedy = "keep it in a buffer with persistent=True, or set it anew in each step, as from run.progress"
                self._say(f"warning: {name} of a model has changed, and no checkpoint has it: {remedy}")
                self._layers = {}
                return

    def _layers_when_resumed(self) -> dict[str, object]:
        """Return what layers hold when the steps of a resumed epoch go on: also None, as a state is before the first step,
        and the buffers that the head of the epoch has set back."""
        now = buffers_by_name(self._models)
        set_back = {name: now[name] for name in names_changed(self._buffers, now)}
        return empty_in(self._models) | held_by(self._models) | set_back

    def _look_at_gathered(self) -> None:
        """Look what a model has gathered since the head of a resumed epoch, which set it back."""
        now = held_by(self._models) | buffers_by_name(self._models) if self._layers_at_head else {}
        for name in names_changed(self._layers_at_head, now):
            kinds, attribute = self._kinds_with(name)
            if any(self.loops.begins_anew(one, attribute, at_head=name in self._buffers) for one in kinds):
                remedy = "keep it in a buffer, and set it back in another epoch only"
                self._say(f"warning: {name} of a model {BEGAN_ANEW.format(self._resumed)}: {remedy}")
                return

    def _kinds_with(self, name: str) -> tuple[list[type], str]:
        """Return the classes of the layers that have an attribute of this name, such as `head.scale`, and its last part."""
        attribute = name.rpartition(".")[2]
        layers = [one for prefix, one in named_layers(self._models) if prefix + attribute == name]
        return [type(one) for one in layers if hasattr(one, attribute)], attribute

    def _computed_with(self, frame: FrameType) -> dict[str, Any]:
        """Return the variables of whoever takes the steps, and of its module, from which losses are computed."""
        if (syntax := syntax_of(frame.f_code)) is None:
            return {}
        tree, function = syntax
        names = {name: one for name, one in variables_of(frame).items() if name in computed_from(function)}
        if function is not tree:
            used = computed_from(tree).intersection(frame.f_code.co_names, frame.f_globals)
            names |= {THE_GLOBAL + name: frame.f_globals[name] for name in used}
        return names

    def _look_in_steps(self, *, numbers: bool) -> None:
        """Look at what the steps of an epoch leave for the next ones to compute with, such as a temperature, or a hidden
        state: an epoch that is resumed begins with the first one again. numbers: at these alone."""
        code, start = self.loops.all[-1]
        if self._frame is None or (syntax := syntax_of(code)) is None:
            return
        (tree, function), held = syntax, self._computed_with(self._of_steps())
        held = {name: one for name, one in held.items() if isinstance(one, int | float if numbers else object)}
        now, changed, owners = self._marks_of(held), dict[str, Any](), dict[str, object]()
        for path, leaf in self._at_steps.items():
            variable, attribute = variable_of(path), path.rpartition(".")[2].partition("[")[0]
            name = THE_GLOBAL * path.startswith(THE_GLOBAL) + variable
            differs = name in held and repr(now[path].mark if path in now else None) != repr(leaf.mark)
            if not differs or isinstance(leaf.mark, GeneratorMark):
                continue
            if leaf.owner is None:
                used = "LOAD" in first_uses(code, start, variable, of=OF_VARIABLES, emptied=True)
                if used and not (is_asked_again(function, variable) or is_overwritten(function, variable)):
                    changed[name] = held[name]
            elif f".{attribute}" in computed_from(tree) and self.loops.is_kept_in_steps(leaf.owner, attribute):
                whole = path[: path.rindex(attribute) + len(attribute)]
                changed[whole], owners[whole] = getattr(leaf.owner, attribute, None), leaf.owner
        known = self._known(code) if changed else []
        lost = [name for name, value in changed.items() if not are_in(known, value)]
        self._warn(lost, code)
        self._told_of |= {(type(owners[name]), name.rpartition(".")[2]) for name in lost if name in owners}

    def _known(self, code: CodeType) -> list[Any]:
        """Return what a resumed run knows: what this code may ask it, and the states of registered objects, but for models
        and generators."""
        others = [one for one in self._saved.values() if not isinstance(one, nn.Module) and not is_generator(one)]
        asked = [held for name, held in self._of_run().items() if name in code.co_names]
        return tree_leaves([asked, *(one.state_dict() for one in others)])

    def _of_steps(self) -> FrameType:
        """Return the frame of whoever takes the steps."""
        frame: FrameType | None = sys._getframe()
        while frame is not None and frame.f_code is not self.loops.all[-1][0]:
            frame = frame.f_back
        assert frame is not None
        return frame

    def _is_time(self, mark: object) -> bool:
        times = [(began, clock()) for began, clock in zip(self._clocks, CLOCKS, strict=True)]
        return isinstance(mark, float) and any(low <= mark <= high for low, high in times)

    def _look(self, *, numbers: bool = False) -> None:
        now = self._marks(numbers=numbers) if self._frame is not None else {}
        results = self._results or ()
        for name, leaf in now.items() if self._first else ():  # a function has an attribute from its first call on
            if isinstance(leaf.owner, FunctionType):
                self._first.setdefault(name, leaf.mark)
        left = [name for name, leaf in now.items() if repr(self._first.get(name)) != repr(leaf.mark)]
        left = [name for name in left if now[name].owner is None and is_left(self._code, self.loops.offset, name)]
        lost = [
            name for name, leaf in now.items()
            if (name in self._began or leaf.owner is not None) and name not in results
            and repr(self._first.get(name, leaf.mark)) != repr(leaf.mark)
        ]  # fmt: skip
        for name in [name for name in lost if self._is_filled(name, now[name])]:
            self._first[name] = now[name].mark
            lost.remove(name)
        lost = [name for name in lost if (type(now[name].owner), name.rpartition(".")[2]) not in self._told_of]
        lost = [name for name in lost if self.loops.is_carried(name, now[name])]
        if not (lost or left):
            return
        texts = {repr(one) for one in self._known(self._code) if is_plain(one)}
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
        before, variable = self._first[name], variable_of(name)
        kept = before in (None, (0,))
        if isinstance(before, tuple) and isinstance(now.mark, tuple):
            kept = now.mark[1 : len(before)] == before[1:]
        of_layer = before is None and isinstance(now.owner, nn.Module)
        if of_layer or (kept and self.loops.is_computed_once(name, now.owner)):
            return True
        if variable in self._code.co_varnames + self._code.co_cellvars or not isinstance(before, tuple):
            return False
        return before == (0,) or (kept and self.loops.is_cache(name.removeprefix(THE_GLOBAL)))

    def _warn(self, lost: Sequence[str], code: CodeType, remedy: str = KEEP_IT, message: str = CARRIED_ON) -> None:
        if (lost := [name for name in lost if name not in self._told]) and self._lines < MOST_LINES:
            self._told.update(lost)
            self._lines += 1
            self._say(f"warning: {named(lost, code)} {message}: {remedy}")

    def _marks(self, *, numbers: bool = False) -> dict[str, Reading]:
        """Return what the program's variables reach, by name."""
        return self._marks_of(self._names(numbers=numbers), numbers=numbers)

    def _names(self, *, numbers: bool = False) -> dict[str, Any]:
        """Return the program's variables, those of its other modules, too, by name."""
        assert self._frame is not None
        names = variables_of(self._frame)
        outer = dict[str, Any]()
        if self._code.co_flags & inspect.CO_OPTIMIZED or self._frame.f_locals is not self.loops.globals:
            outer |= self.loops.globals
        for short, module in self.loops.own_modules().items() if not numbers else ():
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
        reached = Reached(self.loops.is_own, apart)
        # What two variables reach has the name of the one that the loop uses.
        for name, value in sorted(
            names.items(), key=lambda pair: not self.loops.is_loaded(pair[0].removeprefix(THE_GLOBAL))
        ):
            followed = not isinstance(value, FunctionType | type) or self.loops.is_own(value)
            if is_plain(value) or (followed and not numbers and not isinstance(value, ModuleType)):
                with OF_THE_PROGRAM:
                    reached.add(name.removeprefix(THE_GLOBAL) if isinstance(value, type) else name, value)
            elif followed and isinstance(value, FunctionType):
                for attribute, one in vars(value).items():
                    if is_plain(one):
                        reached.add(f"{name}.{attribute}", one, value)
        if "environ" in self.loops.called() and not numbers:
            reached.add(THE_GLOBAL + "os.environ", os.environ)
        return reached.leaves
