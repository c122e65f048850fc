"""The checkpoints of a run: when one is saved, what is in it, and how a run takes it back. Only rank 0 writes files.

The position in training and what describes the run are here. objects.py has what ranks have in common, own.py what each
rank has of its own.
"""

import contextlib
import errno
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from hvdtrain.checkpoint import checkpoint, contents
from hvdtrain.checkpoint.checkpoint import Facts
from hvdtrain.checkpoint.objects import Objects
from hvdtrain.checkpoint.own import (
    EXTRA,
    IN_STEPS,
    Buffers,
    ExtraState,
    Modes,
    Moment,
    Own,
    Provider,
    Saved,
    extra_states_in,
    load_extra_state,
    share_extra_state,
    unlike_integers,
    unlike_object,
)
from hvdtrain.checkpoint.randomness import Generators
from hvdtrain.checkpoint.resume import Resume
from hvdtrain.checkpoint.resumed_epoch import ResumedEpoch, States
from hvdtrain.checkpoint.sums import require_same_on_all
from hvdtrain.checkpoint.writer import CheckpointInterval, Writer
from hvdtrain.engines import lines
from hvdtrain.engines.base import Engine
from hvdtrain.engines.errors import Failure, UserError
from hvdtrain.flags import Flags
from hvdtrain.guards.judge import HangTimeouts
from hvdtrain.inputs.inputs import Input
from hvdtrain.loop.prepare import Prepared
from hvdtrain.loop.state import TrainState
from hvdtrain.output.metric_names import Metric
from hvdtrain.output.run_output import RunOutput
from hvdtrain.program.carried import Carried

if TYPE_CHECKING:
    from hvdtrain.checkpoint.mirror import Mirror

REMEDIES = {  # by the error with which a checkpoint could not be written
    errno.ENOSPC: "free some space there",
    errno.EDQUOT: "free some space there",
    errno.EBUSY: "give each run an --output-dir of its own",
    errno.ESTALE: "start again with --output-dir where it is now, and do not move it while a run writes there",
    errno.ELOOP: "name the directory itself in --output-dir",
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "make it writable"),
}


class StreamPosition(Provider):
    """This rank's position in its stream; or rank 0's order of the epoch, which may be long, for all ranks."""

    source: Input | None = None  # what the steps read
    of_ranks: list[Any] | None = None  # in the checkpoint, until training begins

    def __init__(self, engine: Engine):
        self._engine = engine
        self._own: dict[int, Any] = {}  # of these, by rank, those of this process's ranks
        self._shared = False  # whether these are one for all ranks

    def is_common(self, *, many: bool) -> bool:
        if self.source is not None:
            self._shared = self.source.shares_position
        return self._shared

    def common(self, engine: Engine, moment: Moment) -> Any:
        return self.state(moment)

    def state(self, moment: Moment) -> Any:
        if self.source is None or self.source.position is None:
            # Stopped in an evaluation before the first step: nothing was read since.
            return self._own.get(self._engine.rank)
        held = self.source.position()
        # A position is text: it may have millions of values, which are JSON already.
        return held if self._shared else json.dumps(held)

    def load(self, saved: Saved) -> None:
        self.of_ranks = None if None in saved.states else list(saved.states)
        if self.of_ranks is not None and not saved.common:
            self.of_ranks = [json.loads(state) for state in saved.states]
        self._own[saved.rank] = saved.state if saved.goes_on or saved.common else None
        self._shared = saved.common

    def forget(self) -> None:
        """Free what was read."""
        self.of_ranks, self._own = None, {}


class Checkpoints:
    """Saves the parts of a run, and restores them. The constructor raises UserError on rank 0 only.

    metrics: by name; the first one determines the best checkpoint.
    """

    def __init__(
        self,
        engine: Engine,
        flags: Flags,
        metrics: Mapping[str, Metric],
        output: RunOutput,
        mirror: "Mirror | None" = None,
    ):
        self.engine, self.output, self.mirror, self._keep = engine, output, mirror, flags.keep
        self._metrics = dict(metrics)
        self._patience = HangTimeouts(flags.step_timeout).step(0.0)
        self.resume = Resume(engine, flags, output)  # the checkpoint to resume from
        self.writes = self.resume.writes
        self.interval = CheckpointInterval(self.writes and engine.rank == 0 and flags.checkpoint_steps is None)
        self.generators = Generators(engine, flags.seed, output.say, keeps=self.writes)
        self._evaluates = flags.evaluate is not None
        self.own, self._position = Own(engine, same=self._evaluates), StreamPosition(engine)
        self.before_save: list[Callable[[], None]] = []  # each may be a collective, and raise: then nothing is saved
        self.registered: dict[str, Any] = {}  # what the script has registered, by name; without generators
        self.ended_loops: list[int] = []  # steps at the end of each loop over epochs that is over
        self._last_good: str | None = None
        self._writer: Writer | None = None
        self._ends = False  # training is over
        self._read_back = False  # the first checkpoint of this run

    def open(self, data: Mapping[str, object]) -> None:
        """Compare this run with the checkpoint that it is resumed from, and begin to write new ones. Raises UserError on
        rank 0 only. data: what identifies the data of this run."""
        self.resume.require_fit(data)
        directory = self.resume.directory
        if directory is None or self.engine.rank != 0:
            return
        try:
            self.resume.make_room(directory)
        except OSError as error:
            message = f"{directory} cannot be moved aside ({error.strerror})"
            raise UserError(f"{message}: name another --output-dir") from error
        if self.resume.continues and self.resume.facts is not None:
            self._last_good = checkpoint.name_of(self.resume.facts["state"]["step"])
        self._writer = Writer(directory, self._keep, self._written, self.resume.lock, self._patience)

    # ---- what is saved, and restored if the run is resumed

    def restore(self, prepared: Prepared) -> None:
        """Save models and optimizers from now on, and restore them if the run is resumed. A collective."""
        trained = sum(p.numel() * p.element_size() for model in prepared.models for p in model.parameters())
        self.interval.expect(3 * trained)  # assumes two optimizer values per parameter, as with Adam
        self.before_save.append(prepared.require_same_parameters)
        self.objects = Objects(self.engine, self.resume, prepared, self.registered)
        modes = Modes(prepared.models, prepared.replicas, self.registered)
        lengthened = bool(self.resume.lengthened)
        self.resumed_epoch = ResumedEpoch(prepared, self.registered, self.resume.facts, modes, lengthened=lengthened)
        modules = self.objects.modules()
        self._watch(modules)
        if self.writes:
            contents.require_packable(prepared.optimizers, {})
        if (content := self.resume.content()) is not None:
            facts, tensors = content
            self.objects.restore(facts, tensors)
            self.own.restore(tensors)
        for name, model in modules.items():
            self.own.add(f"{EXTRA}{name}", ExtraState(model))
        self.own.add("buffers", Buffers(prepared.models))
        if not self._evaluates:
            self.own.add("generators", self.generators)
            self.own.add("integer buffers", unlike_integers(prepared.models, self.output.say))
            self.own.add("position", self._position)
            self.own.add("modes", modes)

    def _watch(self, modules: Mapping[str, nn.Module]) -> None:
        """Make ready for modules whose state is saved: refuse what cannot be, and make room for what is restored."""
        for module in modules.values() if self.writes else ():
            contents.require_storable(contents.tensors_of(module))
            ExtraState(module).state(Moment())
        self.objects.watch(modules)

    def register(self, objects: Mapping[str, Any], generators: Mapping[str, object]) -> None:
        """Save objects, and generators of random numbers, from now on, and restore them. A collective."""
        self.generators.registered |= generators
        for name, what in generators.items() if self.resume.facts is not None else ():
            self.objects.require_registered(name, what)
        modules, content = self.objects.modules(objects), self.resume.content()
        self._watch(modules)
        if self.writes:
            contents.require_packable([], objects)
        self.objects.register(objects, {} if content is None else content[1])
        require_same_on_all(self.engine, objects)
        for name, module in modules.items():
            self.own.add(f"{EXTRA}{name}", ExtraState(module))
            self.own.add(f"statistics {name}", Buffers([module], only_statistics=True))
        for name, what in objects.items() if not self._evaluates else ():
            self.own.add(f"registered {name}", unlike_object(name, what, self.output.say))

    def require_all(self, source: Input) -> None:
        """Raise UserError on every rank if the program does not register an object that the checkpoint has, or reads other
        samples."""
        for name in self.resume.facts["registered_types"] if self.resume.facts is not None else ():
            if name not in self.registered and name not in self.generators.registered:
                message = f"the checkpoint has {name!r}, which is not registered now"
                raise UserError(f"{message}: {contents.REGISTER}", everywhere=True)
        self.resume.require_samples(source)

    def positions(self) -> list[Any] | None:
        """Return each rank's position in its stream; None if there is none."""
        return self._position.of_ranks

    @contextlib.contextmanager
    def looking_after(self, frame: FrameType, of_run: Callable[[], Facts]) -> Iterator[None]:
        """Context manager in which is said what a function carries on in variables, and no checkpoint has.

        frame: of the function, which has the loop over `run.epochs`; it is let go at the end.
        """
        lacking, models = self.objects.lacking, self.objects.prepared.models
        if self.output.output_dir is not None and self.writes:
            saved, restored = self.registered | self.generators.registered, list[Tensor]()
            # What a program has copied between two loops is what it means.
            if self.resume.facts is not None and lacking.carried is None:
                restored = [weight for model in models for weight in model.parameters()]
                for optimizer in self.objects.prepared.optimizers:
                    restored += [one for one in tree_leaves(optimizer.state) if isinstance(one, Tensor)]
            orders = (self.resume.facts or {}).get("orders", {})
            say = self.output.say
            lacking.carried = Carried(frame, say, saved, models, of_run, restored=restored, orders=orders)
        # A frame keeps all variables of its function alive, and with them tensors.
        del frame
        try:
            yield
        finally:
            if lacking.carried is not None:
                lacking.carried.end()

    def begin_steps(self, frame: FrameType, resumed: int) -> None:
        """Look whether something has changed that it carries on. frame: of whoever takes the steps of an epoch, which had
        this number of samples before it was resumed."""
        if (carried := self.objects.lacking.carried) is not None:
            carried.begin_steps(frame, resumed)

    def end_steps(self, samples: int) -> None:
        """Let the rest of an epoch, of this number of samples, draw what it draws; look what a resumed one has gathered."""
        self.generators.end_steps()
        self.resumed_epoch.modes.state(IN_STEPS)
        if (carried := self.objects.lacking.carried) is not None:
            carried.end_steps(samples)

    def begin_epoch(self) -> None:
        """Note what an epoch begins with."""
        self.generators.begin_epoch()
        self.resumed_epoch.begin_head()

    def begin_training(self) -> None:
        """Free the loaded checkpoint, and schedule the first automatic one."""
        self.resume.forget()
        self.own.forget()
        self._position.forget()
        self.interval.begin()

    # ---- saving

    def save(
        self, state: TrainState, source: Input | None, moment: Moment, *, automatic: bool = False,
        score: Facts | None = None, ended: Facts | None = None,
    ) -> None:  # fmt: skip
        """Take a snapshot and return. Rank 0 writes it in the background. A collective.

        source: what the steps read. automatic: not requested by the user; the next automatic checkpoint replaces it. score:
        of the evaluation, if it follows one. ended: how long the loop over run.epochs was that the program left.
        """
        with self.interval.saving():
            for call in self.before_save:
                call()
            # 0.0: at least the time limit of a step. Each tensor that is copied is progress, which restarts it.
            with self.engine.activity.during("checkpoint", 0.0):
                if self.writes:
                    about = {"automatic": automatic, "best": score, "ended": ended}
                    self._save(state, source, moment, about)
                    if self.mirror is not None:
                        self.mirror.require_own()
                else:
                    self.objects.restore_settings()  # a stop in an evaluation may save before `run.epochs`

    def _save(self, state: TrainState, source: Input | None, moment: Moment, about: Facts) -> None:
        heartbeat = self.engine.activity.heartbeat
        self._position.source = source
        copied = self.own.save(moment)
        collected = self.objects.save(heartbeat, writes=self._writer is not None)
        if self._writer is None or collected is None:
            return
        (facts, live, states), before = collected, self.resume.facts or {}
        facts["registered_types"] |= {name: contents.type_of(one) for name, one in self.generators.registered.items()}
        facts |= about | {
            "format": checkpoint.CHECKPOINT_FORMAT,
            "state": asdict(state),
            "evaluation": moment.evaluation,
            "head": self.resumed_epoch.changed_at_head(),
            "loops": [*self.ended_loops],
            "initial": self.resume.initial._asdict(),
            "world_size": self.engine.size,
            "engine": self.engine.name,
            "arithmetic": self.resume.arithmetic,
            "config": self.resume.config,
            "typed": self.resume.typed,
            "attempt": self.resume.attempt,
            "data": self.resume.data,
            # Stopped before its steps, a resumed run has what its checkpoint had.
            "input": before.get("input", {"samples": 0, "per_epoch": 0}),
            "split": before.get("split"),
            "rows": before.get("rows", {}),
            "orders": carried.orders
            if (carried := self.objects.lacking.carried) is not None
            else before.get("orders", {}),
        }
        if source is not None:
            facts |= {
                "input": {"samples": source.samples, "per_epoch": source.per_epoch},
                "split": source.split,
                "rows": source.rows,
            }
        copied[contents.OBJECTS] = live.pop(contents.OBJECTS)
        self._writer.wait(heartbeat)
        tensors = contents.snapshot(live, heartbeat) | copied
        if not self._read_back:  # with the code of a resume, and compared; later ones have the same form
            self._read_back = True
            checkpoint.require_readable(facts, tensors)
            prepared = self.objects.prepared
            contents.require_as_saved(states, facts, tensors, prepared.models, prepared.optimizers)
        self._writer.put(facts, tensors, heartbeat)

    def score(self, state: TrainState, epoch: int) -> Facts | None:
        """Return metric, direction and value of the last evaluation, if it was in this epoch."""
        for name, metric in self._metrics.items():
            if name in state.evaluation and state.evaluated_epoch == epoch:
                return {"metric": name, "direction": metric.direction, "value": state.evaluation[name]}
        return None

    def has(self, name: str) -> bool:
        """Return whether this rank has written the checkpoint of this name."""
        return self._writer is not None and (self._writer.directory / name).exists()

    def load_best(self, models: Sequence[nn.Module], step: int, heartbeat: Callable[[], None]) -> None:
        """Give the models, and registered modules such as an average, what they had after `step` steps, in the checkpoint
        that is kept as the best. A collective."""
        modules = {name: what for name, what in self.registered.items() if isinstance(what, nn.Module)}
        with self.engine.activity.during("checkpoint", 0.0), self.engine.raising_together("checkpoint.best"):
            if self._writer is not None:
                self._writer.flush(heartbeat)
                path = self._writer.directory / checkpoint.name_of(step)
                try:
                    _, tensors = checkpoint.read_checkpoint(path)
                except (checkpoint.Damaged, OSError) as error:
                    raise Failure(f"the best checkpoint, {path}, cannot be read ({error})") from error
                contents.load_models(tensors, models)
                for name, what in modules.items():
                    if (state := contents.registered_state(tensors, name)) is not None:  # else registered since
                        contents.load_registered(name, what, state)
                extra, named = extra_states_in(tensors), self.objects.modules() | modules
                for name in extra.keys() & named.keys():
                    load_extra_state(named[name], extra[name])
        for model in (*models, *modules.values()):
            self.engine.broadcast_model(model)
            share_extra_state(self.engine, model)

    # ---- several loops over epochs

    def states(self) -> Callable[[], None]:
        """Return what gives models, optimizers and registered objects the states that they have now."""
        return States(self.objects.prepared, self.registered | {"loss scaler": self.objects.prepared.scaler}).put_back

    def load_earlier(self, step: int) -> Facts | None:
        """Give all that is saved what it had after `step` steps, if that checkpoint is there, and return its facts. A
        collective."""
        facts, tensors = None, dict[str, Tensor]()
        with self.engine.activity.during("checkpoint", 0.0), self.engine.raising_together("checkpoint.earlier"):
            if self._writer is not None:
                with contextlib.suppress(checkpoint.Damaged, OSError):
                    facts, tensors = checkpoint.read_checkpoint(self._writer.directory / checkpoint.name_of(step))
        found: Facts | None = self.engine.broadcast_object(facts, "checkpoint.earlier.facts")
        if found is not None:
            self.objects.load_earlier(found, tensors)
            self.own.load_earlier(tensors)
        return found

    def flush(self, heartbeat: Callable[[], None]) -> None:
        """Wait until the last snapshot is on the disk. A collective."""
        with self.engine.activity.during("checkpoint", 0.0), self.engine.raising_together("checkpoint.flush"):
            if self._writer is not None:
                self._writer.flush(heartbeat)

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

    # ---- the end

    def release(self, heartbeat: Callable[[], None] = lambda: None) -> None:
        """Wait until the last snapshot is on the disk, and release the lock on the output directory. Idempotent.

        Called at the end of the run, also by an exception.
        """
        if self._writer is not None and self.resume.lock is not None:
            self._ends = True
            self._writer.flush(heartbeat)
        if self._writer is not None:
            self._writer.close()
        self.resume.release()

    def close(self, heartbeat: Callable[[], None] = lambda: None) -> str | None:
        """Wait until the last snapshot is on the disk. Return an error message if that failed, else None, on every rank. A
        collective."""
        message = None
        self.release(heartbeat)
        if self._writer is not None and self._writer.failed is not None:
            message = self._unsaved(self._writer.failed)
            if self._writer.failed.errno in (errno.ESTALE, errno.EBUSY):  # do not write another run's summary.json
                self.output.output_dir = None
        everywhere: str | None = self.engine.broadcast_object(message, "checkpoint.close")
        return everywhere

    def _unsaved(self, error: OSError) -> str:
        remedy = REMEDIES.get(error.errno or 0, "examine its file system")
        if self._last_good:
            remedy += f"; --resume auto then continues from {self._last_good}"
        why = error.strerror or error
        return f"the last checkpoint could not be written to {self.resume.directory} ({why}): {remedy}"
