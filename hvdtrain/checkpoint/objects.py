"""What a checkpoint has of models, optimizers, the loss scaler and registered objects: rank 0's."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from hvdtrain.checkpoint import contents
from hvdtrain.checkpoint.checkpoint import Facts
from hvdtrain.checkpoint.differences import chosen_for
from hvdtrain.checkpoint.own import persistent_buffers
from hvdtrain.checkpoint.resume import Resume
from hvdtrain.checkpoint.sums import digest_of_values, tensor_checksum
from hvdtrain.engines.base import Engine
from hvdtrain.engines.errors import UserError
from hvdtrain.engines.modules import named_parameters, uncompiled_name
from hvdtrain.loop.optim import redone
from hvdtrain.loop.prepare import Prepared
from hvdtrain.program.lacking import Lacking

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


class Objects:
    """Models, optimizers, loss scaler and registered objects, at first none. resume: the checkpoint to resume from."""

    def __init__(self, engine: Engine, resume: Resume, prepared: Prepared, registered: dict[str, Any]):
        self._engine, self._resume, self.prepared, self.registered = engine, resume, prepared, registered
        self._chosen = chosen_for(prepared.optimizers, {}, prepared.models)  # before a checkpoint or a step changes it
        self._of_program: GroupSettings = []  # of the optimizers, as the program has made them
        self._saved: GroupSettings = []  # of the optimizers in the checkpoint, until training begins
        self.lacking = Lacking(prepared.models, prepared.optimizers, registered, resume.output.say)
        self._restored_settings: Facts | None = None  # of the optimizers, of a run that is resumed
        self._compared = False  # the states of optimizers, between ranks
        self._shapes: dict[str, tuple[nn.Module, Shapes]] = {}  # when training began, by name of a module
        self._restored: dict[str, int] = {}  # checksums of the weights that were restored, until training begins
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
        collective, up to the first checkpoint after an update."""
        # With local steps, each group of ranks has a state of its own, which is saved.
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
        up to there."""
        self._require_same_states()
        self.restore_settings()  # a stop in an evaluation may save before `run.epochs`
        late = self._late()
        # What follows may fail on rank 0 alone: with a collective in it, the others would wait.
        if not writes:
            return None
        models, optimizers, scaler = self.prepared.models, self.prepared.optimizers, self.prepared.scaler
        facts, tensors, states = contents.collect(models, optimizers, self.registered, heartbeat)
        self.lacking.look()
        return facts | {"late": late, "scaler": scaler.state_dict(), "chosen": self._chosen}, tensors, states

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

    def restore(self, facts: Facts, tensors: Mapping[str, Tensor]) -> None:
        """Restore models, optimizers and loss scaler. A collective. tensors: on rank 0."""
        self._of_program = settings_of(self.prepared.optimizers)
        self._load(facts, tensors, require=self._resume.require_choices)
        self._restored = self._sums_of_weights()

    def _load(
        self, facts: Facts, tensors: Mapping[str, Tensor], require: Callable[[Facts], None] = lambda chosen: None
    ) -> None:
        """Give models, optimizers and loss scaler what a checkpoint has. require: compares what the program has chosen."""
        prepared, optimizers = self.prepared, self.prepared.optimizers
        with self._engine.raising_together("checkpoint"):
            if tensors:
                contents.load_content((facts, tensors), prepared.models, optimizers)
                require(self._chosen)
        for model in prepared.models:
            self._engine.broadcast_model(model)
        for optimizer in optimizers:
            self._engine.broadcast_optimizer_state(optimizer)
        if facts["scaler"]:
            prepared.scaler.load_state_dict(facts["scaler"])

    def load_earlier(self, facts: Facts, tensors: Mapping[str, Tensor]) -> None:
        """Give them, and registered objects, what an earlier checkpoint of the run has. A collective."""
        self._load(facts, tensors)
        for name, state in self._states_in(tensors, self.registered):
            if state is not None:
                contents.load_registered(name, self.registered[name], state)

    # ---- the settings of optimizers

    def take_settings(self) -> None:
        """Keep the checkpoint's settings, and give the optimizers the program's own again. Call it when all is restored."""
        optimizers = self.prepared.optimizers
        if self._resume.facts is None:
            return
        self._saved = settings_of(optimizers)
        # Between run.prepare and run.epochs, a program reads the rates that it begins with, for its schedules.
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
            if self._saved:
                self._restored_settings = chosen_for(self.prepared.optimizers, {})
            self._saved = []

    def tell_settings(self) -> None:
        """Say which settings the first step has, which a program may set until then. Later calls do nothing."""
        if self._restored_settings is not None:
            self._resume.tell_settings(self._restored_settings, chosen_for(self.prepared.optimizers, {}))

    # ---- registered objects

    def register(self, objects: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Save these, too, and restore them. A collective. tensors: of the checkpoint, on rank 0."""
        self.registered |= objects
        self.lacking.register(objects)
        self._chosen |= (chosen := chosen_for([], objects))
        if self._resume.facts is None:
            return
        for name, what in objects.items():
            self.require_registered(name, what)
        with self._engine.raising_together("checkpoint"):
            self._resume.require_choices(chosen)
        for name, state in self._states_in(tensors, objects):
            what = objects[name]
            if state is None:
                raise UserError(f"the checkpoint has no state of {name!r}: {contents.REGISTER}", everywhere=True)
            if self._resume.lengthened and redone(what, state):
                self._begun_again.append(what.optimizer)
            else:
                contents.load_registered(name, what, state)
        self.restore_settings(
            [what.optimizer for what in objects.values() if isinstance(what, lr_scheduler.LRScheduler)]
        )

    def _states_in(self, tensors: Mapping[str, Tensor], names: Iterable[str]) -> Iterator[tuple[str, Any]]:
        """Yield what a checkpoint has of each registered object; None: nothing. A collective. tensors: on rank 0."""
        held = contents.decoded(tensors[contents.OBJECTS])["registered"] if tensors else {}
        packed_states = self._engine.broadcast_object({name: held.get(name) for name in names}, "registered")
        for name, packed in packed_states.items():
            state = None
            if packed is not None:
                state = self._engine.broadcast_tensors(packed, lambda place: tensors[place], f"registered.{name}")
            yield name, state

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
