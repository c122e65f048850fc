"""The checkpoints of a run: finds the one to resume from, checks that it matches, and saves new ones.

Only rank 0 reads and writes files. It broadcasts what it has read to the other ranks.
"""

import contextlib
import copy
import errno
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from hvdtrain.cli import Flags
from hvdtrain.engines import buffers, files, lines
from hvdtrain.engines.base import Engine
from hvdtrain.engines.buffers import running_statistics
from hvdtrain.engines.errors import UserError, one_line
from hvdtrain.output.metric_names import Metric
from hvdtrain.output.run_output import RunOutput
from hvdtrain.training import checkpoint, contents, extra_states, saved_buffers
from hvdtrain.training.checkpoint import Facts
from hvdtrain.training.checkpoint_interval import CheckpointInterval
from hvdtrain.training.comparison import (
    Difference,
    chosen_for,
    differences,
    in_words,
    other_choices,
    other_lengths,
)
from hvdtrain.training.inputs import Input
from hvdtrain.training.parts import Content, Part
from hvdtrain.training.randomness import Generators
from hvdtrain.training.sameness import SPLIT
from hvdtrain.training.schedules import redone
from hvdtrain.training.state import Initial, TrainState

LONGEST_NAME = "x" * 100  # of what is written beside a checkpoint
LOCK_SECONDS = 10.0  # how long to wait for a previous run to end


def settings_of(optimizers: Sequence[torch.optim.Optimizer]) -> list[list[dict[str, Any]]]:
    """Return a copy of the settings of each optimizer's parameter groups, such as learning rates."""
    return [
        [
            copy.deepcopy({name: value for name, value in group.items() if name != "params"})
            for group in one.param_groups
        ]
        for one in optimizers
    ]


def set_settings(optimizers: Sequence[torch.optim.Optimizer], settings: Sequence[list[dict[str, Any]]]) -> None:
    """Give each optimizer's parameter groups the settings that `settings_of` returned, and no others."""
    for optimizer, those in zip(optimizers, settings, strict=True):
        for group, mine in zip(optimizer.param_groups, those, strict=True):
            for name in group.keys() - mine.keys() - {"params"}:
                del group[name]
            group.update(copy.deepcopy(mine))


class Checkpoints:
    """Finds the checkpoint to resume from, restores it, and saves new ones. The constructor raises UserError on rank 0 only.

    metrics: by name; the first one determines the best checkpoint.
    """

    def __init__(self, engine: Engine, flags: Flags, metrics: Mapping[str, Metric], output: RunOutput):
        self.engine, self.output, self._flags = engine, output, flags
        self._metrics = dict(metrics)
        self.writes = flags.output_dir is not None and flags.evaluate is None
        self.directory: Path | None = flags.output_dir / "checkpoints" if self.writes else None
        self.initial = Initial(engine.size, flags.batch_size, flags.accumulate)
        self.interval = CheckpointInterval(self.writes and engine.rank == 0 and flags.checkpoint_steps is None)
        self.lengthened: list[Difference] = []  # --epochs or --steps, if the resumed run has another number of them
        self.continues = False  # on rank 0: the run in --output-dir is resumed, and its files are appended to
        self.facts: Facts | None = None  # of the checkpoint to resume from; on every rank after `begin`
        self.registered: dict[str, Any] = {}  # what the script has registered, by name
        self._parts: list[Part] = []  # of features
        self._asked: Facts = {}  # the flags as they were given, before `auto` was decided
        self._config: Facts = {}
        self._of_program: list[list[dict[str, Any]]] = []  # settings of the optimizers, before `restore`
        self._data: Facts = {}
        self._warnings: list[str] = []
        self._found: tuple[Facts, dict[str, Tensor]] | None = None  # on rank 0, until it is restored
        self._settings: list[list[dict[str, Any]]] = []  # of the optimizers in the checkpoint, until training begins
        self._begun_again: list[torch.optim.Optimizer] = []  # those of which a scheduler has another length
        self._last_good: str | None = None
        self._writer: checkpoint.Writer | None = None
        self._lock: files.Lock | None = None
        self.generators = Generators(engine, flags.seed, keeps=self.writes)
        self._chosen: Facts = {}  # for optimizers and schedulers: `comparison.chosen_for`
        self._extra: extra_states.States = {}  # of this rank in the checkpoint
        self._shapes: dict[str, saved_buffers.Shapes] = {}  # of buffers, when training began
        self._ends = False  # training is over
        if engine.rank == 0:
            try:
                self._open()
            except BaseException:
                self.release()
                raise

    # ---- which one

    def _open(self) -> None:
        resume, evaluate, output_dir = self._flags.resume, self._flags.evaluate, self._flags.output_dir
        if evaluate is not None:  # the run may still be training, and nothing of it is changed
            if output_dir is not None and (output_dir / "checkpoints").exists():
                how = "name another one for the record of the evaluation, or leave it out"
                raise UserError(f"--evaluate: the --output-dir {output_dir} has a run: {how}")
            self._found = checkpoint.find(evaluate, f"--evaluate {evaluate}", self._warn, keep_names=True)
            return
        if self.directory is not None:
            if os.path.islink(self.directory):  # noqa: PTH114 (Path's own raises where the name is too long)
                how = "give the real directory with --output-dir"
                raise UserError(f"{self.directory} is a symbolic link, which is not followed: {how}")
            self._take(self.directory)
            files.remove_partial(self.directory)
        if resume == "auto" and self.directory is not None:
            self._found = checkpoint.newest(self.directory, self._warn)
            self.continues = self._found is not None
        elif isinstance(resume, Path):
            self._found = checkpoint.find(resume, f"--resume {resume}", self._warn)
        if self._found is None and self._warnings:
            self._warn("no checkpoint is valid: training starts from the beginning")

    def _take(self, directory: Path) -> None:
        """Create the directory of the checkpoints and lock the one above it, so that no other run writes there."""
        output_dir = directory.parent
        try:
            output_dir.mkdir(parents=True, exist_ok=True)
            self._lock = files.Lock(output_dir, LOCK_SECONDS)
            directory.mkdir(exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                (directory / LONGEST_NAME).lstat()  # a path may have 4,096 bytes, which no first checkpoint should tell
            if not self._lock.works:
                said = "its file system has no locks, so another host's run there is noticed at a checkpoint only"
                lines.warn(f"--output-dir {output_dir}: {said}")
        except TimeoutError:
            said = f"another run writes to {output_dir}: wait for it, or name another --output-dir"
            raise UserError(said) from None
        except OSError as error:
            which = f"{directory}: {error.strerror}" if self._lock is not None else error.strerror
            how = "name another directory, or free some space"
            raise UserError(f"--output-dir {output_dir} cannot be written ({which}): {how}") from error

    def release(self, heartbeat: Callable[[], None] = lambda: None) -> None:
        """Wait until the last snapshot is on the disk, and release the lock on the output directory. Idempotent.

        Called at the end of the run, also by an exception.
        """
        if self._lock is None:
            return
        if self._writer is not None:
            self._ends = True
            self._writer.flush(heartbeat)
        self._lock.release()
        self._lock = None

    def _warn(self, line: str) -> None:
        line = one_line(line)
        self._warnings.append(line)
        lines.warn(line)

    def begin(self) -> TrainState:
        """Return the position in training, on every rank. A collective."""
        self._asked = self._flags.given()
        shared = self._found[0] if self._found is not None else None
        self.facts = self.engine.broadcast_object(shared, "checkpoint.facts")
        if self.facts is None:
            return TrainState()
        try:
            for name in ("config", "data"):
                if not isinstance(self.facts[name], dict):
                    raise TypeError(name)
            self.initial = Initial(**self.facts["initial"])
            if self._flags.evaluate is not None:
                self._flags.adopt(self.facts["config"])
                self._asked = self._flags.given()
            return TrainState(**self.facts["state"])
        except (KeyError, TypeError) as error:
            raise UserError(checkpoint.OTHER_VERSION, everywhere=True) from error

    def require_fit(self, data: Mapping[str, object]) -> None:
        """On rank 0, compare flags and data with those of the checkpoint, then start the writer of new checkpoints.

        If they differ, raises UserError for a run in --output-dir, and prints a warning for a checkpoint given by --resume.
        """
        now = self._flags.given()
        config = {name: now[name] if value is None else value for name, value in self._asked.items()}
        self._config = {name: contents.plain(value) for name, value in config.items()}
        if self.facts is not None:
            self.lengthened = other_lengths(self.facts, self._config)
        self._data = {name: contents.plain(value) for name, value in data.items()}
        if self.engine.rank != 0:
            return
        unlike = []
        if self.facts is not None:
            unlike = differences(self.facts, self._flags, self._config, self._data, self.engine.size)
        if self._flags.evaluate is not None:
            unlike = [one for one in unlike if one.name in self._data]
            if unlike:
                self._warn(f"the model was trained with other data ({in_words(unlike)}): evaluated on those given now")
            return
        if unlike and self.continues:
            self.release()
            how = "give the same, or another --output-dir, or --resume never"
            raise UserError(f"{self.directory} holds a run with different flags ({in_words(unlike)}): {how}")
        if unlike:
            said = f"the checkpoint was written with different flags ({in_words(unlike)})"
            self._warn(f"{said}: continued with those given now")
        if self.directory is None:
            return
        try:
            if not self.continues and checkpoint.listed(self.directory):
                self.directory.rename(files.unused(self.directory))
        except OSError as error:
            said = f"{self.directory} cannot be moved aside ({error.strerror})"
            raise UserError(f"{said}: name another --output-dir") from error
        self._writer = checkpoint.Writer(self.directory, self._flags.keep, self._written, self._lock)

    def _require_split(self, split: int | None) -> None:
        """Raise UserError on every rank if the run to resume has trained on another part of its data set. split: of now."""
        held = (self.facts or {}).get("split")
        if self._flags.resume == "auto" and None not in (held, split) and held != split:
            said = "the data set is split otherwise than when the run began, and samples of its test set would be trained on"
            raise UserError(f"{said}: {SPLIT}", everywhere=True)

    def announce(self, state: TrainState) -> None:
        """Print and record the step from which the run is resumed."""
        for warning in self._warnings:
            self.output.event("error", kind="checkpoint", message=warning)
        if self.facts is None:
            return
        if self._flags.evaluate is not None:
            epoch = state.epoch + (state.samples_of_epoch > 0)
            self.output.say(f"the model after step {state.step} and {state.samples:,} samples, in epoch {epoch}")
            return
        began, now = self.initial, Initial(self.engine.size, self._flags.batch_size, self._flags.accumulate)
        if began.global_batch != now.global_batch:
            per_rank = -(-began.global_batch // self.engine.size)
            self.output.say(
                f"global batch kept at {began.global_batch}: the run began on {began.ranks} ranks; "
                f"now up to {per_rank} per rank"
            )
        before, engine = self.facts["engine"], self.engine
        if before != engine.name and max(self.facts["world_size"], engine.size) > 1:
            self.output.say(f"--engine {engine.name} instead of {before}: sums over ranks may be rounded differently")
        epoch = state.epoch + (state.samples_of_epoch > 0)
        for name, there, here in self.lengthened:
            how = "training continues, and a learning rate that depends on the end follows the new end"
            self.output.say(f"{name} {here} instead of {there}: {how}")
        self.output.say(f"resumed after step {state.step} and {state.samples:,} samples, in epoch {epoch}")
        self.output.event(
            "resume", epoch=state.epoch + 1, step=state.step, samples=state.samples, taken=state.samples_of_epoch,
            world_size=self.engine.size, initial=began._asdict(), warnings=self._warnings,
        )  # fmt: skip

    # ---- what is in it

    def restore(
        self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer], scaler: torch.amp.GradScaler
    ) -> None:
        """Restore models, optimizers and loss scaler on every rank, if the run is resumed. A collective."""
        trained = sum(p.numel() * p.element_size() for model in models for p in model.parameters())
        self.interval.expect(3 * trained)  # assumes two optimizer values per parameter, as with Adam
        self._note_buffers(self._modules(models, {}))
        self._chosen |= (chosen := chosen_for(optimizers, {}))
        if self.writes:
            self._require_storable(self._modules(models, {}))
        if self.facts is None:
            return
        self._of_program = settings_of(optimizers)
        self._make_room(self._modules(models, {}))
        with self.engine.raising_together("checkpoint"):
            if self._found is not None:
                contents.load(self._found, models, optimizers, scaler)
                self._require_choices(chosen)
        for model in models:
            self.engine.broadcast_model(model)
        for optimizer in optimizers:
            self.engine.broadcast_optimizer_state(optimizer)
        self._extra = extra_states.load(
            self.engine, self._found and self._found[1], same=self._flags.evaluate is not None
        )
        extra_states.restore(self._modules(models, {}), self._extra)
        self._restore_own("buffers", saved_buffers.of_each_rank(models), running_statistics(models))
        if self._flags.evaluate is None and (line := self.generators.load(self._found and self._found[1])):
            self.output.say(line)
        if self.facts["scaler"]:
            scaler.load_state_dict(self.facts["scaler"])

    def add(self, part: Part) -> None:
        """Save a part of a feature from now on, and restore it if the run is resumed. A collective; after `restore`."""
        self._parts.append(part)
        if self.facts is not None:
            part.restore(Content(self.facts, self._found[1] if self._found is not None else None))

    def settle(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Give the optimizers the program's own settings again, until training begins: `restore_settings`."""
        if self.facts is None:
            return
        self._settings = settings_of(optimizers)
        set_settings(optimizers, self._of_program)
        if self.lengthened:  # so that a scheduler begins with the run's rate: `schedules.redone`
            for optimizer, saved in zip(optimizers, self._settings, strict=True):
                for group, theirs in zip(optimizer.param_groups, saved, strict=True):
                    group["lr"] = copy.deepcopy(theirs.get("initial_lr", group["lr"]))

    def _restore_own(self, name: str, tensors: Mapping[str, Tensor], statistics: Sequence[Tensor]) -> None:
        """Restore `tensors`, of which each rank has its own: with a different number of ranks, the mean of those that are in
        `statistics`, and rank 0's of the others. A collective. They are in the order of the checkpoint."""
        ranks, there = (self.facts or {})["own"].get(name, (0, {}))
        here = {one: list(tensor.shape) for one, tensor in tensors.items()}
        if unlike := [one for one in {**there, **here} if there.get(one) != here.get(one)]:
            how = f"{unlike[0]} is not the same buffer in both: check --model"
            raise UserError(f"the checkpoint does not match the model: {how}", everywhere=True)
        if not there:
            return
        ordered = [tensors[one] for one in there]
        own = buffers.flatten(ordered)
        rows = torch.zeros(ranks, len(own), dtype=own.dtype)
        if self._found is not None:
            rows.copy_(self._found[1][name])
        self.engine.broadcast_(rows, f"checkpoint.{name}")
        same = self._flags.evaluate is not None  # on each rank
        if ranks == self.engine.size and not same:
            mine = rows[self.engine.rank]
        elif same and bool((rows == rows[0]).all()):  # their mean may be rounded
            mine = rows[0]
        else:
            averaged = {id(tensor) for tensor in statistics}
            mine = rows.mean(0)
            parts = zip(ordered, mine.split([tensor.numel() for tensor in ordered]), strict=True)
            firsts = rows[0].split([tensor.numel() for tensor in ordered])
            mine = torch.cat(
                [mean if id(tensor) in averaged else first for (tensor, mean), first in zip(parts, firsts, strict=True)]
            )
        buffers.unflatten(mine, ordered)

    def restore_registered(self, registered: Mapping[str, Any], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Restore the objects given to `Run.register`, on every rank, and the rates of `optimizers`. A collective."""
        self.registered |= registered
        self._note_buffers(self._modules([], registered))
        self._chosen |= (chosen := chosen_for([], registered))
        if self.writes:
            self._require_storable(self._modules([], registered))
        if self.facts is None:
            return
        self._make_room(self._modules([], registered))
        for name, what in registered.items():
            self._require_registered(name, what)
            if name not in self.facts["registered"]:
                raise UserError(f"the checkpoint has no state of {name!r}: {contents.REGISTER}", everywhere=True)
        with self.engine.raising_together("checkpoint"):
            self._require_choices(chosen)
        for name, what in registered.items():
            tensors = self._found[1] if self._found is not None else {}
            packed = self.facts["registered"][name]
            state = contents.unpack_everywhere(self.engine, packed, tensors, f"registered.{name}")
            if self.lengthened and redone(what, state):
                self._begun_again.append(what.optimizer)
            else:
                contents.load_registered(name, what, state)
        extra_states.restore(self._modules([], registered), self._extra)
        scheduled = [what.optimizer for what in registered.values() if isinstance(what, lr_scheduler.LRScheduler)]
        self.restore_settings(optimizers, scheduled)

    def restore_settings(
        self, optimizers: Sequence[torch.optim.Optimizer], only: Sequence[torch.optim.Optimizer] | None = None
    ) -> None:
        """Give the parameter groups of `optimizers` the checkpoint's settings, such as learning rates. only: of these.

        Not in `restore`: between run.prepare and run.epochs, a program reads the rates that it begins with, for its
        schedules. A scheduler's optimizer gets them when that is registered, as it has set the rate when it was created.
        """
        for optimizer, settings in zip(optimizers, self._settings, strict=False):  # none in a new run
            if only is not None and not any(optimizer is one for one in only):
                continue
            if not any(optimizer is one for one in self._begun_again):
                set_settings([optimizer], [settings])
        if only is None:
            self._settings = []

    def _require_choices(self, chosen: Facts) -> None:
        """On rank 0, compare what the program has chosen for optimizers and schedulers with what the checkpoint's had.

        Raises UserError, as for other flags. Where these may depend on the number of ranks or the length of the run, and for
        a checkpoint that --resume names, a line says that those of the checkpoint are kept.
        """
        assert self.facts is not None
        unlike = list(other_choices(self.facts["chosen"], chosen))
        if not unlike or self.engine.rank != 0 or self._flags.evaluate is not None:
            return
        if self.continues and not self.lengthened and self.facts["world_size"] == self.engine.size:
            self.release()
            how = "give the same, or another --output-dir, or --resume never"
            raise UserError(f"{self.directory} holds a run with different settings ({in_words(unlike)}): {how}")
        said = f"the program has other settings than the checkpoint ({in_words(unlike)})"
        self._warn(f"{said}: those of the checkpoint are kept")

    def _modules(self, models: Sequence[nn.Module], registered: Mapping[str, Any]) -> dict[str, nn.Module]:
        """Return the models and registered modules by unique names."""
        found = {f"model {number}": model for number, model in enumerate(models)}
        return found | {name: what for name, what in registered.items() if isinstance(what, nn.Module)}

    @staticmethod
    def _require_storable(modules: Mapping[str, nn.Module]) -> None:
        """Raise UserError for what no checkpoint can store, before the first step."""
        extra_states.require_storable(extra_states.of(modules))
        for module in modules.values():
            contents.require_storable(contents.tensors_of(module))

    def _note_buffers(self, modules: Mapping[str, nn.Module]) -> None:
        self._shapes |= {name: saved_buffers.shapes(module) for name, module in modules.items()}

    def _make_room(self, modules: Mapping[str, nn.Module]) -> None:
        assert self.facts is not None
        for name, module in modules.items():
            saved_buffers.make_room(module, self.facts["late"].get(name, []), self.engine.device)

    def _late_buffers(self, models: Sequence[nn.Module], registered: Mapping[str, Any]) -> Facts:
        """Return the buffers that were made while training, by module. A collective: ranks must have the same."""
        modules = self._modules(models, registered)
        late = {name: saved_buffers.changed(module, self._shapes[name]) for name, module in modules.items()}
        late = {name: found for name, found in late.items() if found}
        how = "make it alike on every rank, or register_buffer(..., persistent=False), which no checkpoint holds"
        self.engine.require_equal("the shapes of buffers that were made while training", late, how)
        return late

    def register_generators(self, generators: Mapping[str, object]) -> None:
        """Save generators with the run. They are restored when training begins: `Generators.begin`."""
        self.generators.registered |= generators
        for name, what in generators.items() if self.facts is not None else ():
            self._require_registered(name, what)

    def _require_registered(self, name: str, what: object) -> None:
        assert self.facts is not None
        if name not in (types := self.facts["registered_types"]):
            raise UserError(f"the checkpoint has no {name!r}: {contents.REGISTER}", everywhere=True)
        contents.require_type(name, what, types[name])

    def require_all(self, source: Input) -> None:
        """Raise UserError on every rank if the program does not register an object that the checkpoint has, or gives other
        samples."""
        if self.facts is None:
            return
        for name in self.facts["registered_types"]:
            if name not in self.registered and name not in self.generators.registered:
                said = f"the checkpoint has {name!r}, which is not registered now"
                raise UserError(f"{said}: {contents.REGISTER}", everywhere=True)
        if source.changes and not self.facts["state"]["samples_of_epoch"]:
            return
        self._require_split(source.split)
        there, here = self.facts["input"]["samples"], source.samples
        if there == here:
            return
        said = f"the run was trained on {there:,} samples, and run.steps() got {here:,}"
        if self._flags.resume == "auto":
            how = "give the same, or --weights FILE with another --output-dir"
            raise UserError(f"{said}: {how}", everywhere=True)
        self.output.say(f"warning: {said}: continued with those given now")

    @property
    def per_epoch(self) -> int:
        """Samples of an epoch of the run that is resumed; 0: not known."""
        return int(self.facts["input"]["per_epoch"]) if self.facts is not None else 0

    def restore_statistics(self, registered: Mapping[str, Any]) -> None:
        """Restore this rank's running statistics of registered modules. A collective; after `restore_registered`."""
        for name, statistics in saved_buffers.statistics_of(registered).items() if self.facts is not None else ():
            self._restore_own(name, statistics, list(statistics.values()))

    def positions(self) -> list[Any] | None:
        """Return each rank's position in its stream, on every rank; None if there is none. A collective."""
        saved = self._found[1].get("positions") if self._found is not None else None
        held = None if saved is None else contents.decoded(saved)
        shared: list[Any] | None = self.engine.broadcast_object(held, "checkpoint.positions")
        return shared

    def begin_training(self) -> None:
        """Free the loaded checkpoint, and schedule the first automatic one."""
        self._found = None
        self.interval.begin()

    def ready(self) -> None:
        """Call it before `save`, also in a run that writes no checkpoints. A collective."""
        for part in self._parts:
            part.ready()

    def save(
        self,
        state: TrainState,
        models: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        scaler: torch.amp.GradScaler,
        *,
        automatic: bool = False,
        ends_epoch: bool = False,
        in_steps: bool = False,
        score: Facts | None = None,
        ended: Facts | None = None,
        source: Input | None = None,
        heartbeat: Callable[[], None] = lambda: None,
    ) -> None:
        """Take a snapshot and return. Rank 0 writes it in the background. A collective.

        automatic: not requested by the user; the next automatic checkpoint replaces it. ends_epoch: it follows the
        evaluation of an epoch, whose value, `score`, decides whether it is the best. in_steps: it follows a step, not all
        steps of an epoch. ended: the program has left the loop over run.epochs, which was this long. source: what the steps
        read.
        heartbeat: called for each tensor and each registered object.
        """
        self.restore_settings(optimizers)  # an evaluation before run.epochs was stopped
        if not self.writes:
            return
        registered, content = self.registered, Content({"outer": [], "workers": []})
        late = self._late_buffers(models, registered)
        each = {"buffers": saved_buffers.of_each_rank(models), **saved_buffers.statistics_of(registered)}
        own = {
            name: self.engine.all_gather(buffers.flatten(mine.values()).cpu(), f"checkpoint.{name}")
            for name, mine in each.items()
        }
        if source is not None and (position := source.position()) is not None:
            own["positions"] = contents.encoded(self.engine.all_gather_object(position, "checkpoint.positions"))
        own |= extra_states.gather(self.engine, self._modules(models, registered))
        own |= self.generators.gather(in_steps=in_steps, epoch_ended=ends_epoch and not state.samples_of_epoch)
        for part in self._parts:
            part.save(content)
        if self._writer is None:
            return
        facts, tensors = contents.collect(models, optimizers, registered, heartbeat)
        facts |= content.facts
        facts |= {
            "format": checkpoint.FORMAT,
            "state": asdict(state),
            "automatic": automatic,
            "best": score,
            "initial": self.initial._asdict(),
            "world_size": self.engine.size,
            "engine": self.engine.name,
            "config": self._config,
            "typed": {name: contents.plain(value) for name, value in self._flags.typed.items()},
            "data": self._data,
            "scaler": scaler.state_dict(),
            "own": {
                name: [self.engine.size, {one: list(tensor.shape) for one, tensor in mine.items()}]
                for name, mine in each.items()
            },
            "late": late,
            "input": self._size_of(source),
            "ended": ended,
            "chosen": self._chosen,
            "split": source.split if source is not None else (self.facts or {}).get("split"),
        }
        types: Facts = facts["registered_types"]
        types |= {name: contents.type_of(what) for name, what in self.generators.registered.items()}
        self._writer.put(facts, contents.snapshot(tensors | content.live, heartbeat) | own | content.tensors)

    def _size_of(self, source: Input | None) -> Facts:
        if source is not None:
            return {"samples": source.samples, "per_epoch": source.per_epoch}
        return self.facts["input"] if self.facts is not None else {"samples": 0, "per_epoch": 0}

    def score(self, state: TrainState, epoch: int) -> Facts | None:
        """Return metric, direction and value of the last evaluation, if it was in this epoch."""
        for name, metric in self._metrics.items():
            if name in state.evaluation and state.evaluated_epoch == epoch:
                return {"metric": name, "direction": metric.direction, "value": state.evaluation[name]}
        return None

    def _written(self, path: Path, error: OSError | None) -> None:
        if self._writer is not None:
            self.interval.written(self._writer.processor, self._writer.seconds, failed=error is not None)
        if error is None:
            self._last_good, step = path.name, int(path.stem.removeprefix("step-"))
            self.output.event("checkpoint", file=path.name, step=step, cost_seconds=round(self.interval.cost, 6))
            return
        last = f"the last good one is {self._last_good}" if self._last_good else "there is no earlier one"
        goes_on = "" if self._ends else "training continues; "
        line = f"checkpoint {path} not written ({error.strerror or error}): {goes_on}{last}"
        lines.warn(line)
        self.output.event("error", kind="checkpoint", message=line)

    def close(self, heartbeat: Callable[[], None] = lambda: None) -> str | None:
        """Wait until the last snapshot is on the disk. Return an error message if that failed, else None, on every rank. A
        collective."""
        message = None
        self.release(heartbeat)
        if self._writer is not None and self._writer.failed is not None:
            message = self._unsaved(self._writer.failed)
            if self._writer.failed.errno in (errno.ESTALE, errno.EBUSY):  # do not write another run's summary.json
                self.output.output_dir = None
        told: str | None = self.engine.broadcast_object(message, "checkpoint.close")
        return told

    def _unsaved(self, error: OSError) -> str:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            remedy = "free some space there"
        elif error.errno == errno.EBUSY:
            remedy = "give each run an --output-dir of its own"
        elif error.errno == errno.ESTALE:
            remedy = "start again with --output-dir where it is now, and do not move it while a run writes there"
        elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            remedy = "make it writable"
        else:
            remedy = "examine its file system"
        if self._last_good:
            remedy += f"; --resume auto then continues from {self._last_good}"
        return f"the last checkpoint could not be written to {self.directory} ({error.strerror or error}): {remedy}"
