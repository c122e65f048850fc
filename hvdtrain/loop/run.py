"""`Run`, the object that a training script uses: the script writes the loops, `Run` handles distribution and restarts.

Read it from top to bottom: before training (`prepare`), the loop over epochs, the loop over steps, what follows a step,
what follows an epoch, evaluations, the end. step.py has a step. A call that is missing, repeated or in the wrong place
raises a UserError with the correct call. docs/training.md shows programs.
"""

import contextlib
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from hvdtrain.checkpoint.checkpoint import Facts, name_of
from hvdtrain.checkpoint.ended_loops import EndedLoops
from hvdtrain.checkpoint.own import IN_STEPS, Moment
from hvdtrain.engines.accelerators import recorded
from hvdtrain.engines.base import AMP_DTYPES
from hvdtrain.engines.errors import Failure
from hvdtrain.inputs.inputs import Input
from hvdtrain.inputs.sharding import passes_per_step
from hvdtrain.inputs.sources import data_described, require_default_device
from hvdtrain.launching.exit_codes import TARGET_MISSED
from hvdtrain.loop.evaluation import CutShort, Evaluation, SharedBuffers, evaluation_modes
from hvdtrain.loop.prepare import prepare, sorted_objects
from hvdtrain.loop.state import Best, Length, Stage
from hvdtrain.loop.step import Shared, Step, keep_in_order
from hvdtrain.loop.stopping import Decision
from hvdtrain.loop.tools import RunTools
from hvdtrain.output.metric_names import require_free
from hvdtrain.program.means import Means
from hvdtrain.program.mistakes import beside_steps, refusal
from hvdtrain.program.own_counts import epochs_of_its_own
from hvdtrain.program.uses import warn_if


class Run(RunTools):
    """A run, created by `training.start`. Attributes: engine, rank, size, device, state, initial, evaluation, exit_code."""

    _ended_loops: EndedLoops  # from `prepare` on
    _nothing_left = ""  # why a run that is resumed has nothing to train
    shares_buffers = True  # before an evaluation: ranks have changed their own while training
    buffers: SharedBuffers  # from `prepare` on

    # ---- before training

    def describe_data(self, name: str, reason: str, **facts: object) -> None:
        """Print and record which data is used. Raises UserError if the run to resume used other data.

        A collective; call it at most once. reason: which data this is and why it was chosen, in one line. facts: numbers and
        strings that identify the data; they must be the same on all ranks, and when the run is resumed.
        """
        self._require_running("run.describe_data()")
        require_default_device()
        if self.metrics_logger.dataset is not None:
            raise refusal("described twice")
        data = data_described(name, reason, facts)
        self.metrics_logger.dataset = name
        self.engine.require_equal("the data", data, remedy="give every host the same data, or name it with --dataset")
        # Rank 0 alone opens files. If it cannot, the others would wait for it in the next collective.
        with self.raising_together("output"):
            self.checkpoints.open(data)
            self.output.open(continued=self.checkpoints.resume.continues)
        self.metrics_logger.start(name, reason, self.flags.given())
        self.checkpoints.resume.announce(self.state)

    def prepare(self, *parts: Any, find_unused_parameters: bool = False, **named: Any) -> Any:
        """Return the models and optimizers to train with, in the order given. They are the same on every rank, and restored
        from the checkpoint if the run is resumed. A collective; call it once, before training.

        named: further ones, after those without a name; messages then call a model by its name. find_unused_parameters:
        some parameters may get no gradient in some steps (costs one small message per step).
        """
        self._require_running("run.prepare()")
        require_default_device()
        if self._shared is not None:
            raise refusal("prepared twice")
        if self.metrics_logger.dataset is None:
            name = Path(self.flags.program).stem
            self.describe_data(name, f"from the program {name}")
        micro_batches = passes_per_step(self.initial.global_batch, self.size, self.flags.batch_size)
        names = [""] * len(parts) + list(named)
        parts = (*parts, *named.values())
        averaging = self.features.averaging or self.engine
        weights = self.flags.weights if self.checkpoints.resume.facts is None else None
        prepared = prepare(
            self.engine, averaging, self.flags, parts, names, micro_batches, find_unused_parameters, weights
        )
        self.checkpoints.restore(prepared)
        for optimizer in prepared.optimizers:
            keep_in_order(prepared, optimizer)
        self._shared = Shared(
            self.engine, prepared, self.clock, self.state, self.flags.seed, self.autocast, self.features, self.say
        )
        self.buffers = SharedBuffers(self.engine, prepared.models, self.say)
        for feature in self.features.all:
            feature.prepare(self)
            self.checkpoints.own.add(type(feature).__name__, feature)
            self.checkpoints.before_save.append(feature.before_save)
        self.checkpoints.before_save.append(self._compare_buffers)
        self.checkpoints.objects.take_settings()
        self._ended_loops = EndedLoops(self.checkpoints, self.state)
        return prepared.in_order_of(parts)

    def _compare_buffers(self) -> None:
        """Say which buffers differ between ranks before the first checkpoint. A collective."""
        # With --sync-every, those of registered modules are averaged. Ranks that take turns have one of each.
        apart = self.prepared().weights_of_all is not None or self.engine.takes_turns
        self.buffers.compare_once({} if apart else self.checkpoints.objects.modules(self.checkpoints.registered))

    def register(self, **objects: Any) -> None:
        """Save objects in every checkpoint, and restore them now if the run is resumed. A collective; after
        `prepare`, before the first step.

        objects: with `state_dict` and `load_state_dict`, such as a torch scheduler or averaged weights. Or generators of
        random numbers of torch, Python or numpy, of which each rank has its own: they go on with the epoch and the step.
        """
        self.prepared("run.register()")
        if self.data.input is not None or self._in_loop:
            raise refusal("registered late")
        objects, generators = sorted_objects(objects)
        self.checkpoints.register(objects, generators)

    # ---- how far it is

    @property
    def progress(self) -> float:
        """The fraction of training that is done, 0 to 1."""
        if self.length.steps is not None:
            return min(1.0, self.state.step / self.length.steps)
        return self.epochs_done / self.length.epochs if self.length.epochs else 0.0

    @property
    def epochs_done(self) -> float:
        """The number of epochs done, including the fraction of the current one."""
        per_epoch = self.checkpoints.resume.per_epoch if self.data.input is None else self.data.input.per_epoch
        if not per_epoch:  # before training, and of a stream, whose length is not known
            return float(self.state.epoch)
        return (self.state.epoch * per_epoch + self.state.samples_of_epoch) / per_epoch

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return an autocast context manager for --amp. `step.batches` and `evaluating` enter it automatically."""
        if self.flags.amp == "off":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, AMP_DTYPES[self.flags.amp])

    # ---- the loop over epochs

    def epochs(
        self, count: int | None = None, *, steps: int | None = None, stop_at: Mapping[str, float | None] | None = None
    ) -> Iterator[int]:
        """Yield the number (from 0) of each remaining epoch. A checkpoint is saved after each epoch.

        count: total number of epochs; or steps: total number of steps. stop_at: stop after an epoch whose evaluation has
        reached all of these values (None: no target). If they are not reached by the end, the exit code is 3.
        """
        return self._epochs(count, steps, stop_at, sys._getframe(1))

    def _epochs(
        self, count: int | None, steps: int | None, stop_at: Mapping[str, float | None] | None, caller: FrameType
    ) -> Iterator[int]:
        self.prepared("run.epochs()")
        self.leave_loop()
        looking_after = self.checkpoints.looking_after(caller, lambda: {"state": asdict(self.state), "best": self.best})
        if self._ended_loops.leaves_out:
            with looking_after:
                self._ended_loops.leave_out()
            return
        first = self._ended_loops.begin(self.heartbeat)
        metrics = self.metrics_logger.metrics
        self.length = Length.of(count, steps, stop_at, metrics, self.state)
        self.metrics_logger.epochs = count
        if self.flags.were_given("epochs"):
            warn_if(epochs_of_its_own, caller, count, self.flags.epochs, say=self.say)
        self.checkpoints.objects.restore_settings()
        self.checkpoints.objects.require_restored()
        generators = self.checkpoints.generators
        generators.begin(self.state.samples)
        self.checkpoints.resumed_epoch.note(self.state)
        facts = self.checkpoints.resume.facts if first else None
        self._nothing_left = self.length.ended(self.state, metrics, facts) if facts is not None else ""
        with looking_after:
            # The program's frame holds this generator. Held by it, too, it would keep all its variables alive.
            del caller, looking_after
            if self._nothing_left:
                generators.leave_loop()
                return
            while self.length.is_left(self.state):
                if self.length.goals and self.length.reached(self.evaluation, metrics):
                    break
                self.stage = Stage.HEAD
                self.checkpoints.begin_epoch()
                self.clock.restart()
                self._in_loop = True
                try:
                    yield self.state.epoch
                finally:  # also if the script leaves the loop by `break`
                    self._in_loop = False
                self._close_epoch()

    # ---- the loop over steps

    def steps(self, *data: Any, changes: bool = False, restart: bool = False) -> Iterator[Step]:
        """Yield the remaining steps of this epoch. Over all ranks, each sample is used once per epoch, also after a resume.

        data: tensors of equal length; or a number of samples, to get their indices; or a DataLoader; or a dictionary of
        several DataLoaders, or tuples of tensors: the first one determines the epochs. Of a stream (a loader of an
        IterableDataset, or with a state_dict), each rank gives its part. changes: the data of another epoch may be others,
        of another length or with other batches. restart: each epoch begins all of several data sets anew.
        """
        self.require_head()
        self.prepared().require_same_parameters()
        self.later_parts.require_none(sys._getframe(1), self.prepared().trained, self.checkpoints.registered)
        self.stage = Stage.STEPS
        self.checkpoints.begin_steps(sys._getframe(1), self.state.samples_of_epoch)
        steps = self._steps(self.data.of_epoch(data, changes, restart, self._begin_reading), lambda: reference())
        # Weak, because the generator holds the function: a circle would live on until the next garbage collection.
        reference = weakref.ref(steps)
        return steps

    def _begin_reading(self, opened: Input, *, first: bool) -> None:
        """Plan the steps over data that are given for the first time, or have changed. A collective."""
        state = self.state
        if first:
            self.checkpoints.require_all(opened)
            if line := opened.restore(self.checkpoints.positions, state):
                self.say(line)
        if state.samples_of_epoch > opened.per_epoch > 0:
            done, count = state.samples_of_epoch, opened.per_epoch
            raise refusal("more done", everywhere=True, DONE=done, COUNT=count)
        epochs = self.length.epochs
        if epochs is None:
            epochs = state.epoch + 1 + (self.length.steps or 0)  # at least a step in each
        per_epoch = opened.begin(self.engine, self.flags, self.initial, state, epochs)
        self.metrics_logger.steps = self.length.steps or (0 if opened.changes else epochs * per_epoch)  # 0: not known
        self.checkpoints.begin_training()
        self.stopping.begin(state.step)

    def require_head(self) -> None:
        """Raise UserError if the script is not where its loop of steps may begin."""
        self.prepared("run.steps()")
        if self.stage is Stage.OUTSIDE:
            raise refusal("steps outside of epochs")
        if self.stage is not Stage.HEAD:
            raise refusal("steps twice")

    def _steps(self, opened: Input, itself: Callable[[], object]) -> Iterator[Step]:
        state, shared, features = self.state, self.shared(), self.features
        if self.output_dir is not None and (not state.step or state.samples_of_epoch):  # it may be resumed
            warn_if(beside_steps, itself(), say=self.say)
        self.checkpoints.resumed_epoch.begin_steps(state)
        self.warn_of_modes()
        self.checkpoints.generators.begin_steps(state.samples_of_epoch)
        ahead = opened.steps(state.epoch)
        while state.step != self.length.steps and (planned := next(ahead, None)) is not None:
            self.engine.activity.begin_step(state.step)
            number = state.step + 1
            last = state.samples_of_epoch + planned.count == opened.per_epoch or number == self.length.steps
            logged = last or number == 1 or number % self.flags.log_steps == 0
            shared.step = step = Step(shared, planned, opened, logged=logged, last=last)
            for every, before_step in features.before_step:
                if state.step % every == 0:
                    before_step(step)
            shared.prepared.pending.clear()
            for clear in shared.prepared.zero_grads.values():
                clear()
            yield step
            shared.step = None
            self._finish_step(step, opened, shared.prepared.scaler)
            if step.ends_epoch:
                break
        for feature in features.all:
            feature.after_steps()
        state.train_seconds += self.clock.lap()
        self.metrics_logger.ranks(self.clock)
        self.checkpoints.end_steps(state.samples_of_epoch)
        self.stage = Stage.TAIL
        self.engine.activity.leave_steps()

    def end_epoch(self) -> None:
        """End this epoch after the current step, without the rest of its samples. Every rank calls it in the same step."""
        self.prepared("run.end_epoch()")
        if (step := self.shared().step) is None or self.data.input is None:
            raise refusal("epoch ended outside of a step")
        if not self.data.input.per_epoch:
            raise refusal("epoch of a stream ended", everywhere=True)
        step.last = step.ends_epoch = True

    def stop(self) -> None:
        """Ask all ranks to stop, as a stop signal does: they save after the same step, and the exit code is 75, so that the
        same command continues. Any rank may call it."""
        self._require_running("run.stop()")
        self.stopping.watch.request_stop(f"run.stop() on rank {self.rank}")

    def _finish_step(self, step: Step, opened: Input, scaler: torch.amp.GradScaler) -> None:
        """Count a step, record it, and save or stop if that is to follow."""
        state, clock = self.state, self.clock
        step.require_complete()
        scaler.update()
        now = clock.end_step(step.count, step.local_count)
        state.train_seconds += clock.step_seconds
        if self.metrics_logger.unwritten:  # an evaluation within the step
            self.metrics_logger.evaluation()
        if step.left_out is not None:  # None: a feature counts it later
            state.skipped = state.skipped + 1 if step.left_out else 0
        state.step += 1
        state.samples_of_epoch = opened.per_epoch if step.ends_epoch else state.samples_of_epoch + step.count
        state.samples += step.count
        self.engine.activity.finish_step(state.step)
        for after_step in self.features.after_step:
            after_step(step)
        if step.logged:
            self.metrics_logger.step(step, clock)
            clock.mark("reporting")
        due = now >= self.checkpoints.interval.due_at
        if (due or self.engine.activity.asked or state.step >= self.stopping.save_at) and step.may_save:
            decision = self.stopping.decide(state.step, due)
            if decision is not Decision.GO_ON:
                self.checkpoints.save(state, opened, IN_STEPS, automatic=decision is Decision.SAVE_AUTOMATICALLY)
                clock.mark("saving")
            if decision is Decision.STOP:
                raise self.stopping.stopped()

    # ---- what follows an epoch

    def _close_epoch(self, *, ended: bool = False) -> None:
        """End the epoch, and save. ended: the program has left the loop over `run.epochs`."""
        number, source = self.state.epoch + 1, self.data.input
        self._require_steps(number)
        # Taken before the stage changes: outside of an epoch, `best` leaves out the current one.
        best, score = self.best, self.checkpoints.score(self.state, self.state.epoch)
        self.state.best = best._asdict() if best is not None else {}
        self.stage = Stage.OUTSIDE
        self.metrics_logger.evaluation()
        line = self.metrics_logger.epoch()
        self.length.require_recorded(self.evaluation)
        if source is None or source.at_end(self.state.samples_of_epoch):
            self.state.end_epoch()  # else the limit of steps was reached: with a higher one, this epoch continues
        self._save_epoch(score, ended=ended)
        self.say(line)
        if undecided := self.metrics_logger.undecided():
            self.say(f"warning: {undecided}")

    def _save_epoch(self, score: Facts | None, *, ended: bool) -> None:
        moment = Moment(epoch_ended=not self.state.samples_of_epoch)
        ends = self.length.ends() if ended else None
        self.checkpoints.save(self.state, self.data.input, moment, score=score, ended=ends)

    def _require_steps(self, number: int) -> None:
        """Raise UserError if the script has not taken all steps of this epoch. number: its own, from 1."""
        if self.in_steps:
            taken, count = self.state.samples_of_epoch, self.data.input.per_epoch if self.data.input else 0
            part = f"{taken} of {count}" if count else f"{taken}"
            raise refusal("epoch left", NUMBER=number, PART=part)
        if self.stage is Stage.HEAD:
            raise refusal("epoch without steps", NUMBER=number)

    def leave_loop(self) -> None:
        """Close the epoch in which the script has left the loop over `run.epochs`, if it has."""
        self.stopping.require_uncaught()
        if not self._in_epoch:
            return
        at_head = self.stage is Stage.HEAD and not self.state.samples_of_epoch
        if self.state.step and at_head:
            self.stage = Stage.OUTSIDE
            self._save_epoch(self.checkpoints.score(self.state, self.state.epoch - 1), ended=True)
        else:
            self._close_epoch(ended=True)

    # ---- evaluations

    @contextlib.contextmanager
    def evaluating(self, data: Any, *, prefix: str = "") -> Iterator[Any]:
        """Context manager for an evaluation. Yields this rank's part of a test set. A collective.

        Inside, models, also registered ones, are in evaluation mode, without gradients; batch norm's running statistics are
        averaged over ranks. data: a number of samples (yields a slice); or a DataLoader (yields an iterator
        over batches). prefix: for the names in summary.json and in the output, such as "test".
        """
        prepared = self.prepared("run.evaluating()")
        if self._evaluation is not None:
            raise refusal("evaluation in evaluation")
        self.checkpoints.resumed_epoch.evaluates(again=self._in_epoch and not self.in_steps)
        self.metrics_logger.evaluation()
        began = time.perf_counter()
        averaged = self.checkpoints.objects.modules(self.checkpoints.registered)
        prepared.require_same_parameters()
        if self.shares_buffers:
            # With --sync-every, the weights and statistics of registered modules are averaged over ranks, too.
            modules = averaged if prepared.weights_of_all is None else {}
            self.buffers.share((self.state.epoch, self.state.step, self.in_steps), modules)
        means = Means(self.output.say_once, self.metrics_logger.evaluated_names)
        seeds = self.flags.seed, "evaluate", self.state.step
        self._evaluation = evaluation = Evaluation(self.engine, data, self.data.evaluated, self._go_on, means, seeds)
        try:
            during = self.engine.activity.during("evaluation")
            modes = evaluation_modes([*prepared.replicas, *averaged.values()])
            with evaluation.running(), modes, self.shared_weights(), during, torch.no_grad(), self.autocast(), means:
                yield evaluation.mine()
        finally:
            self._evaluation = None
        # Stopped between steps: save, and do not record the partial evaluation, which is repeated after the resume. Within a
        # step, the position does not match the weights yet, so nothing is saved before the step has ended.
        if not self.in_steps and self.stopping.is_asked_anywhere():
            # Outside of the loop over epochs, all is saved, and a program may have changed weights since, as by `load_best`.
            if self._in_epoch or not self.state.step:
                self.buffers.restore_own()
                self.checkpoints.save(self.state, self.data.input, self.checkpoints.resumed_epoch.stops(self._in_epoch))
            raise self.stopping.stopped()
        self.note_evaluation(evaluation)
        self.metrics_logger.evaluated(evaluation.means(), prefix)
        self.clock.leave_out(time.perf_counter() - began)

    def _go_on(self) -> None:
        """Called for each batch. After a stop request, ranks leave an evaluation at any batch, except inside a step."""
        self.engine.activity.heartbeat()
        if self.stopping.watch.stop_reason and not self.in_steps:
            raise CutShort

    def record(self, *, count: Tensor | float | None = None, **values: Tensor | float) -> None:
        """Record values of an evaluation.

        Inside `evaluating`: sums over this rank's samples, or a row for each sample, whose mean is its value. They are
        summed over ranks and divided by the number of samples, or by the sum of their `count`, such as a number of tokens.
        After `evaluating`: values that are added to the evaluation unchanged. They must be the same on all ranks.
        """
        require_free(values)
        if not values:
            raise refusal("recorded nothing")
        if self._evaluation is not None:
            self._evaluation.add(values, count)
            return
        given = {name: recorded("run.record", name, value) for name, value in values.items()}
        if not self.metrics_logger.unwritten or any(value.numel() != 1 for value in given.values()):
            raise refusal("recorded outside")
        self.metrics_logger.amend({name: float(value) for name, value in given.items()})

    def note_evaluation(self, evaluation: Evaluation) -> None:
        """Take note of an evaluation that was not cut short."""
        self._taken = evaluation.taken
        if self._in_epoch:
            self.state.evaluated_epoch = self.state.epoch

    def load_best(self) -> Best:
        """Give the models the weights and buffers of the best epoch, and return which that was. After the loop over
        `run.epochs`, for a last evaluation or an export. A collective; needs --output-dir, which has that checkpoint."""
        prepared = self.prepared("run.load_best()")
        if self._in_loop:
            raise refusal("best in the loop")
        self.leave_loop()
        if not self.checkpoints.writes:
            raise refusal("best without checkpoints", everywhere=True)
        if (best := self.best) is None:
            raise refusal("best of nothing", everywhere=True)
        self.checkpoints.load_best(prepared.models, best.step, self.heartbeat)
        return best

    # ---- the end

    def finish(self, warn_of: Iterable[str] = ()) -> None:
        """Wait for the last checkpoint and write the summary. Called at the end of `training.start`.

        warn_of: metrics that the script has named, and should have recorded.
        """
        self.leave_loop()
        if self._nothing_left:
            self.say(self._nothing_left)
        if self._shared is not None:
            self._ended_loops.require_all()
        with self.engine.activity.during("checkpoint", 0.0):
            unsaved = self.checkpoints.close(self.stopping.heartbeat)
        extra: dict[str, object] = {}
        if self.data.input is not None:
            self.data.input.close()
        if best := self.best:
            file = {"checkpoint": name} if self.checkpoints.has(name := name_of(best.step)) else {}
            extra["best"] = dict(metric=best.metric, value=best.value, epoch=best.epoch + 1, step=best.step) | file
        self.metrics_logger.end(self._shared.prepared.models if self._shared is not None else [], extra)
        # Raised only now: the records of a finished training are complete, whatever became of its last checkpoint.
        if unsaved:
            raise Failure(unsaved)
        for line in self.metrics_logger.omitted(warn_of, self.checkpoints.registered) if self.state.step else ():
            self.say(f"warning: {line}")
        if missed := self.length.missed(self.evaluation, self.metrics_logger.metrics):
            self.say(missed)
            self.exit_code = TARGET_MISSED
