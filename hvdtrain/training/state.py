"""The position in training, its initial state, and the directions of its metrics: plain data, the same on all ranks."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from hvdtrain.engines.errors import UserError

# What every script's events have: no value that a script records can have one of these names.
FIXED = frozenset({"event", "time", "elapsed", "seconds", "epoch", "step", "steps", "samples", "count", "prefix"})


@dataclass
class TrainState:
    """Where training stands: the same on all ranks, and whole in every checkpoint."""

    epoch: int = 0  #: from 0
    samples_of_epoch: int = 0  #: of this epoch's order, that are behind us, over all ranks
    samples: int = 0  #: since the beginning of training, over all ranks
    step: int = 0  #: since the beginning of training
    skipped: int = 0  #: steps just before this one, in a row, whose gradients were not finite
    train_seconds: float = 0.0  #: spent in steps, without evaluations and checkpoints
    train: dict[str, float] = field(default_factory=dict)  #: the last logged step: loss, and what the script recorded
    evaluation: dict[str, float] = field(default_factory=dict)  #: the last one: metrics by name, and `count`
    prefix: str = ""  #: of that evaluation: "test", "validation"

    def advance(self, samples: int) -> None:
        self.step += 1
        self.samples_of_epoch += samples
        self.samples += samples

    def end_epoch(self) -> None:
        self.epoch += 1
        self.samples_of_epoch = 0


class Initial(NamedTuple):
    """How the run began. Rates and the global batch follow from this, also where it goes on with other ranks."""

    ranks: int  #: when it began
    batch_size: int  #: per rank and micro-batch
    accumulate: int  #: micro-batches per step

    @property
    def global_batch(self) -> int:
        """Samples per step, over all ranks and micro-batches."""
        return self.ranks * self.batch_size * self.accumulate


class Metric(NamedTuple):
    """A named figure of an evaluation: which way it is better, and how it is shown."""

    direction: Literal["min", "max"]  #: which way it is better
    percent: bool = False  #: shown in percent; recorded as a share from 0 to 1

    def better(self, value: float, than: float) -> bool:
        """Tell whether `value` is better than `than`; equal is not."""
        return value > than if self.direction == "max" else value < than

    def reached(self, value: float, goal: float) -> bool:
        """Tell whether `value` is as good as `goal`, or better."""
        return value >= goal if self.direction == "max" else value <= goal

    def show(self, value: float) -> str:
        """Return `value` as the screen has it."""
        return f"{value:.2%}" if self.percent else f"{value:.4f}"


def metrics_of(given: dict[str, "Metric | str"]) -> dict[str, Metric]:
    """Return `given` with "min" and "max" as Metrics. Raises UserError for another word, and for a name that is taken."""
    require_free(given)
    found = {name: Metric(value) if isinstance(value, str) else value for name, value in given.items()}  # type: ignore[arg-type]
    require_free(given)
    for name, metric in found.items():
        if metric.direction not in ("min", "max"):
            raise UserError(f'metrics: {name} is {metric.direction!r}: write "min" or "max", whichever is better')
    return found


def require_free(names: Iterable[str]) -> None:
    """Raise UserError where a value that a script records has the name of a field that every record has."""
    if taken := FIXED.intersection(names):
        raise UserError(f"{min(taken)} is a field of every record: give the metric another name")
