"""`Run`, the object that a training script uses. The script writes the loop; `Run` handles distribution and restarts.

A call that is missing, repeated or in the wrong place raises a UserError with the correct call. docs/training.md shows
programs.
"""

import contextlib
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hvdtrain.cli import Flags
from hvdtrain.data.sharding import kept, mixed_seed, passes_per_step, seed_generators
from hvdtrain.engines.accelerators import Copies
from hvdtrain.engines.base import AMP_DTYPES, Engine
from hvdtrain.engines.errors import Failure, UserError
from hvdtrain.launching.exit_codes import TARGET_MISSED
from hvdtrain.models import exporting
from hvdtrain.output.clock import Clock
from hvdtrain.output.metric_names import Metric, require_free
from hvdtrain.output.metrics_logger import MetricsLogger
from hvdtrain.output.profiling import Profile
from hvdtrain.output.run_output import RunOutput
from hvdtrain.training.checkpoint import Facts, name_of
from hvdtrain.training.checksums import require_same_on_all
from hvdtrain.training.evaluation import CutShort, Evaluation
from hvdtrain.training.gather import gather
from hvdtrain.training.guard import Guard, Stopped
from hvdtrain.training.inputs import Input, Kind
from hvdtrain.training.local_steps import LocalSteps
from hvdtrain.training.names import own_name
from hvdtrain.training.predictions import Predictions, write_predictions
from hvdtrain.training.prepared import Prepared, refuse_replicas
from hvdtrain.training.randomness import is_generator
from hvdtrain.training.resume import Checkpoints
from hvdtrain.training.schedules import positions, require_length, require_registered, require_stepped
from hvdtrain.training.sources import evaluation_batches, open_input, same
from hvdtrain.training.state import Best, Initial, TrainState
from hvdtrain.training.step import Shared, Step, keep_in_order


class Run:
    """One training run, created by `training.start`. Attributes: engine, rank, size, device, state, initial, evaluation."""

    def __init__(
        self, engine: Engine, flags: Flags, asked: Mapping[str, object], metrics: Mapping[str, Metric], output: RunOutput,
        checkpoints: Checkpoints, guard: Guard, profile: Profile, state: TrainState, kinds: Sequence[Kind],
    ):  # fmt: skip
        self.engine, self.flags, self.metrics = engine, flags, metrics
        self.rank, self.size, self.device, self.seed = engine.rank, engine.size, engine.device, flags.seed
        self.output, self.checkpoints, self.guard, self.profile = output, checkpoints, guard, profile
        self.state = state  # the position in training; always the same object
        self.initial: Initial = checkpoints.initial  # derive learning rates from this; unchanged by a resume
        self._kinds = kinds  # of data
        self.exit_code = 0
        self.ended = False  # the block of `training.start` was left
        self.clock = Clock(engine.device)
        self._copies = Copies(engine.device)
        self._unread: Step | None = None  # the last step, if it is not known yet whether its gradients were finite
        self.metrics_logger = MetricsLogger(engine, output, metrics, state)
        self._prepared: Prepared | None = None
        self._local: LocalSteps | None = None  # with --sync-every
        self._asked = dict(asked)
        self._dataset: str | None = None
        self._registered: dict[str, Any] = {}
        self._summary: dict[str, object] = {}
        self._stepped: dict[str, int] = {}  # in the first step: where the schedulers stand that count steps
        self._data: tuple[Any, ...] = ()  # the arguments of `steps`
        self._input: Input | None = None  # what they were opened as, once training has begun
        self._epochs: int | None = None
        self._step_limit: int | None = None
        self._goals: dict[str, float] = {}
        self._in_epoch = self._in_steps = self._had_steps = False
        self._evaluated = self._predicted = False  # with --evaluate: whether there was an evaluation, with predictions
        self._step: Step | None = None  # the current one
        self._evaluation: Evaluation | None = None  # the current one, inside `evaluating`
        self._predictions: Predictions | None = None  # of the current evaluation, with --predict

    # ---- before training

    @property
    def output_dir(self) -> Path | None:
        """--output-dir on rank 0, None on other ranks: only rank 0 writes files."""
        return self.output.output_dir

    def say(self, line: str) -> None:
        """Print a line on rank 0, above the progress bar."""
        self.output.say(line)

    def event(self, name: str, **fields: object) -> None:
        """Append an event to metrics.jsonl on rank 0."""
        self.output.event(name, **fields)

    def heartbeat(self) -> None:
        """Tell the watchdog that this rank makes progress. Call it during long operations outside of steps."""
        self.guard.heartbeat()

    def alone(self, seconds: float | None = None) -> contextlib.AbstractContextManager[None]:
        """Context manager for work of one rank while the others wait: a file of your own, pictures, samples.

        seconds: time limit (default: ten minutes, or ten times the limit of a step if that is more). No collectives inside.
        """
        return self.engine.activity.during("work of one rank", seconds)

    def raising_together(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Context manager for a block that may fail on some ranks. If one rank raises, every rank raises. A collective."""
        return self.engine.raising_together(name)

    def to_device(self, *tensors: Tensor) -> Any:
        """Return the tensors on this rank's device: a single tensor, or a tuple."""
        moved = self._copies.to_device(tensors)
        return moved[0] if len(moved) == 1 else moved

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return an autocast context manager for --amp. `step.batches` and `evaluating` enter it automatically."""
        if self.flags.amp == "off":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, AMP_DTYPES[self.flags.amp])

    def describe_data(self, name: str, reason: str, **facts: object) -> None:
        """Print and record which data is used. Raises UserError if the run to resume used other data.

        A collective; call it at most once. reason: which data this is and why it was chosen, in one line. facts: numbers and
        strings that identify the data; they must be the same on all ranks, and when the run is resumed.
        """
        self._require_running("run.describe_data()")
        if self._dataset is not None:
            raise UserError(
                "run.describe_data() was already called (run.prepare calls it, too): call it once, before run.prepare"
            )
        self._dataset = name
        data = {"dataset": name, **facts}
        self.engine.require_equal("the data", data, remedy="give every host the same data, or name it with --dataset")
        now = self.flags.given()
        config = {flag: now[flag] if value is None else value for flag, value in self._asked.items()}
        with self.raising_together("output"):
            self.checkpoints.require_fit(config, data)
            self.output.open(continued=self.checkpoints.continues)
        self.metrics_logger.start(name, reason, now)
        self.checkpoints.announce(self.state)

    def prepare(self, *parts: Any, find_unused_parameters: bool = False, **named: Any) -> Any:
        """Return the models and optimizers to train with, in the order given. They are the same on every rank, and restored
        from the checkpoint if the run is resumed. A collective; call it once, before training.

        named: further ones, after those without a name; messages then call a model by its name. find_unused_parameters:
        some parameters may get no gradient in some steps (costs one small message per step).
        """
        self._require_running("run.prepare()")
        if self._prepared is not None:
            how = "give it all models and optimizers at once; another training, such as the next fold, is another"
            raise UserError(f"run.prepare() was called twice: {how} training.start()")
        if self._dataset is None:
            name = Path(self.flags.program).stem
            self.describe_data(name, f"{name}'s own")
        micro_batches = passes_per_step(self.initial.global_batch, self.size, self.flags.batch_size)
        names = [""] * len(parts) + list(named)
        parts = (*parts, *named.values())
        worker = self.guard.worker
        prepared = Prepared(self.engine, worker, self.flags, parts, names, micro_batches, find_unused_parameters)
        self.checkpoints.restore(prepared.models, prepared.optimizers, prepared.scaler)
        for optimizer in prepared.optimizers:
            keep_in_order(prepared, optimizer)
        if worker is not self.engine:
            name_of = self.guard.monitor.name
            self._local = LocalSteps(self.engine, self.flags, prepared, self.state.step, name_of)
            self.checkpoints.restore_local(self._local, self.state)
        self._prepared = prepared
        return prepared.in_order_of(parts)

    def register(self, **objects: Any) -> None:
        """Save objects in every checkpoint, and restore them now if the run is resumed. A collective; after
        `prepare`, before the first step.

        objects: with `state_dict` and `load_state_dict`, such as a torch scheduler or averaged weights. Or generators of
        random numbers of torch, Python or numpy, of which each rank has its own: they go on with the epoch and the step.
        """
        prepared = self.prepared("run.register()")
        if self._input is not None:
            how = "call it before the loop over run.epochs"
            raise UserError(f"run.register() once training has begun, where a resumed run could not restore it: {how}")
        generators = {name: what for name, what in objects.items() if is_generator(what)}
        objects = {name: what for name, what in objects.items() if name not in generators}
        self.checkpoints.register_generators(generators)
        for name, what in objects.items():
            if not (hasattr(what, "state_dict") and hasattr(what, "load_state_dict")):
                raise UserError(f"run.register({name}=...) got a {type(what).__name__}: it has no state_dict")
            if isinstance(what, torch.nn.Module):
                refuse_replicas(name, what)
        self._registered |= objects
        self.checkpoints.restore_registered(objects, prepared.optimizers)
        require_same_on_all(self.engine, objects)
        self.checkpoints.restore_statistics(objects)
        for what in objects.values():
            if self._local is not None and isinstance(what, torch.nn.Module):
                self._local.follow(what)

    # ---- the loop

    @property
    def progress(self) -> float:
        """The fraction of training that is done, 0 to 1."""
        if self._step_limit is not None:
            return min(1.0, self.state.step / self._step_limit)
        return self.epochs_done / self._epochs if self._epochs else 0.0

    @property
    def epochs_done(self) -> float:
        """The number of epochs done, including the fraction of the current one."""
        per_epoch = self.checkpoints.per_epoch if self._input is None else self._input.per_epoch
        if not per_epoch:  # before training, and of a stream, whose length is not known
            return float(self.state.epoch)
        return self.state.samples / per_epoch

    @property
    def best(self) -> Best | None:
        """The best epoch so far, with the current one once it is evaluated; None before the first evaluation."""
        held = Best(**self.state.best) if self.state.best else None
        score = self.checkpoints.score(self.state, self.state.epoch) if self._in_epoch else None
        if score is None or math.isnan(score["value"]):
            return held
        now = Best(**score, epoch=self.state.epoch, step=self.state.step)
        if held is None or (held.metric, held.direction) != (now.metric, now.direction):
            return now
        return now if self.metrics[now.metric].better(now.value, held.value) else held

    def epochs(
        self, count: int | None = None, *, steps: int | None = None, stop_at: Mapping[str, float | None] | None = None
    ) -> Iterator[int]:
        """Yield the number (from 0) of each remaining epoch. A checkpoint is saved after each epoch.

        count: total number of epochs; or steps: total number of steps. stop_at: stop after an epoch whose evaluation has
        reached all of these values (None: no target). If they are not reached by the end, the exit code is 3.
        """
        prepared = self.prepared("run.epochs()")
        if self.flags.evaluate is not None:
            yield from self._epoch_to_evaluate()
            return
        if (count is None) == (steps is None):
            raise UserError("run.epochs() takes a number of epochs, or steps=NUMBER")
        if not isinstance(number := steps if count is None else count, int) or number < 0:
            raise UserError(f"run.epochs() takes a whole number of at least 0, not {number!r}")
        self._require_enough(count, steps)
        self._epochs, self._step_limit = count, steps
        self.metrics_logger.epochs = count
        self._goals = {name: goal for name, goal in (stop_at or {}).items() if goal is not None}
        for name in self._goals:
            if name not in self.metrics:
                raise UserError(f'stop_at: {name} has no direction: training.start(flags, metrics={{"{name}": "max"}})')
        self.checkpoints.restore_settings(prepared.optimizers)
        generators = self.checkpoints.generators
        generators.begin(self.state.samples)
        if self._has_ended():
            return
        while self._is_left() and not (self._goals and self._reached()):
            self._in_epoch, self._in_steps, self._had_steps = True, False, False
            generators.begin_epoch()
            self.clock.restart()
            yield self.state.epoch
            self._close_epoch()

    def _has_ended(self) -> bool:
        """Return whether the run that is resumed had ended, because its program left a loop over as many epochs."""
        facts = self.checkpoints.facts
        if facts is None or facts["ended"] != self._length() or facts["state"]["step"] != self.state.step:
            return False
        if self._is_left():
            how = "with more epochs, it continues"
            self.say(f"training has ended after epoch {self.state.epoch}, as the program left run.epochs there: {how}")
        return True

    def _length(self) -> dict[str, int | None]:
        return {"epochs": self._epochs, "steps": self._step_limit}

    def _epoch_to_evaluate(self) -> Iterator[int]:
        """Yield the epoch of the checkpoint once, without steps: its evaluations are repeated."""
        self.metrics_logger.only_evaluates = self._in_epoch = True
        self._had_steps = False
        yield self.metrics_logger.number() - 1
        self._in_epoch = False
        self.metrics_logger.evaluation(None)
        self.say(self.metrics_logger.epoch())

    def _require_enough(self, epochs: int | None, steps: int | None) -> None:
        """Raise UserError if a resumed run has done more than it should do in all. 0: no training is wanted."""
        wanted, done, unit = (steps, self.state.step, "step") if epochs is None else (epochs, self.state.epoch, "epoch")
        if epochs is not None and self.state.samples_of_epoch:
            done += 1
        if wanted and wanted < done:
            begun = f"{unit} {done} has been reached: continue with at least {done}, or use another --output-dir"
            raise UserError(f"run.epochs() for {wanted} {unit}s, but {begun}", everywhere=True)

    def total_steps(self, data: Any, epochs: int) -> int:
        """Return the number of steps of `epochs` epochs over all ranks, for a scheduler: OneCycleLR(total_steps=...). A
        collective.

        data: what `run.steps` gets; of several tensors, one.
        """
        self._require_running("run.total_steps()")
        opened = open_input(self._kinds, self.engine, (data,), self.seed, self.flags.batch_size, self.output)
        if not opened.per_epoch:
            how = "write run.epochs(steps=NUMBER), and give the scheduler this number"
            raise UserError(f"run.total_steps(): the length of a stream is not known: {how}", everywhere=True)
        return epochs * opened.plan(self.engine, self.flags, self.initial, self.state, epochs).steps_per_epoch()

    def gather(self, rows: Tensor) -> Tensor:
        """Return the rows of all ranks' tensors, each [n, ...], in rank order, with their gradient. A collective.

        For losses over the samples of all ranks, and queues of them. The rows are of this micro-batch: with --accumulate,
        a loss that compares rows compares fewer. The numbers of rows may differ. Of a rank that has no sample in this
        micro-batch (`step.batch.count` is 0), there is none. This rank's rows begin at `step.batch.first`.
        """
        self._require_running("run.gather()")
        if not isinstance(rows, Tensor) or not rows.ndim:
            what = "a scalar" if isinstance(rows, Tensor) else f"a {type(rows).__name__}"
            raise UserError(f"run.gather() got {what}: give it a tensor with a row for each sample")
        if self._local is not None:
            raise UserError("run.gather() cannot go with --sync-every: ranks take their steps alone", everywhere=True)
        batch = self._step.current if self._step is not None else None
        if batch is not None and not batch.count:
            rows = rows[:0]
        return gather(self.engine, rows, alone=self._step is not None and self._step.inspected)

    def _is_left(self) -> bool:
        if self._step_limit is not None:
            return self.state.step < self._step_limit
        assert self._epochs is not None
        return self.state.epoch < self._epochs

    def _reached(self) -> bool:
        held = self.state.evaluation
        return all(name in held and self.metrics[name].reached(held[name], goal) for name, goal in self._goals.items())

    def steps(self, *data: Any) -> Iterator[Step]:
        """Yield the remaining steps of this epoch. Over all ranks, each sample is used once per epoch, also after a resume.

        data: tensors of equal length; or a number of samples, to get their indices; or a DataLoader; or a `Source`; or a
        dictionary of several DataLoaders, or tuples of tensors: the first one determines the epochs. Of a stream (a
        DataLoader over an IterableDataset, or a loader with a state_dict), each rank gives its part.
        """
        prepared = self.prepared("run.steps()")
        if not self._in_epoch:
            raise UserError("run.steps() outside of run.epochs(): write `for epoch in run.epochs(N):` around it")
        if self._in_steps or self._had_steps:
            how = 'use one loop of steps per epoch, for several data sets run.steps({"a": ..., "b": ...})'
            raise UserError(f"run.steps() was called twice in one epoch: {how}")
        if self.flags.evaluate is not None:
            self._had_steps = True
            return iter(())
        prepared.require_same_groups()
        self._in_steps = True
        return self._steps(self._open(data))

    def _open(self, data: tuple[Any, ...]) -> Input:
        if self._input is not None and same(data, self._data):
            return self._input
        with kept():  # a DataLoader draws a seed for its workers when it begins
            return self._opened(data)

    def _opened(self, data: tuple[Any, ...]) -> Input:
        before, state = self._input, self.state
        opened = open_input(self._kinds, self.engine, data, self.seed, self.flags.batch_size, self.output)
        how = "give every rank all samples, each takes its part of them"
        self.engine.require_equal("the number of samples of run.steps()", opened.samples, how)
        if before is not None and before.samples != opened.samples:
            raise UserError(f"run.steps() got {opened.samples} samples, and {before.samples} in the epoch before")
        if before is None:
            self.checkpoints.require_all(self._registered, opened)
            self.checkpoints.require_split(opened.split)
        if before is None and (line := opened.restore(self.checkpoints.positions, state)):
            self.say(line)
        if state.samples_of_epoch > opened.per_epoch > 0:
            done = f"{state.samples_of_epoch} samples of this epoch are done, and it has {opened.per_epoch}"
            raise UserError(f"the checkpoint does not match the data: {done}: give the same data", everywhere=True)
        epochs = self._epochs
        if epochs is None:
            epochs = state.epoch + 1 + (self._step_limit or 0)  # at least a step in each
        per_epoch = opened.begin(self.engine, self.flags, self.initial, state, epochs)
        steps = self._step_limit or epochs * per_epoch
        if before is None:
            with self.raising_together("schedules"):
                require_registered(self.prepared().optimizers, self._registered)
            for line in require_length(self._registered, steps, self._epochs) if steps else ():
                self.say(f"warning: {line}")
            self._stepped = positions(self._registered, steps) if steps != self._epochs else {}
        self._data, self._input = data, opened
        self.metrics_logger.steps = steps
        self.checkpoints.forget()
        self.checkpoints.interval.begin()
        return opened

    def _steps(self, opened: Input) -> Iterator[Step]:
        state, prepared, guard = self.state, self.prepared(), self.guard
        shared = Shared(self.engine, prepared, guard, self.clock, state, self.seed, self.autocast)
        self.checkpoints.generators.begin_steps(state.samples_of_epoch)
        ahead = opened.steps(state.epoch)
        while state.step != self._step_limit and (planned := next(ahead, None)) is not None:
            self.engine.activity.begin_step(state.step)
            if guard.max_skipped or (guard.check_steps and state.step % guard.check_steps == 0):
                guard.begin_step(state, prepared.models)
            prepared.pending.clear()
            for clear in prepared.zero_grads.values():
                clear()
            number = state.step + 1
            last = state.samples_of_epoch + planned.count == opened.per_epoch or number == self._step_limit
            logged = last or number == 1 or number % self.flags.log_steps == 0
            every = self.flags.checkpoint_steps
            at_once = logged or bool(every and number % every == 0)
            step = Step(shared, planned, opened, self._unread, logged=logged, at_once=at_once)
            self._step = step
            yield step
            self._step = None
            self._finish_step(step, opened, last)
        state.train_seconds += self.clock.lap()
        self.metrics_logger.ranks(self.clock)
        self.checkpoints.generators.end_steps()
        self._in_steps, self._had_steps = False, True
        self.engine.activity.leave_steps()

    def _finish_step(self, step: Step, opened: Input, last: bool) -> None:
        state, clock = self.state, self.clock
        step.require_complete()
        if self._stepped:
            if not step.left_out:
                require_stepped(self._registered, self._stepped)
            self._stepped = {}
        assert self._prepared is not None
        self._prepared.scaler.update()
        now = clock.end_step(step.count, step.local_count)
        if self.metrics_logger.unwritten:  # an evaluation within the step
            self.metrics_logger.evaluation(opened)
        if self._unread is not None:
            self._learn_of_last_step()
        step.before = None  # and its batches
        if step.verdicts:
            self._unread = step
        else:
            state.skipped = state.skipped + 1 if step.left_out else 0
        state.step += 1
        state.samples_of_epoch += step.count
        state.samples += step.count
        self.engine.activity.finish_step(state.step)
        every = self.flags.checkpoint_steps or 0
        equal, asked_for = True, bool(every) and state.step % every == 0  # equal: the weights are, on all ranks
        if self._local is not None:
            equal = last or self._local.is_due(state.step)
            asked_for = equal and self._local.passed(every, state.step)
            if equal:
                self._exchange(self._local)
        if step.logged:
            self.metrics_logger.step(step, opened, clock)
            clock.mark("reporting")
        if self.profile.active:
            self.profile.step(state.step, clock)
        due = now >= self.checkpoints.interval.due_at
        stops = automatic = False
        if equal and (due or self.engine.activity.asked):
            stops, automatic = self.guard.should_stop(state, due), self.guard.should_save(state)
        if stops or automatic or asked_for:
            state.train_seconds += clock.lap()
            self._save(automatic=not stops and automatic)
            clock.mark("saving")
        if stops:
            raise Stopped

    def _exchange(self, local: LocalSteps) -> None:
        compared = local.passed(self.guard.check_steps, self.state.step)
        if compared:  # afterwards, replicas of a host that differ would be equal again
            self.guard.compare_replicas(self.state, self.prepared().models, self.guard.worker)
        local.exchange(self.state.step)
        if compared:
            self.guard.compare_replicas(self.state, self.prepared().models)
        self.clock.mark("communication")

    def _learn_of_last_step(self) -> None:
        """Count the last step as skipped or not. If that is still to be read, and it was: without looking for the layer."""
        step, self._unread = self._unread, None
        assert step is not None
        for verdict in step.verdicts.values():
            self.engine.activity.collective = "gradients"  # the device may still wait for the other ranks
            step.left_out = not verdict.finite() or step.left_out
            self.engine.activity.collective = None
        if step.verdicts and step.left_out and self.guard.explains(self.state):
            self.guard.report_skipped_step(self.state, step.number, self.guard.NOT_LOOKED)
        step.verdicts.clear()
        self.state.skipped = self.state.skipped + 1 if step.left_out else 0

    def _save(
        self, *, automatic: bool = False, ends_epoch: bool = False, score: Facts | None = None, ended: bool = False
    ) -> None:
        if self._unread is not None:
            self._learn_of_last_step()
        what = self.prepared()
        what.require_same_groups()
        parts = what.models, what.optimizers, what.scaler, self._registered
        with self.checkpoints.interval.saving():
            # Do not save weights that differ between ranks. This waits for ranks that are in their step.
            self.guard.compare_replicas(self.state, what.models)
            with self.engine.activity.during(
                "checkpoint", 0.0
            ):  # the limit of a step: each tensor that is copied is progress
                self.checkpoints.save(
                    self.state,
                    *parts,
                    local=self._local,
                    automatic=automatic,
                    ends_epoch=ends_epoch,
                    in_steps=self._in_steps,
                    score=score,
                    ended=self._length() if ended else None,
                    source=self._input,
                    heartbeat=self.guard.heartbeat,
                )

    def _close_epoch(self, *, ended: bool = False) -> None:
        """End the epoch, and save. ended: the program has left the loop over `run.epochs`."""
        number = self.state.epoch + 1
        if self._in_steps:
            taken, count = self.state.samples_of_epoch, self._input.per_epoch if self._input else 0
            part = f"{taken} of {count}" if count else f"{taken}"
            raise UserError(
                f"epoch {number} was left after {part} samples: let `for step in run.steps(...)` run to its end "
                "(run.epochs(steps=N) ends after N steps)"
            )
        if not self._had_steps:
            raise UserError(f"epoch {number} had no steps: write `for step in run.steps(...):` in it")
        best, score = self.best, self.checkpoints.score(self.state, self.state.epoch)
        self.state.best = best._asdict() if best is not None else {}
        self._in_epoch = False
        self.metrics_logger.evaluation(self._input)
        line = self.metrics_logger.epoch()
        for name in self._goals:
            if self.evaluation and name not in self.evaluation:
                had = ", ".join(held for held in self.evaluation if held != "count")
                how = f"write run.record({name}=...) in it"
                raise UserError(f"stop_at: the evaluation recorded {had}, and not {name}: {how}", everywhere=True)
        if self._input is None or self._input.at_end(self.state.samples_of_epoch):
            self.state.end_epoch()  # else the limit of steps was reached: with a higher one, this epoch continues
        self._save(ends_epoch=True, score=score, ended=ended)
        self.say(line)

    # ---- evaluation

    @contextlib.contextmanager
    def evaluating(self, data: Any, *, prefix: str = "") -> Iterator[Any]:
        """Context manager for an evaluation. Yields this rank's part of a test set. A collective.

        Inside, models, also registered ones, are in evaluation mode, without gradients; batch norm's running statistics are
        averaged over ranks. data: a number of samples (yields a slice); or a DataLoader or a `Source` (yields an iterator
        over batches). prefix: for the names in summary.json and in the output, such as "test".
        """
        prepared = self.prepared("run.evaluating()")
        if self._evaluation is not None:
            raise UserError("run.evaluating() inside of run.evaluating(): end the first block before the next")
        self.metrics_logger.evaluation(self._input)
        began = time.perf_counter()
        averaged = [what for what in self._registered.values() if isinstance(what, torch.nn.Module)]
        beside = averaged if self._local is None else []  # else their statistics are averaged where weights are
        if self.flags.evaluate is None:  # else the same on all ranks
            prepared.buffers.share((self.state.epoch, self.state.step, self._in_steps), beside)
            if line := prepared.buffers.warning():
                self.say(line)
        whole = isinstance(data, int) and not isinstance(data, bool)
        batches = None if whole else evaluation_batches(self._kinds, self.engine, data, self.seed)
        self._evaluation = evaluation = Evaluation(self.engine, data, batches, self._go_on_evaluating)
        if self.flags.predict is not None:
            self._predictions = Predictions(whole=whole)
        modes = [(module, module.training) for model in (*prepared.replicas, *averaged) for module in model.modules()]
        for model in (*prepared.replicas, *averaged):
            model.eval()
        seed_generators(mixed_seed(self.seed, "evaluate", self.state.step, self.rank), self.device)
        try:
            during = self.engine.activity.during("evaluation")
            with self._shared_weights(), during, torch.no_grad(), self.autocast():
                yield evaluation.mine()
        except CutShort:
            pass
        finally:
            self._evaluation = None
            for module, training in modes:
                module.training = training
        # Stopped between steps: save, and do not record the partial evaluation, which is repeated after the resume. Within a
        # step, the position does not match the weights yet, so nothing is saved before the step has ended.
        if not self._in_steps and self.guard.stops_here("evaluate.stop"):
            prepared.buffers.restore_own()
            self._save()
            raise Stopped
        self._evaluated = True
        if self._in_epoch:
            self.state.evaluated_epoch = self.state.epoch
        if self._predictions is not None:
            self._write_predictions(self._predictions)
        self.metrics_logger.evaluated(evaluation.means(), prefix)
        self.clock.leave_out(time.perf_counter() - began)

    def predict(self, **values: Tensor) -> None:
        """Give what the model says about each sample of this batch, inside `evaluating`: with --predict, it is written.

        values: a tensor for each name, with a row for each sample in the order of the batch. The file has them in the order
        of the data set.
        """
        if self._evaluation is None:
            raise UserError("run.predict() outside of run.evaluating(): write `with run.evaluating(...):` around it")
        if self._predictions is not None:
            self._predictions.add(self._evaluation.rows(), values)

    def _write_predictions(self, predictions: Predictions) -> None:
        """Write the predictions of all ranks. A collective."""
        rows = predictions.of_all(self.engine)
        if rows is None:  # of another evaluation, such as that of the training set
            return
        if self._predicted:
            how = "call run.predict in one of them"
            raise UserError(f"--predict: two evaluations have predicted, and there is one file: {how}", everywhere=True)
        self._predicted = True
        with self.raising_together("predictions"), self.alone():
            if self.rank == 0:
                write_predictions(self.flags.predict, *rows)
        self.say(f"{self.flags.predict}: {len(rows[0]):,} samples")

    def _shared_weights(self) -> contextlib.AbstractContextManager[None]:
        """Context manager in which the weights are the same on all ranks."""
        between_exchanges = self._local is not None and self._in_steps
        return self._local.shared_weights() if self._local and between_exchanges else contextlib.nullcontext()

    def _go_on_evaluating(self) -> None:
        """Called for each batch. After a stop request, ranks leave an evaluation at any batch, except inside a step."""
        self.guard.heartbeat()
        if self.guard.stop_requested and not self._in_steps:
            raise CutShort

    @property
    def evaluation(self) -> dict[str, float]:
        """Metrics of the last evaluation by name, and `count`."""
        return self.state.evaluation

    def record(self, *, count: Tensor | float | None = None, **values: Tensor | float) -> None:
        """Record values of an evaluation.

        Inside `evaluating`: sums over this rank's samples, or one value per sample. They are summed over ranks and divided
        by the number of samples, or by the sum of their `count`, for instance a number of tokens.
        After `evaluating`: values that are added to the evaluation unchanged. They must be the same on all ranks.
        """
        require_free(values)
        if not values:
            raise UserError("run.record() got nothing: write run.record(loss=...)")
        if self._evaluation is not None:
            self._evaluation.add(values, count)
        elif self.metrics_logger.unwritten and all(torch.as_tensor(value).numel() == 1 for value in values.values()):
            self.metrics_logger.amend({name: float(value) for name, value in values.items()})
        else:
            raise UserError(
                "run.record() outside of run.evaluating(): write `with run.evaluating(...):` around it "
                "(training metrics go to step.record())"
            )

    # ---- the end

    def export(self, path: str | Path, model: torch.nn.Module | None = None, *example: Tensor) -> None:
        """Write a model for use without hvdtrain, on rank 0. A collective.

        path: the state_dict as weights.safetensors or weights.pt; or the program, as model.pt2 or model.onnx. model: one
        of `prepare`, or of the script, such as averaged weights (default: the first of `prepare`). example: what a call
        of it gets, with at least two samples; only for programs.
        """
        path, prepared = Path(path), self.prepared("run.export()")
        # Of nn.DataParallel and of a compiled model: the one inside.
        own = dict(zip(prepared.replicas, prepared.models, strict=True))
        chosen = prepared.models[0] if model is None else own.get(model, getattr(model, "_orig_mod", model))
        kind = exporting.require_kind(path)
        if kind in exporting.PROGRAMS and not example:
            raise UserError(f"run.export({path.name!r}): a program needs an example: run.export(FILE, model, example)")
        with self.raising_together("export"), self.alone(), self._shared_weights():
            if self.rank == 0 and kind in exporting.WEIGHTS:
                exporting.write_weights({own_name(name): t for name, t in chosen.state_dict().items()}, path)
            elif self.rank == 0:
                exporting.write_program(chosen, example, path)

    def summary(self, **fields: object) -> None:
        """Add fields to summary.json."""
        self._summary |= fields

    def finish(self, warn_of: Iterable[str] = ()) -> None:
        """Wait for the last checkpoint and write the summary. Called at the end of `training.start`.

        warn_of: metrics that the script has named, and should have recorded.
        """
        if self.flags.evaluate is not None:
            if not self._evaluated:
                how = "write `with run.evaluating(...):` in the loop over run.epochs, or after it"
                raise UserError(f"--evaluate: this program has evaluated nothing: {how}", everywhere=True)
            if self.flags.predict is not None and not self._predicted:
                how = "write run.predict(predicted=...) beside run.record in its evaluation"
                raise UserError(f"--predict: this program has predicted nothing: {how}", everywhere=True)
            self.metrics_logger.evaluation(None)
        elif self._in_epoch and self._at_head():  # the script left the loop over `run.epochs` at the head of an epoch
            self._in_epoch = False
            score = self.checkpoints.score(self.state, self.state.epoch - 1)
            self._save(ends_epoch=True, score=score, ended=True)
        elif self._in_epoch:  # or at the end of one
            self._close_epoch(ended=True)
        with self.engine.activity.during("checkpoint", 0.0):
            unsaved = self.checkpoints.close(self.guard.heartbeat)
        extra: dict[str, object] = {}
        if self._input is not None:
            extra = self._input.summary()
            self._input.close()
        if best := self.best:
            kept = {"checkpoint": name_of(best.step)} if self.checkpoints.writes else {}
            extra["best"] = dict(metric=best.metric, value=best.value, epoch=best.epoch + 1, step=best.step) | kept
        models = self._prepared.models if self._prepared is not None else []
        self.metrics_logger.end(self._dataset, models, extra | self._summary)
        if unsaved:
            raise Failure(unsaved)
        for line in self._omitted(warn_of) if self.state.step else ():
            self.say(f"warning: {line}")
        if self._goals and not self._reached():
            goals = " and ".join(f"{name} {self.metrics_logger.show(name, goal)}" for name, goal in self._goals.items())
            self.say(f"target {goals} not reached")
            self.exit_code = TARGET_MISSED

    def _at_head(self) -> bool:
        """Return whether this epoch has had no steps, and is not the first."""
        had_steps = self._in_steps or self._had_steps or self.state.samples_of_epoch > 0
        return self.state.step > 0 and not had_steps

    def _omitted(self, metrics: Iterable[str]) -> Iterator[str]:
        """Yield what the script has announced and not done."""
        recorded = {*self.state.evaluation, *self.state.train, *self.metrics_logger.recorded}
        for name in metrics:
            if name not in recorded:
                yield f"metrics: {name} was never recorded: write run.record({name}=...) in run.evaluating()"
        for name, what in self._registered.items():
            if int(getattr(what, "n_averaged", 1)) == 0:
                yield f"{name} has averaged nothing: call {name}.update_parameters(model) after step.update()"

    def _require_running(self, what: str) -> None:
        """Raise UserError after the end of the block of `training.start`. what: name of the caller."""
        if self.ended:
            raise UserError(f"{what} after the end of its training: move it into `with training.start(flags) as run:`")

    def prepared(self, what: str = "training") -> Prepared:
        """Return the prepared models and optimizers. Raises UserError before `prepare`. what: name of the caller."""
        self._require_running(what)
        if self._prepared is None:
            raise UserError(
                f"{what} before run.prepare(): write `model, optimizer = run.prepare(model, optimizer)` first"
            )
        return self._prepared
