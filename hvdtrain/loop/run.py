"""`Run`, the object that a training script uses. The script writes the loop; `Run` handles distribution and restarts.

A call that is missing, repeated or in the wrong place raises a UserError with the correct call. docs/training.md shows
programs.
"""

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hvdtrain.checkpoint.checkpoint import name_of
from hvdtrain.checkpoint.checksums import require_same_on_all
from hvdtrain.checkpoint.randomness import is_generator
from hvdtrain.engines import portable
from hvdtrain.engines.errors import Failure, UserError
from hvdtrain.engines.modules import own_name
from hvdtrain.inputs.sharding import passes_per_step
from hvdtrain.inputs.sources import require_default_device
from hvdtrain.launching.exit_codes import TARGET_MISSED
from hvdtrain.loop.evaluation import Evaluating
from hvdtrain.loop.preparing import prepare, refuse_replicas
from hvdtrain.loop.step import Shared, keep_in_order


class Run(Evaluating):
    """One training run, created by `training.start`. Attributes: engine, rank, size, device, state, initial, evaluation."""

    # ---- before training

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

    def describe_data(self, name: str, reason: str, **facts: object) -> None:
        """Print and record which data is used. Raises UserError if the run to resume used other data.

        A collective; call it at most once. reason: which data this is and why it was chosen, in one line. facts: numbers and
        strings that identify the data; they must be the same on all ranks, and when the run is resumed.
        """
        self._require_running("run.describe_data()")
        require_default_device()
        if self.metrics_logger.dataset is not None:
            raise UserError(
                "run.describe_data() was already called (run.prepare calls it, too): call it once, before run.prepare"
            )
        data = described(name, reason, facts)
        self.metrics_logger.dataset = name
        self.engine.require_equal("the data", data, remedy="give every host the same data, or name it with --dataset")
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
            remedy = "give it all models and optimizers at once; another training, such as the next fold, is another"
            raise UserError(f"run.prepare() was called twice: {remedy} training.start()")
        if self.metrics_logger.dataset is None:
            name = Path(self.flags.program).stem
            self.describe_data(name, f"{name}'s own")
        micro_batches = passes_per_step(self.initial.global_batch, self.size, self.flags.batch_size)
        names = [""] * len(parts) + list(named)
        parts = (*parts, *named.values())
        averaging = self.features.averaging or self.engine
        prepared = prepare(self.engine, averaging, self.flags, parts, names, micro_batches, find_unused_parameters)
        self.checkpoints.restore(prepared)
        for optimizer in prepared.optimizers:
            keep_in_order(prepared, optimizer)
        self._shared = Shared(
            self.engine, prepared, self.clock, self.state, self.flags.seed, self.autocast, self.features
        )
        self.evaluations = self.make_evaluations()
        for feature in self.features.all:
            feature.prepare(self)
            for part in feature.parts():
                self.checkpoints.add(part)
        self.checkpoints.objects.take_settings()
        return prepared.in_order_of(parts)

    def register(self, **objects: Any) -> None:
        """Save objects in every checkpoint, and restore them now if the run is resumed. A collective; after
        `prepare`, before the first step.

        objects: with `state_dict` and `load_state_dict`, such as a torch scheduler or averaged weights. Or generators of
        random numbers of torch, Python or numpy, of which each rank has its own: they go on with the epoch and the step.
        """
        self.prepared("run.register()")
        if self.data.input is not None:
            remedy = "call it before the loop over run.epochs"
            raise UserError(
                f"run.register() once training has begun, where a resumed run could not restore it: {remedy}"
            )
        generators = {name: what for name, what in objects.items() if is_generator(what)}
        objects = {name: what for name, what in objects.items() if name not in generators}
        for name, what in objects.items():
            if not (hasattr(what, "state_dict") and hasattr(what, "load_state_dict")):
                raise UserError(f"run.register({name}=...) got a {type(what).__name__}: it has no state_dict")
            if isinstance(what, torch.nn.Module):
                refuse_replicas(name, what)
        self.checkpoints.register(objects, generators)
        require_same_on_all(self.engine, objects)
        self.checkpoints.restore_statistics(objects)
        for feature in self.features.all:
            feature.registered(objects)

    # ---- the loop

    def total_steps(self, data: Any, epochs: int) -> int:
        """Return the number of steps of `epochs` epochs over all ranks, for a scheduler: OneCycleLR(total_steps=...). A
        collective.

        data: what `run.steps` gets; of several tensors, one.
        """
        self._require_running("run.total_steps()")
        opened = self.data.open((data,))
        if not opened.per_epoch:
            remedy = "write run.epochs(steps=NUMBER), and give the scheduler this number"
            raise UserError(f"run.total_steps(): the length of a stream is not known: {remedy}", everywhere=True)
        return epochs * opened.plan(self.engine, self.flags, self.initial, self.state, epochs).steps_per_epoch()

    def gather(self, rows: Tensor) -> Tensor:
        """Return the rows of all ranks' tensors, each [n, ...], in rank order, with their gradient. A collective.

        For losses over the samples of all ranks, and queues of them. The rows are of this micro-batch: with --accumulate,
        a loss that compares rows compares fewer. The numbers of rows may differ. Of a rank that has no sample in this
        micro-batch (`step.batch.count` is 0), there is none. This rank's rows begin at `step.batch.first`.
        """
        from hvdtrain.loop.gather import gather

        self._require_running("run.gather()")
        if not isinstance(rows, Tensor) or not rows.ndim:
            what = "a scalar" if isinstance(rows, Tensor) else f"a {type(rows).__name__}"
            raise UserError(f"run.gather() got {what}: give it a tensor with a row for each sample")
        step = self._shared.step if self._shared is not None else None
        batch = step.current if step is not None else None
        if batch is not None and not batch.count:
            rows = rows[:0]
        return gather(self.engine, rows)

    # ---- the end

    def export(self, path: str | Path, model: torch.nn.Module | None = None, *example: Tensor) -> None:
        """Write a model for use without hvdtrain, on rank 0. A collective.

        path: the state_dict as weights.safetensors or weights.pt; or the program, as model.pt2 or model.onnx. model: one
        of `prepare`, or of the script, such as averaged weights (default: the first of `prepare`). example: what a call
        of it gets, with at least two samples; only for programs.
        """
        from hvdtrain.models import exporting

        path, prepared = Path(path), self.prepared("run.export()")
        # Of nn.DataParallel and of a compiled model: the one inside.
        own = dict(zip(prepared.replicas, prepared.models, strict=True))
        chosen = prepared.models[0] if model is None else own.get(model, getattr(model, "_orig_mod", model))
        kind = exporting.require_kind(path)
        if kind in exporting.PROGRAMS and not example:
            raise UserError(f"run.export({path.name!r}): a program needs an example: run.export(FILE, model, example)")
        with self.raising_together("export"), self.alone(), self.shared_weights():
            if self.rank == 0 and kind in exporting.WEIGHTS:
                exporting.write_weights({own_name(name): t for name, t in chosen.state_dict().items()}, path)
            elif self.rank == 0:
                exporting.write_program(chosen, example, path)

    def summary(self, **fields: object) -> None:
        """Add fields to summary.json."""
        self.metrics_logger.summary |= fields

    def finish(self, warn_of: Iterable[str] = ()) -> None:
        """Wait for the last checkpoint and write the summary. Called at the end of `training.start`.

        warn_of: metrics that the script has named, and should have recorded.
        """
        self.leave_loop()
        with self.engine.activity.during("checkpoint", 0.0):
            unsaved = self.checkpoints.close(self.stopping.heartbeat)
        extra: dict[str, object] = {}
        if self.data.input is not None:
            extra = self.data.input.summary()
            self.data.input.close()
        if best := self.best:
            file = {"checkpoint": name_of(best.step)} if self.checkpoints.writes else {}
            extra["best"] = dict(metric=best.metric, value=best.value, epoch=best.epoch + 1, step=best.step) | file
        self.metrics_logger.end(self._shared.prepared.models if self._shared is not None else [], extra)
        if unsaved:
            raise Failure(unsaved)
        for line in self._omitted(warn_of) if self.state.step else ():
            self.say(f"warning: {line}")
        if self.length.goals and not self._reached():
            show = self.metrics_logger.show
            goals = " and ".join(f"{name} {show(name, goal)}" for name, goal in self.length.goals.items())
            self.say(f"target {goals} not reached")
            self.exit_code = TARGET_MISSED

    def _omitted(self, metrics: Iterable[str]) -> Iterator[str]:
        """Yield what the script has announced and not done."""
        recorded = {*self.state.evaluation, *self.state.train, *self.metrics_logger.recorded}
        for name in metrics:
            if name not in recorded:
                yield f"metrics: {name} was never recorded: write run.record({name}=...) in run.evaluating()"
        for name, what in self.checkpoints.registered.items():
            if int(getattr(what, "n_averaged", 1)) == 0:
                yield f"{name} has averaged nothing: call {name}.update_parameters(model) after step.update()"


MOST_FACTS = 2**16  # characters of JSON


def described(name: str, reason: str, facts: Mapping[str, object]) -> dict[str, Any]:
    """Return what is recorded and compared of the data that a program describes. Raises UserError."""
    for what, text in (("name", name), ("reason", reason)):
        if not isinstance(text, str) or len(text.splitlines()) != 1:
            raise UserError(
                f"run.describe_data() got {text!r} as the {what}: give it one line of text", everywhere=True
            )
    data: dict[str, Any] = {"dataset": name}
    for key, value in facts.items():
        try:
            data[key] = portable.plain(value)
        except ValueError as error:
            remedy = "give it numbers, text, or lists and dictionaries of these"
            raise UserError(f"run.describe_data({key}=...) got {error}: {remedy}", everywhere=True) from error
        if len(json.dumps(data[key])) > MOST_FACTS:
            remedy = "give it a checksum, as hashlib.sha256(...).hexdigest()"
            raise UserError(
                f"run.describe_data({key}=...) is longer than {MOST_FACTS:,} characters: {remedy}", everywhere=True
            )
        if key == "dataset" and value != name:
            raise UserError(
                "run.describe_data(dataset=...): the name of the data is its first argument", everywhere=True
            )
    return data
