"""The loop over epochs: how long a run trains, what is recorded and saved after an epoch, and the best one."""

import math
from collections.abc import Iterator, Mapping

from hvdtrain.checkpoint.checkpoint import Facts
from hvdtrain.checkpoint.parts import Moment
from hvdtrain.engines.errors import UserError
from hvdtrain.loop.loop import Loop
from hvdtrain.loop.run_base import Length, Phase
from hvdtrain.loop.state import Best


class Epochs(Loop):
    """The epochs of a training, and the steps in them."""

    def epochs(
        self, count: int | None = None, *, steps: int | None = None, stop_at: Mapping[str, float | None] | None = None
    ) -> Iterator[int]:
        """Yield the number (from 0) of each remaining epoch. A checkpoint is saved after each epoch.

        count: total number of epochs; or steps: total number of steps. stop_at: stop after an epoch whose evaluation has
        reached all of these values (None: no target). If they are not reached by the end, the exit code is 3.
        """
        self.prepared("run.epochs()")
        self._set_length(count, steps, stop_at or {})
        self.checkpoints.objects.restore_settings()
        generators = self.checkpoints.generators
        generators.begin(self.state.samples)
        if self._has_ended():
            return
        while self._is_left() and not (self.length.goals and self._reached()):
            self.phase = Phase.HEAD
            generators.begin_epoch()
            self.clock.restart()
            yield self.state.epoch
            self._close_epoch()

    def _set_length(self, count: int | None, steps: int | None, stop_at: Mapping[str, float | None]) -> None:
        if (count is None) == (steps is None):
            raise UserError("run.epochs() takes a number of epochs, or steps=NUMBER")
        if not isinstance(number := steps if count is None else count, int) or number < 0:
            raise UserError(f"run.epochs() takes a whole number of at least 0, not {number!r}")
        self._require_enough(count, steps)
        self.length = Length(count, steps, {name: goal for name, goal in stop_at.items() if goal is not None})
        self.metrics_logger.epochs = count
        for name in self.length.goals:
            if name not in self.metrics_logger.metrics:
                raise UserError(f'stop_at: {name} has no direction: training.start(flags, metrics={{"{name}": "max"}})')

    def _has_ended(self) -> bool:
        """Return whether the run that is resumed had ended, because its program left a loop over as many epochs."""
        facts = self.checkpoints.resume.facts
        if facts is None or facts["ended"] is None or facts["state"]["step"] != self.state.step:
            return False
        if facts["ended"] != self.length.ends():
            return False
        if self._is_left():
            remedy = "with more epochs, it continues"
            self.say(
                f"training has ended after epoch {self.state.epoch}, as the program left run.epochs there: {remedy}"
            )
        return True

    def _require_enough(self, epochs: int | None, steps: int | None) -> None:
        """Raise UserError if a resumed run has done more than it should do in all. 0: no training is wanted."""
        wanted, done, unit = (steps, self.state.step, "step") if epochs is None else (epochs, self.state.epoch, "epoch")
        if epochs is not None and self.state.samples_of_epoch:
            done += 1
        if wanted and wanted < done:
            begun = f"{unit} {done} has been reached: continue with at least {done}, or use another --output-dir"
            raise UserError(f"run.epochs() for {wanted} {unit}s, but {begun}", everywhere=True)

    def _is_left(self) -> bool:
        if self.length.steps is not None:
            return self.state.step < self.length.steps
        assert self.length.epochs is not None
        return self.state.epoch < self.length.epochs

    def _reached(self) -> bool:
        held, metrics = self.state.evaluation, self.metrics_logger.metrics
        return all(name in held and metrics[name].reached(held[name], goal) for name, goal in self.length.goals.items())

    # ---- the end of an epoch

    def _save_epoch(self, score: Facts | None, *, ended: bool) -> None:
        moment = Moment(epoch_ended=not self.state.samples_of_epoch)
        ends = self.length.ends() if ended else None
        self.checkpoints.save(self.state, self.data.input, moment, score=score, ended=ends)

    def _close_epoch(self, *, ended: bool = False) -> None:
        """End the epoch, and save. ended: the program has left the loop over `run.epochs`."""
        number, source = self.state.epoch + 1, self.data.input
        self._require_steps(number)
        best, score = self.best, self.checkpoints.score(self.state, self.state.epoch)
        self.state.best = best._asdict() if best is not None else {}
        self.phase = Phase.OUTSIDE
        self.metrics_logger.evaluation(source)
        line = self.metrics_logger.epoch()
        for name in self.length.goals:
            if self.evaluation and name not in self.evaluation:
                had = ", ".join(held for held in self.evaluation if held != "count")
                remedy = f"write run.record({name}=...) in it"
                raise UserError(f"stop_at: the evaluation recorded {had}, and not {name}: {remedy}", everywhere=True)
        if source is None or source.at_end(self.state.samples_of_epoch):
            self.state.end_epoch()  # else the limit of steps was reached: with a higher one, this epoch continues
        self._save_epoch(score, ended=ended)
        self.say(line)

    def _require_steps(self, number: int) -> None:
        """Raise UserError if the script has not taken all steps of this epoch. number: its own, from 1."""
        if self.in_steps:
            taken, count = self.state.samples_of_epoch, self.data.input.per_epoch if self.data.input else 0
            part = f"{taken} of {count}" if count else f"{taken}"
            raise UserError(
                f"epoch {number} was left after {part} samples: let `for step in run.steps(...)` run to its end "
                "(run.epochs(steps=N) ends after N steps)"
            )
        if self.phase is Phase.HEAD:
            raise UserError(f"epoch {number} had no steps: write `for step in run.steps(...):` in it")

    def leave_loop(self) -> None:
        """Close the epoch in which the script has left the loop over `run.epochs`, if it has."""
        if not self._in_epoch:
            return
        at_head = self.phase is Phase.HEAD and not self.state.samples_of_epoch
        if self.state.step and at_head:
            self.phase = Phase.OUTSIDE
            self._save_epoch(self.checkpoints.score(self.state, self.state.epoch - 1), ended=True)
        else:
            self._close_epoch(ended=True)

    # ---- its evaluation

    @property
    def evaluation(self) -> dict[str, float]:
        """Metrics of the last evaluation by name, and `count`."""
        return self.state.evaluation

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
        return now if self.metrics_logger.metrics[now.metric].better(now.value, held.value) else held
