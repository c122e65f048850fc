"""The position in training, its initial configuration and its metrics: plain data, the same on all ranks."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple


@dataclass
class TrainState:
    """The position in training. It is the same on all ranks and is saved in every checkpoint."""

    epoch: int = 0  #: current epoch, from 0
    samples_of_epoch: int = 0  #: samples of this epoch processed so far, over all ranks
    samples: int = 0  #: samples since the beginning of training, over all ranks
    step: int = 0  #: steps since the beginning of training
    skipped: int = (
        0  #: consecutive steps before this one whose gradients were not finite; with --sync-every, a rank's own
    )
    train_seconds: float = 0.0  #: time spent in steps, without evaluations and checkpoints
    train: dict[str, float] = field(default_factory=dict)  #: loss and recorded values of the last logged step
    evaluation: dict[str, float] = field(default_factory=dict)  #: metrics and `count` of the last evaluation
    prefix: str = ""  #: prefix of that evaluation, such as "test" or "validation"
    evaluated_epoch: int = -1  #: its epoch, from 0; -1: there was none
    best: dict[str, Any] = field(default_factory=dict)  #: the fields of the best epoch's `Best`

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
