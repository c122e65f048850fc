"""What a program and the features ask of a run beside its loops: where it is, which rank this is, lines, files, exports."""

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hvdtrain.checkpoint.saving import Checkpoints
from hvdtrain.engines.base import Engine
from hvdtrain.flags import Flags
from hvdtrain.inputs.sources import Data
from hvdtrain.loop.evaluation import Evaluation, Taken
from hvdtrain.loop.feature import Feature, Features
from hvdtrain.loop.prepare import Prepared
from hvdtrain.loop.state import Best, Initial, Length, Stage, TrainState
from hvdtrain.loop.step import Shared
from hvdtrain.loop.stopping import Stopping
from hvdtrain.output.clock import Clock
from hvdtrain.output.metric_names import Metric
from hvdtrain.output.metrics_logger import MetricsLogger
from hvdtrain.output.run_output import RunOutput
from hvdtrain.program.mistakes import LaterParts, refusal, without_effect
from hvdtrain.program.own_counts import rows_by_the_rank
from hvdtrain.program.source import tree_of
from hvdtrain.program.uses import frame_of_program, warn_if


class RankAndSize(NamedTuple):
    """Which rank this is, of how many."""

    rank: int
    size: int


class RunTools:
    """What a run tells, and what it does at any place of the program."""

    def __init__(
        self, engine: Engine, flags: Flags, metrics: Mapping[str, Metric], output: RunOutput, checkpoints: Checkpoints,
        stopping: Stopping, data: Data, state: TrainState, features: Iterable[Feature] = (),
    ):  # fmt: skip
        self.engine, self.flags, self.output, self.checkpoints = engine, flags, output, checkpoints
        self.stopping, self.data, self.features = stopping, data, Features(list(features))
        self.state = state  # the position in training; always the same object
        self.exit_code = 0
        self.stage = Stage.OUTSIDE
        self.clock = Clock(engine.device)
        self.metrics_logger = MetricsLogger(engine, output, metrics, state)
        self.length = Length()
        self._shared: Shared | None = None  # from `prepare` on
        self._evaluation: Evaluation | None = None  # inside `evaluating`
        self._taken: Taken | None = None  # by the last evaluation
        self._in_loop = False  # over `epochs`
        self.later_parts = LaterParts()
        self._modes: list[bool] = []  # of the models, when the steps of the last epoch began

    def __deepcopy__(self, memo: object) -> "RunTools":
        """Return this run: its data sets may be copied."""
        return self

    def __reduce__(self) -> Any:
        """Return what a data set has in a worker of its DataLoader."""
        # A worker is another process: the run's threads, connections and open files do not go there.
        return RankAndSize, (self.rank, self.size)

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

    def say(self, line: str) -> None:
        """Print a line on rank 0, above the progress bar."""
        self.output.say(line)

    def gather(self, rows: Tensor | Sequence[Tensor]) -> Tensor:
        """Return the rows of all ranks' tensors, each [n, ...], in rank order, with their gradient. A collective.

        rows: a tensor, or a list of tensors, which may be empty on a rank that has had no sample. After an evaluation, a row
        for each of its samples: then they have the order of its data set.

        For losses over the samples of all ranks, and queues of them. The rows are of this micro-batch: with --accumulate,
        a loss that compares rows compares fewer. The numbers of rows may differ. Of a rank that has no sample in this
        micro-batch (`step.batch.count` is 0), there is none. This rank's rows begin at `step.batch.first`.
        """
        from hvdtrain.loop.gather import gather_rows

        self._require_running("run.gather()")
        if self._evaluation is not None and self.size > 1:
            remedy = "record values of this rank there, or gather after the block, and record then"
            self.output.say_once(
                f"warning: run.gather() inside of run.evaluating() returns the rows of all ranks: {remedy}"
            )
        step = self._shared.step if self._shared is not None else None
        if step is None:
            return gather_rows(
                self.engine, rows, None, taken=None if self.size == 1 or self._evaluation else self._taken
            )
        gathered = gather_rows(self.engine, rows, step.current, step.gathered)
        if isinstance(rows, Tensor) and len(gathered) != self.size * len(rows):
            warn_if(rows_by_the_rank, tree_of(frame_of_program().f_code.co_filename), say=self.output.say_once)
        return gathered

    def warn_of_modes(self) -> None:
        """Say so if a model that was trained in the epoch before is in evaluation mode now, as after a validation of the
        program's own."""
        before, self._modes = self._modes, [model.training for model in self.prepared().models]
        if any(trained and not now for trained, now in zip(before, self._modes, strict=False)):
            message = "a model that was in training mode in the epoch before is in evaluation mode"
            self.output.say_once(f"warning: {message}: write net.train() at the head of an epoch")
        trained = {parameter for own in self.prepared().trained.values() for parameter in own}
        warn_if(without_effect, self.prepared().models, trained, say=self.output.say_once)

    def raising_together(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Context manager for a block that may fail on some ranks. If one rank raises, every rank raises. A collective."""
        return self.engine.raising_together(name)

    @property
    def output_dir(self) -> Path | None:
        """--output-dir on rank 0, None on other ranks: only rank 0 writes files."""
        return self.output.output_dir

    def event(self, name: str, **fields: object) -> None:
        """Append an event to metrics.jsonl on rank 0."""
        self.output.event(name, **fields)

    def heartbeat(self) -> None:
        """Tell the watchdog that this rank makes progress. Call it during long operations outside of steps."""
        self.stopping.heartbeat()

    def alone(self, seconds: float | None = None) -> contextlib.AbstractContextManager[None]:
        """Context manager for work of one rank while the others wait: a file of your own, pictures, samples.

        seconds: time limit (default: ten minutes, or ten times the limit of a step if that is more). No collectives inside.
        """
        return self.engine.activity.during("work of one rank", seconds)

    def to_device(self, *tensors: Tensor) -> Any:
        """Return the tensors on this rank's device: a single tensor, or a tuple."""
        moved = self.data.to_device(tensors)
        return moved[0] if len(moved) == 1 else moved

    def summary(self, **fields: object) -> None:
        """Add fields to summary.json."""
        self.metrics_logger.summary |= fields

    def export(self, path: str | Path, model: torch.nn.Module | None = None, *example: Tensor) -> None:
        """Write a model for use without hvdtrain, on rank 0. A collective.

        path: the state_dict as weights.safetensors or weights.pt; or the program, as model.pt2 or model.onnx. model: one
        of `prepare`, or of the script, such as averaged weights (default: the first of `prepare`). example: what a call
        of it gets, with at least two samples; only for programs.
        """
        from hvdtrain.models import formats

        prepared = self.prepared("run.export()")

        # The wrappers' state_dict has other names: `module.` or `_orig_mod.` before each.
        own = dict(zip(prepared.replicas, prepared.models, strict=True))
        chosen = prepared.models[0] if model is None else own.get(model, getattr(model, "_orig_mod", model))
        kind = formats.require_kind(path := Path(path))
        if kind in formats.PROGRAMS and not example:
            raise refusal("program without example", NAME=repr(path.name))
        # With --sync-every, ranks have different weights within an epoch.
        # Averaging them is a collective, so all ranks enter.
        with self.raising_together("export"), self.alone(), self.shared_weights():
            if self.rank == 0:
                formats.write_export(kind, chosen, example, path)
        self.metrics_logger.exported.append(path)

    def predict(self, **values: Tensor) -> None:
        """Give what the model says about each sample of this batch, inside `evaluating`: with --predict, it is written.

        values: a tensor for each name, with a row for each sample in the order of the batch. The file has them in the order
        of the data set.
        """
        if self._evaluation is None:
            raise refusal("predicted outside")

    # ---- where it is

    @property
    def initial(self) -> Initial:
        """The configuration with which the run began; unchanged by a resume. Derive learning rates from it."""
        return self.checkpoints.resume.initial

    def total_steps(self, data: Any, epochs: int) -> int:
        """Return the number of steps of `epochs` epochs over all ranks, for a scheduler: OneCycleLR(total_steps=...). A
        collective.

        data: what `run.steps` gets; of several tensors, one.
        """
        self._require_running("run.total_steps()")
        opened = self.data.open((data,))
        if not opened.per_epoch:
            raise refusal("total of a stream", everywhere=True)
        return epochs * opened.plan(self.engine, self.flags, self.initial, self.state, epochs).steps_per_epoch()

    @property
    def in_steps(self) -> bool:
        """Whether the script is in the loop over `run.steps`."""
        return self.stage is Stage.STEPS

    @property
    def _in_epoch(self) -> bool:
        return self.stage in (Stage.HEAD, Stage.STEPS, Stage.TAIL)

    @property
    def evaluation(self) -> dict[str, float]:
        """Metrics of the last evaluation by name, and `count`."""
        return self.state.evaluation

    @property
    def best(self) -> Best | None:
        """The best epoch so far, with the current one once it is evaluated; None before the first evaluation."""
        score = self.checkpoints.score(self.state, self.state.epoch) if self._in_epoch else None
        return self.state.best_with(score, self.metrics_logger.metrics)

    # ---- what is prepared

    def shared(self) -> Shared:
        """Return what all steps share. Features put their own in place of parts of it."""
        assert self._shared is not None
        return self._shared

    def _require_running(self, what: str) -> None:
        """Raise UserError after the end of the block of `training.start`. what: name of the caller."""
        if self.stage is Stage.ENDED:
            raise refusal("ended", WHAT=what)

    def prepared(self, what: str = "training") -> Prepared:
        """Return the prepared models and optimizers. Raises UserError before `prepare`. what: name of the caller."""
        self._require_running(what)
        if self._shared is None:
            raise refusal("not prepared", WHAT=what)
        return self._shared.prepared

    def shared_weights(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager in which the weights are the same on all ranks."""
        weights_of_all = self.prepared().weights_of_all
        return weights_of_all() if weights_of_all is not None and self.in_steps else contextlib.nullcontext()
