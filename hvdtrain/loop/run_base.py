"""What a training is made of, where its script is in its loops, and which calls are right there."""

import contextlib
import enum
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch

from hvdtrain.checkpoint.checkpoints import Checkpoints
from hvdtrain.engines.base import Engine
from hvdtrain.engines.errors import UserError
from hvdtrain.flags import Flags
from hvdtrain.inputs.sources import Data
from hvdtrain.loop.feature import Feature, Features
from hvdtrain.loop.prepared import Prepared
from hvdtrain.loop.state import Initial, TrainState
from hvdtrain.loop.step import Shared
from hvdtrain.loop.stopping import Stopping
from hvdtrain.output.clock import Clock
from hvdtrain.output.metric_names import Metric
from hvdtrain.output.metrics_logger import MetricsLogger
from hvdtrain.output.run_output import RunOutput


class Phase(enum.Enum):
    """Where the script is in its loops."""

    OUTSIDE = enum.auto()  # of the loop over `run.epochs`
    HEAD = enum.auto()  # in an epoch, before its steps
    STEPS = enum.auto()  # in the loop over `run.steps`
    TAIL = enum.auto()  # in an epoch, after its steps
    ENDED = enum.auto()  # the block of `training.start` was left


class Length(NamedTuple):
    """How long to train, and to which values of the evaluation at most."""

    epochs: int | None = None
    steps: int | None = None
    goals: Mapping[str, float] = {}

    def ends(self) -> dict[str, int | None]:
        """Return epochs and steps, for checkpoints."""
        return {"epochs": self.epochs, "steps": self.steps}


class RunBase:
    """The parts of a training, and where its script is.

    `Loop` adds the steps, `Epochs` the epochs, `Evaluating` evaluations, and `Run`, which a script uses, all else.
    """

    def __init__(
        self, engine: Engine, flags: Flags, metrics: Mapping[str, Metric], output: RunOutput,
        checkpoints: Checkpoints, stopping: Stopping, data: Data, state: TrainState, features: Iterable[Feature] = (),
    ):  # fmt: skip
        self.engine, self.flags, self.output, self.checkpoints = engine, flags, output, checkpoints
        self.stopping, self.data, self.features = stopping, data, Features(list(features))
        self.state = state  # the position in training; always the same object
        self.exit_code = 0
        self.phase = Phase.OUTSIDE
        self.clock = Clock(engine.device)
        self.metrics_logger = MetricsLogger(engine, output, metrics, state)
        self.length = Length()
        self._shared: Shared | None = None  # from `prepare` on

    @property
    def rank(self) -> int:
        """The number of this rank, from 0."""
        return self.engine.rank

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.engine.size

    @property
    def device(self) -> torch.device:
        """This rank's device."""
        return self.engine.device

    @property
    def initial(self) -> Initial:
        """The configuration with which the run began; unchanged by a resume. Derive learning rates from it."""
        return self.checkpoints.resume.initial

    @property
    def in_steps(self) -> bool:
        """Whether the script is in the loop over `run.steps`."""
        return self.phase is Phase.STEPS

    @property
    def _in_epoch(self) -> bool:
        return self.phase in (Phase.HEAD, Phase.STEPS, Phase.TAIL)

    def say(self, line: str) -> None:
        """Print a line on rank 0, above the progress bar."""
        self.output.say(line)

    def raising_together(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Context manager for a block that may fail on some ranks. If one rank raises, every rank raises. A collective."""
        return self.engine.raising_together(name)

    # ---- what `prepare` has made

    def shared(self) -> Shared:
        """Return what all steps share. Features put their own in place of parts of it."""
        assert self._shared is not None
        return self._shared

    def _require_running(self, what: str) -> None:
        """Raise UserError after the end of the block of `training.start`. what: name of the caller."""
        if self.phase is Phase.ENDED:
            raise UserError(f"{what} after the end of its training: move it into `with training.start(flags) as run:`")

    def prepared(self, what: str = "training") -> Prepared:
        """Return the prepared models and optimizers. Raises UserError before `prepare`. what: name of the caller."""
        self._require_running(what)
        if self._shared is None:
            raise UserError(
                f"{what} before run.prepare(): write `model, optimizer = run.prepare(model, optimizer)` first"
            )
        return self._shared.prepared
