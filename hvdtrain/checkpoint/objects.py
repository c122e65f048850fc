"""What a checkpoint has of models, optimizers, the loss scaler and registered objects: rank 0's."""

import contextlib
import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.utils._pytree import tree_leaves

from hvdtrain.checkpoint import contents
from hvdtrain.checkpoint.carried import Carried
from hvdtrain.checkpoint.checkpoint import Facts
from hvdtrain.checkpoint.own import digest_of_values, persistent_buffers, tensor_checksum
from hvdtrain.checkpoint.resume import Resume, chosen_for
from hvdtrain.engines.base import Engine
from hvdtrain.engines.errors import UserError
from hvdtrain.engines.modules import named_parameters, uncompiled_name
from hvdtrain.engines.portable import bytes_of, has_memory
from hvdtrain.loop.optim import redone
from hvdtrain.loop.prepare import Prepared

GroupSettings = list[list[dict[str, Any]]]  # of the parameter groups of each optimizer


def settings_of(optimizers: Sequence[torch.optim.Optimizer]) -> GroupSettings:
    """Return a copy of the settings of each optimizer's parameter groups, such as learning rates."""
    return [
        [
            copy.deepcopy({name: value for name, value in group.items() if name != "params"})
            for group in one.param_groups
        ]
        for one in optimizers
    ]


def set_settings(optimizers: Sequence[torch.optim.Optimizer], settings: GroupSettings) -> None:
    """Give each optimizer's parameter groups the settings that `settings_of` returned, and no others."""
    for optimizer, those in zip(optimizers, settings, strict=True):
        for group, mine in zip(optimizer.param_groups, those, strict=True):
            for name in group.keys() - mine.keys() - {"params"}:
                del group[name]
            group.update(copy.deepcopy(mine))


# ---- buffers that are made while training

Shapes = dict[str, list[int] | None]  # of a module's persistent buffers, by name; None: there is no tensor yet
Late = list[Any]  # JSON: name, shape when training began, shape and dtype when the checkpoint was saved


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
    layers: Mapping[str, nn.Module] = {uncompiled_name(path): layer for path, layer in module.named_modules()}
    now = shapes(module)
    for full, began, shape, dtype in late:
        path, _, name = full.rpartition(".")
        layer = layers.get(path)
        if layer is None or now.get(full) != began or (name not in layer._buffers and hasattr(layer, name)):
            continue
        layer.register_buffer(name, torch.zeros(shape, dtype=getattr(torch, dtype), device=device))


# ---- numbers that no checkpoint has


def numbers_of(what: object, apart: Sequence[object] = (), *, within: bool = True) -> dict[str, Any]:
    """Return the numbers among an object's attributes: the public ones, and others where the program itself has the class.

    Others of a library's are often caches, such as those of torchmetrics. `training` is the mode of a module. within: also
    those of attributes with a state, but for `apart`, such as `after.last_epoch` of a warm-up before another scheduler.
    """
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


MOST_COMPARED = 2**16  # values


def mark_of(tensors: Sequence[Tensor]) -> object:
    """Return what changes with tensors: few values themselves; of many, where they are, and how often they were written."""
    if all(map(has_memory, tensors)) and sum(one.numel() for one in tensors) <= MOST_COMPARED:
        return [(one.dtype, one.shape, bytes_of(one).numpy().tobytes()) for one in tensors]
    return [(one.data_ptr(), one._version) for one in tensors]


def tensors_held(what: object) -> dict[str, list[Tensor]]:
    """Return the tensors among an object's attributes, also those in a list; of which attributes, see `numbers_of`."""
    own, held = type(what).__module__ == "__main__", dict[str, list[Tensor]]()
    for name, value in getattr(what, "__dict__", {}).items():
        some = value if isinstance(value, (list, tuple)) and len(value) <= MOST_HELD else [value]
        if (own or not name.startswith("_")) and (tensors := [one for one in some if isinstance(one, Tensor)]):
            held[name] = tensors
    return held


MOST_HELD = 1_000  # parts of a list


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
    are not computed from it by its `load_state_dict`. For this, a copy is tried. It has its tensors and `shared` in common
    with the object, by identity: the same values are written into them. Of an attribute's own numbers, such a copy alone
    shows that they come back: then they are taken out of `began`. apart: what is saved itself.
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
    if changed:
        tensors = [one for one in leaves if isinstance(one, Tensor)]
        if isinstance(what, nn.Module):
            tensors += [*what.parameters(), *what.buffers()]
        with contextlib.suppress(Exception):  # any: of the author's own
            twin = copy.deepcopy(what, {**shared, **{id(one): one for one in tensors}})
            for name in changed:
                *path, last = name.split(".")
                vars(functools.reduce(getattr, path, twin))[last] = began[name]
            twin.load_state_dict(copy.deepcopy(state))
            resumed = numbers_of(twin)
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
            held |= {f"{path}.{name}".lstrip("."): repr(value) for name, value in numbers_of(module).items()}
    return held


class Objects:
    """Models, optimizers, loss scaler and registered objects, at first none. resume: the checkpoint to resume from."""

    def __init__(self, engine: Engine, resume: Resume, prepared: Prepared, registered: dict[str, Any]):
        self._engine, self._resume, self.prepared, self.registered = engine, resume, prepared, registered
        self._chosen = chosen_for(prepared.optimizers, {})  # before a checkpoint or a step changes it
        self._of_program: GroupSettings = []  # of the optimizers, as the program has made them
        self._saved: GroupSettings = []  # of the optimizers in the checkpoint, until training begins
        self._began: dict[str, dict[str, Any]] = {}  # numbers of registered objects, before they are restored
        self._held: dict[str, dict[str, object]] = {}  # marks of their tensors, until a checkpoint has them
        self._told_of_optimizers = set[str]()  # names of registered objects
        self._marks = [marks_of(optimizer) for optimizer in prepared.optimizers]
        self._compared = False  # the states of optimizers, between ranks
        self._shapes: dict[str, tuple[nn.Module, Shapes]] = {}  # when training began, by name of a module
        self._beside: dict[str, object] | None = None  # what modules held when training began
        self._restored: dict[str, int] = {}  # checksums of the weights that were restored, until training begins
        self.carried: Carried | None = None  # on the rank that writes, from the loop over `run.epochs` on
        self._begun_again: list[torch.optim.Optimizer] = []  # those whose scheduler was made for another length

    def watch(self, modules: Mapping[str, nn.Module]) -> None:
        """Note the shapes that these modules begin with, and make room for what the checkpoint has."""
        for name, module in modules.items():
            self._shapes[name] = module, shapes(module)
            if self._resume.facts is not None:
                make_room(module, self._resume.facts["late"].get(name, []), self._engine.device)

    def _late(self) -> dict[str, list[Late]]:
        """Return the buffers that were made while training, by module. A collective: ranks must have the same."""
        late = {name: buffers for name, watched in self._shapes.items() if (buffers := changed(*watched))}
        remedy = "make it alike on every rank, or register_buffer(..., persistent=False), which no checkpoint holds"
        self._engine.require_equal("the shapes of buffers that were made while training", late, remedy)
        return late

    def _require_same_states(self) -> None:
        """Raise UserError on every rank if the state of an optimizer differs between ranks: a checkpoint has rank 0's. A
        collective, up to the first checkpoint after an update. With local steps, each group has its own, which is saved."""
        if self._compared or self._engine.size == 1 or self._resume.own_optimizers:
            return
        kinds, sums = [type(optimizer).__name__ for optimizer in self.prepared.optimizers], list[str]()
        remedy = "use one that keeps all of its state on every rank"
        with self._engine.raising_together("optimizer states"):
            for optimizer in self.prepared.optimizers:
                state = optimizer.state_dict()["state"]
                with contents.storable(*contents.about_optimizer(optimizer)):
                    sums.append(digest_of_values(state) if state else "")
        for rank, theirs in enumerate(rows := self._engine.all_gather_object(sums, "optimizer states.sums")):
            if theirs != rows[0]:
                what = kinds[next(number for number, one in enumerate(theirs) if one != rows[0][number])]
                message = (
                    f"the state of {what} differs between ranks 0 and {rank}, and a checkpoint would hold rank 0's"
                )
                raise UserError(f"{message}: {remedy}", everywhere=True)
        self._compared = any(sums)

    def save(
        self, heartbeat: Callable[[], None], *, writes: bool
    ) -> tuple[Facts, dict[str, Tensor], contents.ObjectStates] | None:
        """Return facts, tensors that are not copied, and what was encoded; None on a rank that writes nothing. A collective
        up to there: what follows may fail on rank 0 alone, and others would wait."""
        self._require_same_states()
        self.restore_settings()  # a stop in an evaluation may save before `run.epochs`
        late = self._late()
        if not writes:
            return None
        models, optimizers, scaler = self.prepared.models, self.prepared.optimizers, self.prepared.scaler
        facts, tensors, states = contents.collect(models, optimizers, self.registered, heartbeat)
        self._warn_of_forgotten()
        return facts | {"late": late, "scaler": scaler.state_dict(), "chosen": self._chosen}, tensors, states

    def begin_training(self) -> None:
        """Note what modules hold that no checkpoint has."""
        if self._beside is None:
            self._beside = held_by(self.prepared.models)

    def _warn_of_modules(self) -> None:
        """Say once what the program changes in a model that no checkpoint has."""
        now = held_by(self.prepared.models) if self._beside else {}
        for name, began in (self._beside or {}).items():
            if now.get(name, began) != began and not (
                self.carried and self.carried.is_set_anew(self.prepared.models, name)
            ):
                message = f"{name} of a model has changed, and no checkpoint has it"
                remedy = "keep it in a buffer with persistent=True, or set it anew in each step, as from run.progress"
                self._resume.output.say(f"warning: {message}: {remedy}")
                self._beside = {}
                return

    def _sums_of_weights(self) -> dict[str, int]:
        return {name: int(tensor_checksum(one)) for name, one in named_parameters(self.prepared.models)}

    def require_restored(self) -> None:
        """Raise UserError if the program has changed weights since they were restored. A collective."""
        if self._restored:
            with self._engine.raising_together("restored weights"):
                now = self._sums_of_weights()
                name = next((name for name, total in self._restored.items() if now.get(name, total) != total), None)
                if name is not None:
                    remedy = "do that before run.prepare(), or only if run.state.step is 0"
                    raise UserError(f"{name} was restored by run.prepare(), and has been changed since: {remedy}")
        self._restored = {}

    def _warn_of_forgotten(self) -> None:
        """Say once, at the first checkpoint after it has changed, which number of a registered object no checkpoint has."""
        if self.carried is not None:
            self.carried.look(numbers=True)
        self._warn_of_modules()
        models, optimizers = self.prepared.models, self.prepared.optimizers
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
                    self._resume.output.say(f"warning: {message}: {remedy}")
        apart = [*self.registered.values()]
        for name, what in self.registered.items():
            for attribute, value in forgotten(what, began := self._began[name], shared, apart).items():
                del began[attribute]
                message = f"its {attribute} has changed, and a resumed run would begin with {value}"
                remedy = "add it to its state_dict and load_state_dict"
                self._resume.output.say(f"warning: run.register({name}=...): {message}: {remedy}")
            self._warn_of_tensors(name, what)
            self._warn_of_optimizers(name, what)

    def _warn_of_optimizers(self, name: str, what: Any) -> None:
        """Say once that a registered object steps an optimizer that its state has not, as a loss with a critic does."""
        apart = [*self.prepared.optimizers, *self.registered.values()]
        modules = what.named_modules() if isinstance(what, nn.Module) else [("", what)]
        for path, holder in modules if name not in self._told_of_optimizers else ():
            for attribute, one in getattr(holder, "__dict__", {}).items():
                if not isinstance(one, torch.optim.Optimizer) or any(one is other for other in apart):
                    continue
                state = [part for part in tree_leaves(one.state) if isinstance(part, Tensor)]
                kept = [part for part in tree_leaves(what.state_dict()) if isinstance(part, Tensor)]
                if state and not any(part.shape == state[0].shape and torch.equal(part, state[0]) for part in kept):
                    self._told_of_optimizers.add(name)
                    full = ".".join(filter(None, (name, path, attribute)))
                    message = f"the state of its {'.'.join(filter(None, (path, attribute)))} is not in its own state"
                    remedy = f"register it, too, as {attribute}={full}"
                    self._resume.output.say(f"warning: run.register({name}=...): {message}: {remedy}")

    def _warn_of_tensors(self, name: str, what: Any) -> None:
        """Say once that a registered object keeps what it learns in tensors, and that its state has none, as of a metric of
        torchmetrics. One that has some may compute others from them."""
        held, now = self._held[name], tensors_held(what)
        changed = [attribute for attribute, mark in held.items() if mark != mark_of(now.get(attribute, []))]
        if not changed:
            return
        held.clear()
        if not any(isinstance(one, Tensor) for one in tree_leaves(what.state_dict())):
            torchs = callable(getattr(what, "persistent", None))
            remedy = "call its persistent(True)" if torchs else "add it to its state_dict and load_state_dict"
            message = f"its {changed[0]} has changed, and a resumed run would begin with that of a new one"
            self._resume.output.say(f"warning: run.register({name}=...): {message}: {remedy}")

    def require_as_saved(self, states: contents.ObjectStates, facts: Facts, tensors: Mapping[str, Tensor]) -> None:
        """Raise UserError if a resume would not have what a checkpoint was made of. tensors: its copies."""
        contents.require_as_saved(states, facts, tensors, self.prepared.models, self.prepared.optimizers)

    def restore(self, facts: Facts, tensors: Mapping[str, Tensor]) -> None:
        """Restore models, optimizers and loss scaler. A collective. tensors: on rank 0."""
        prepared, optimizers = self.prepared, self.prepared.optimizers
        self._of_program = settings_of(optimizers)
        with self._engine.raising_together("checkpoint"):
            if tensors:
                contents.load_content((facts, tensors), prepared.models, optimizers, prepared.scaler)
                self._resume.require_choices(self._chosen)
        for model in prepared.models:
            self._engine.broadcast_model(model)
        for optimizer in optimizers:
            self._engine.broadcast_optimizer_state(optimizer)
        if facts["scaler"]:
            prepared.scaler.load_state_dict(facts["scaler"])
        if self._resume.facts is not None:
            self._restored = self._sums_of_weights()

    # ---- the settings of optimizers

    def take_settings(self) -> None:
        """Keep the checkpoint's settings, and give the optimizers the program's own again. Call it when all is restored.

        Between run.prepare and run.epochs, a program reads the rates that it begins with, for its schedules.
        """
        optimizers = self.prepared.optimizers
        if self._resume.facts is None:
            return
        self._saved = settings_of(optimizers)
        set_settings(optimizers, self._of_program)
        for optimizer, saved in zip(optimizers, self._saved, strict=True):
            for group, theirs in zip(optimizer.param_groups, saved, strict=True):
                if "initial_lr" in theirs and "lr" in group:  # a new scheduler with last_epoch=N asks for it
                    group.setdefault("initial_lr", copy.deepcopy(group["lr"]))
        if self._resume.lengthened:  # a new scheduler, as `optim.redone` makes one, takes this as its initial rate
            for optimizer, saved in zip(optimizers, self._saved, strict=True):
                for group, theirs in zip(optimizer.param_groups, saved, strict=True):
                    if "initial_lr" in theirs:
                        group["lr"] = copy.deepcopy(theirs["initial_lr"])

    def restore_settings(self, only: Sequence[torch.optim.Optimizer] | None = None) -> None:
        """Give the optimizers the checkpoint's settings. only: these, whose scheduler is registered, and has set the
        rate when it was created."""
        # `_saved` is empty in a new run.
        for optimizer, settings in zip(self.prepared.optimizers, self._saved, strict=False):
            if only is not None and not any(optimizer is one for one in only):
                continue
            if not any(optimizer is one for one in self._begun_again):
                set_settings([optimizer], [settings])
        if only is None:
            self._saved = []

    # ---- registered objects

    def register(self, objects: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Save these, too, and restore them. A collective. tensors: of the checkpoint, on rank 0."""
        self.registered |= objects
        self._began |= {name: numbers_of(what) for name, what in objects.items()}
        for name, what in objects.items():
            self._held[name] = {attribute: mark_of(tensors) for attribute, tensors in tensors_held(what).items()}
        self._chosen |= (chosen := chosen_for([], objects))
        if self._resume.facts is None:
            return
        for name, what in objects.items():
            self.require_registered(name, what)
        with self._engine.raising_together("checkpoint"):
            self._resume.require_choices(chosen)
        held = contents.decoded(tensors[contents.OBJECTS])["registered"] if tensors else {}
        packed_states = self._engine.broadcast_object({name: held.get(name) for name in objects}, "registered")
        for name, what in objects.items():
            packed = packed_states[name]
            if packed is None:
                raise UserError(f"the checkpoint has no state of {name!r}: {contents.REGISTER}", everywhere=True)
            state = self._engine.broadcast_tensors(packed, lambda place: tensors[place], f"registered.{name}")
            if self._resume.lengthened and redone(what, state):
                self._begun_again.append(what.optimizer)
            else:
                contents.load_registered(name, what, state)
        self.restore_settings(
            [what.optimizer for what in objects.values() if isinstance(what, lr_scheduler.LRScheduler)]
        )

    def require_registered(self, name: str, what: object) -> None:
        """Raise UserError on every rank if the checkpoint has no object of this name and class."""
        assert self._resume.facts is not None
        if name not in (types := self._resume.facts["registered_types"]):
            raise UserError(f"the checkpoint has no {name!r}: {contents.REGISTER}", everywhere=True)
        if (here := contents.type_of(what)) != (there := types[name]):
            message = f"run.register({name}=...): {there} in the checkpoint, {here} now"
            raise UserError(f"{message}: {contents.REGISTER}", everywhere=True)

    def modules(self, objects: Mapping[str, Any] | None = None) -> dict[str, nn.Module]:
        """Return the models, or the modules of these registered objects, by unique names."""
        if objects is None:
            return {f"model {number}": model for number, model in enumerate(self.prepared.models)}
        return {name: what for name, what in objects.items() if isinstance(what, nn.Module)}
