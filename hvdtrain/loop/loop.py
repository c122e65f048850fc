"""The loop over steps: counts, records, saves, and ends where all ranks agree to. epochs.py has the loop around it."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from hvdtrain.checkpoint.parts import HERE, IN_STEPS
from hvdtrain.engines.base import AMP_DTYPES
from hvdtrain.engines.errors import UserError
from hvdtrain.inputs.inputs import Input
from hvdtrain.inputs.sources import of_epoch
from hvdtrain.loop.run_base import Phase, RunBase
from hvdtrain.loop.step import Step
from hvdtrain.loop.stopping import Decision, Stopped


class Loop(RunBase):
    """The steps of a training, and how far it is."""

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

    # ---- steps

    def steps(self, *data: Any, changes: bool = False) -> Iterator[Step]:
        """Yield the remaining steps of this epoch. Over all ranks, each sample is used once per epoch, also after a resume.

        data: tensors of equal length; or a number of samples, to get their indices; or a DataLoader; or a `Source`; or a
        dictionary of several DataLoaders, or tuples of tensors: the first one determines the epochs. Of a stream (a
        DataLoader over an IterableDataset, or a loader with a state_dict), each rank gives its part. changes: the data of
        another epoch may be others, of another length or with other batches.
        """
        self.require_head()
        self.prepared().require_same_parameters()
        self.phase = Phase.STEPS
        return self._steps(of_epoch(self, data, changes))

    def require_head(self) -> None:
        """Raise UserError if the script is not where its loop of steps may begin."""
        self.prepared("run.steps()")
        if self.phase is Phase.OUTSIDE:
            raise UserError("run.steps() outside of run.epochs(): write `for epoch in run.epochs(N):` around it")
        if self.phase is not Phase.HEAD:
            remedy = 'give it both data sets, run.steps({"a": ..., "b": ...}), or an epoch each, '
            remedy += "run.steps(..., changes=True)"
            raise UserError(f"run.steps() was called twice in one epoch: {remedy}")

    def _steps(self, opened: Input) -> Iterator[Step]:
        state, shared, features = self.state, self.shared(), self.features
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
        state.train_seconds += self.clock.lap()
        self.metrics_logger.ranks(self.clock)
        self.checkpoints.generators.end_steps()
        self.phase = Phase.TAIL
        self.engine.activity.leave_steps()

    def _finish_step(self, step: Step, opened: Input, scaler: torch.amp.GradScaler) -> None:
        """Count a step, record it, and save or stop if that is to follow."""
        state, clock = self.state, self.clock
        step.require_complete()
        scaler.update()
        now = clock.end_step(step.count, step.local_count)
        state.train_seconds += clock.step_seconds
        if self.metrics_logger.unwritten:  # an evaluation within the step
            self.metrics_logger.evaluation(opened)
        if step.left_out is not None:  # None: a feature counts it later
            state.skipped = state.skipped + 1 if step.left_out else 0
        state.step += 1
        state.samples_of_epoch += step.count
        state.samples += step.count
        self.engine.activity.finish_step(state.step)
        for after_step in self.features.after_step:
            after_step(step)
        if step.logged:
            self.metrics_logger.step(step, opened, clock)
            clock.mark("reporting")
        due = now >= self.checkpoints.interval.due_at
        if (due or self.engine.activity.asked or state.step >= self.stopping.save_at) and step.may_save:
            decision = self.stopping.decide(state.step, due)
            if decision is not Decision.GO_ON:
                self.checkpoints.save(state, opened, IN_STEPS, automatic=decision is Decision.SAVE_AUTOMATICALLY)
                clock.mark("saving")
            if decision is Decision.STOP:
                raise Stopped

    def stop(self) -> None:
        """Save outside of steps, and raise Stopped. Every rank calls it at the same point."""
        self.checkpoints.save(self.state, self.data.input, HERE)
        raise Stopped
