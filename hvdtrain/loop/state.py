"""The position in training, its length, its initial configuration and its metrics: plain data, the same on all ranks."""

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hvdtrain.engines.errors import UserError
from hvdtrain.output.metric_names import Metric


class Stage(enum.Enum):
    """Where the script is in its loops."""

    OUTSIDE = enum.auto()  # of the loop over `run.epochs`
    HEAD = enum.auto()  # in an epoch, before its steps
    STEPS = enum.auto()  # in the loop over `run.steps`
    TAIL = enum.auto()  # in an epoch, after its steps
    ENDED = enum.auto()  # the block of `training.start` was left


@dataclass
class TrainState:
    """The position in training. It is the same on all ranks and is saved in every checkpoint."""

    epoch: int = 0  #: current epoch, from 0
    samples_of_epoch: int = 0  #: samples of this epoch processed so far, over all ranks
    samples: int = 0  #: samples since the beginning of training, over all ranks
    step: int = 0  #: steps since the beginning of training
    skipped: int = 0  #: consecutive steps before this one without finite gradients; with --sync-every, a rank's own
    train_seconds: float = 0.0  #: time spent in steps, without evaluations and checkpoints
    train: dict[str, float] = field(default_factory=dict)  #: loss and recorded values of the last logged step
    evaluation: dict[str, float] = field(default_factory=dict)  #: metrics and `count` of the last evaluation
    prefix: str = ""  #: prefix of that evaluation, such as "test" or "validation"
    evaluated_epoch: int = -1  #: its epoch, from 0; -1: there was none
    best: dict[str, Any] = field(default_factory=dict)  #: the fields of the best epoch's `Best`

    def best_with(self, score: Mapping[str, Any] | None, metrics: Mapping[str, Metric]) -> "Best | None":
        """Return the best epoch, also considering `score`, that of the current one, if it was evaluated."""
        held = Best(**self.best) if self.best else None
        # NaN would stay the best for ever: every comparison with it is false.
        if score is None or math.isnan(score["value"]):
            return held
        now = Best(**score, epoch=self.epoch, step=self.step)
        # A resumed program may name another metric first. Values of two metrics cannot be compared.
        if held is None or (held.metric, held.direction) != (now.metric, now.direction):
            return now
        return now if metrics[now.metric].better(now.value, held.value) else held

    def end_epoch(self) -> None:
        """Go to the beginning of the next epoch."""
        self.epoch += 1
        self.samples_of_epoch = 0


class Best(NamedTuple):
    """The best epoch so far, by the first of the metrics that the script has named."""

    metric: str
    direction: str  #: "min" or "max"
    value: float
    epoch: int  #: from 0; of equal ones, the first
    step: int  #: the number of steps after it


class Initial(NamedTuple):
    """The configuration with which the run began. Learning rates and the global batch are derived from it, even if the run
    is resumed with a different number of ranks."""

    ranks: int  #: number of ranks when the run began
    batch_size: int  #: per rank and micro-batch
    accumulate: int  #: micro-batches per step

    @property
    def global_batch(self) -> int:
        """Samples per step, over all ranks and micro-batches."""
        return self.ranks * self.batch_size * self.accumulate


class Length(NamedTuple):
    """How long to train: a number of epochs, or of steps; and to which values of the evaluation at most."""

    epochs: int | None = None
    steps: int | None = None
    goals: Mapping[str, float] = {}

    @classmethod
    def of(
        cls, epochs: int | None, steps: int | None, stop_at: Mapping[str, float | None] | None,
        metrics: Mapping[str, Metric], state: TrainState,
    ) -> "Length":  # fmt: skip
        """Return the length that `run.epochs` was given. Raises UserError."""
        if (epochs is None) == (steps is None):
            raise UserError("run.epochs() takes a number of epochs, or steps=NUMBER")
        if not isinstance(number := steps if epochs is None else epochs, int) or number < 0:
            raise UserError(f"run.epochs() takes a whole number of at least 0, not {number!r}")
        # An epoch that has begun counts as reached: a run cannot be shortened to end before it.
        done, unit = (state.step, "step") if epochs is None else (state.epoch + (state.samples_of_epoch > 0), "epoch")
        if number and number < done:  # 0: no training is wanted
            begun = f"{unit} {done} has been reached: continue with at least {done}, or use another --output-dir"
            raise UserError(f"run.epochs() for {number} {unit}{'s' * (number != 1)}, but {begun}", everywhere=True)
        goals = {name: goal for name, goal in (stop_at or {}).items() if goal is not None}
        for name in goals.keys() - metrics.keys():
            raise UserError(f'stop_at: {name} has no direction: training.start(flags, metrics={{"{name}": "max"}})')
        return cls(epochs, steps, goals)

    def ends(self) -> dict[str, int | None]:
        """Return epochs and steps, for checkpoints."""
        return {"epochs": self.epochs, "steps": self.steps}

    def is_left(self, state: TrainState) -> bool:
        """Return whether there is something left to train."""
        return state.step < self.steps if self.steps is not None else state.epoch < (self.epochs or 0)

    def ended(self, state: TrainState, metrics: Mapping[str, Metric], facts: Mapping[str, Any]) -> str:
        """Return why there is nothing to train in a run that is resumed; empty if there is something. facts: of its
        checkpoint."""
        # The program had left its loop by itself, such as by early stopping.
        # With the same length, it would leave it again.
        left = facts["ended"] == self.ends() and facts["state"]["step"] == state.step
        if (self.epochs or self.steps) and not self.is_left(state):
            return "this run has finished: more epochs or steps continue it, another --output-dir begins a new one"
        if left:
            remedy = "with more epochs, it continues"
            return f"training has ended after epoch {state.epoch}, as the program left run.epochs there: {remedy}"
        if self.goals and self.reached(state.evaluation, metrics):
            return "this run has reached its target, and ends: another target continues it"
        return ""

    def missed(self, evaluation: Mapping[str, float], metrics: Mapping[str, Metric]) -> str:
        """Return a line if an evaluation has not reached all goals; empty if it has."""
        if not self.goals or self.reached(evaluation, metrics):
            return ""
        goals = (f"{name} {metrics[name].show(goal)}" for name, goal in self.goals.items())
        return f"target {' and '.join(goals)} not reached"

    def reached(self, evaluation: Mapping[str, float], metrics: Mapping[str, Metric]) -> bool:
        """Return whether an evaluation has reached all goals."""
        return all(
            name in evaluation and metrics[name].reached(evaluation[name], goal) for name, goal in self.goals.items()
        )

    def require_recorded(self, evaluation: Mapping[str, float]) -> None:
        """Raise UserError if an evaluation lacks the value of a goal."""
        for name in self.goals:
            if evaluation and name not in evaluation:
                had = ", ".join(held for held in evaluation if held != "count")
                remedy = f"write run.record({name}=...) in it"
                raise UserError(f"stop_at: the evaluation recorded {had}, and not {name}: {remedy}", everywhere=True)
