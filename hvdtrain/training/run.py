"""One training run: everything that is wrong if done differently, driven by `for` and `with`. The script writes the loop.

    with training.start(flags) as run:
        model, optimizer = run.prepare(net, torch.optim.Adam(net.parameters()))
        for epoch in run.epochs(flags.epochs):
            for step in run.steps(x, y):
                for inputs, targets in step.batches():
                    step.backward(F.mse_loss(model(inputs), targets))
                step.update()
            with run.evaluating(len(test_x)) as mine:
                run.record(loss=F.mse_loss(model(test_x[mine]), test_y[mine], reduction="sum"))
    return run.exit_code

What is left out, called twice or called elsewhere is a UserError that says what to write. docs/script.md has whole programs.
"""

import contextlib
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hvdtrain.data.loading import Plan, mixed_seed
from hvdtrain.data.sharding import passes_per_step
from hvdtrain.engines import flags as cli
from hvdtrain.engines.base import Engine, Reduction
from hvdtrain.engines.errors import Failure, UserError
from hvdtrain.engines.start import start as start_engine
from hvdtrain.models.weights import load_weights
from hvdtrain.training.evaluation import Evaluation
from hvdtrain.training.flags import Flags
from hvdtrain.training.inputs import Input, open_input, seed_generators, to_device
from hvdtrain.training.records.clock import Clock
from hvdtrain.training.records.profiling import Profile
from hvdtrain.training.records.telemetry import Telemetry, parameters_sha256, seconds_since_process_start
from hvdtrain.training.resilience.guard import Guard, named_parameters
from hvdtrain.training.resume import Checkpoints
from hvdtrain.training.state import Initial, Metric, TrainState, metrics_of
from hvdtrain.training.step import Step

TARGET_MISSED = 3  # exit code


class Stopped(BaseException):
    """All ranks leave after the same step, because a signal asked one of them to. Not an error: `except Exception` in a script
    must not keep it."""


@contextlib.contextmanager
def start(flags: Flags, *, metrics: Mapping[str, Metric | str] | None = None) -> Iterator["Run"]:
    """Start the engine, find the checkpoint to continue, and watch over the ranks until the block ends.

    flags: what `training.parser(...).parse()` returned. metrics: those that evaluations record, each with the direction in
    which it is better, "min" or "max" (default: loss, min); the first one decides which checkpoint is the best.
    Raises UserError, on every rank alike.
    """
    if not isinstance(flags, Flags):
        raise UserError("training.start() takes what training.parser(...).parse() returned", everywhere=True)
    directions = metrics_of({"loss": "min"} if metrics is None else dict(metrics))
    asked = flags.given()
    tuning, timeline = flags.tuning == "auto", flags.profile is not None
    with start_engine(
        flags.engine, tuning=tuning, device=flags.device, threads=flags.threads, timeline=timeline
    ) as engine:
        cli.require_equal(engine, asked)
        flags.compression = engine.choose_compression(flags.compression)
        flags.amp = engine.choose_amp(flags.amp)
        if flags.gradient_predivide_factor is None:
            flags.gradient_predivide_factor = float(engine.size) if flags.compression == "fp16" else 1.0
        telemetry = Telemetry(engine, flags.output_dir, progress=not flags.no_progress, tensorboard=flags.tensorboard)
        with engine.raising_together("start"):
            checkpoints = Checkpoints(engine, flags, directions, telemetry)
        state = checkpoints.begin()
        with (
            telemetry,
            Guard(engine, flags, telemetry) as guard,
            Profile(engine, flags, telemetry, guard.heartbeat) as profile,
        ):
            run = Run(engine, flags, asked, directions, telemetry, checkpoints, guard, profile, state)
            torch.manual_seed(flags.seed)
            seed_generators(flags.seed)
            try:
                yield run
                run.finish()
            except Stopped:
                run.exit_code = guard.leave(state, checkpoints)


class Run:
    """What `training.start` gives. Attributes that scripts read: engine, rank, size, device, state, initial, evaluation."""

    def __init__(
        self,
        engine: Engine,
        flags: Flags,
        asked: Mapping[str, object],
        metrics: Mapping[str, Metric],
        telemetry: Telemetry,
        checkpoints: Checkpoints,
        guard: Guard,
        profile: Profile,
        state: TrainState,
    ):
        self.engine, self.flags, self.metrics = engine, flags, metrics
        self.rank, self.size, self.device, self.seed = engine.rank, engine.size, engine.device, flags.seed
        self.telemetry, self.checkpoints, self.guard, self.profile = telemetry, checkpoints, guard, profile
        self.state = state  # where training stands; the same object until the end
        self.initial: Initial = checkpoints.initial  # rates follow from this, also where a run goes on with other ranks
        self.exit_code = 0
        self.clock = Clock()
        self.amp = flags.amp != "off"
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=flags.amp == "fp16")
        self.models: list[nn.Module] = []  # as the script made them
        self.replicas: list[nn.Module] = []  # to train with: the same, or wrapped by the engine
        self.optimizers: list[torch.optim.Optimizer] = []
        self._asked = dict(asked)
        self._dataset: str | None = None
        self._registered: dict[str, Any] = {}
        self._summary: dict[str, object] = {}
        self._find_unused = False
        self._missing: list[str] = []  # parameters of this rank that got no gradient in this step
        self._parameters: dict[torch.optim.Optimizer, list[tuple[str, nn.Parameter]]] = {}
        self._input: tuple[tuple[Any, ...], Input, Plan] | None = None  # what `steps` was given, opened
        self._epochs: int | None = None
        self._step_limit: int | None = None
        self._goals: dict[str, float] = {}
        self._epoch_open = self._steps_open = self._steps_done = False
        self._evaluation: Evaluation | None = None  # inside `evaluating`
        self._unrecorded = False  # an evaluation whose event is still to be written

    # ---- before training

    @property
    def output_dir(self) -> Path | None:
        """--output-dir on rank 0, None elsewhere: one rank writes."""
        return self.telemetry.output_dir

    def say(self, line: str) -> None:
        """Print a line on rank 0, above the progress bar."""
        self.telemetry.say(line)

    def event(self, name: str, **fields: object) -> None:
        """Append an event to metrics.jsonl, on rank 0."""
        self.telemetry.event(name, **fields)

    def heartbeat(self) -> None:
        """Tell the watchdog that this rank makes progress, in something long that is no step."""
        self.guard.heartbeat()

    def raising_together(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Run a block that may fail on some ranks only: what one rank raises, every rank raises."""
        return self.engine.raising_together(name)

    def to_device(self, *tensors: Tensor) -> Any:
        """Return the tensors on this rank's device: one, or a tuple of several."""
        moved = tuple(to_device(tensor, self.device) for tensor in tensors)
        return moved[0] if len(moved) == 1 else moved

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """The precision of --amp. `step.batches` and `evaluating` enter it themselves."""
        if not self.amp:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, cli.AMP_DTYPES[self.flags.amp])

    def describe_data(self, name: str, reason: str, **facts: object) -> None:
        """Say which data this is and why, and refuse to go on with a run on other data. A collective; at most once.

        facts: what identifies the data, in numbers and texts: the same on all ranks, and in a run that goes on.
        """
        if self._dataset is not None:
            raise UserError(
                "run.describe_data() was called before (run.prepare calls it, too): once, before run.prepare"
            )
        self._dataset = name
        data = {"dataset": name, **facts}
        self.engine.require_equal("the data", data, remedy="give every host the same data, or name it with --dataset")
        now = self.flags.given()
        config = {flag: now[flag] if value is None else value for flag, value in self._asked.items()}
        with self.raising_together("output"):
            self.checkpoints.require_fit(config, data)
            self.telemetry.open(continued=self.checkpoints.continues)
        self.telemetry.start(self.engine, name, reason, now, self.metrics)
        self.checkpoints.announce(self.state)

    def prepare(self, *parts: Any, find_unused_parameters: bool = False) -> Any:
        """Return models and optimizers to train with, in the order given; on every rank the same, from the checkpoint if one
        is continued. A collective; once, before training.

        find_unused_parameters: in some steps some parameters get no gradient (at the cost of one small message per step).
        """
        if self.models:
            raise UserError("run.prepare() was called twice: give it all models and optimizers at once")
        models = [part for part in parts if isinstance(part, nn.Module)]
        optimizers = [part for part in parts if isinstance(part, torch.optim.Optimizer)]
        if len(models) + len(optimizers) != len(parts) or not models or not optimizers:
            kinds = ", ".join(type(part).__name__ for part in parts) or "nothing"
            raise UserError(f"run.prepare() got {kinds}: give it models and optimizers (run.register takes schedulers)")
        if self._dataset is None:
            name = Path(str(self.flags.program)).stem
            self.describe_data(name, f"{name}'s own")
        for model in models:
            model.to(self.device)
        if self.flags.weights is not None:
            with self.raising_together("weights"):
                if self.rank == 0:
                    load_weights(models[0], self.flags.weights)
        named = named_parameters(models)
        known = {parameter for _, parameter in named}
        for optimizer in optimizers:
            if any(parameter not in known for group in optimizer.param_groups for parameter in group["params"]):
                raise UserError(
                    "run.prepare(): an optimizer has parameters of a model that is not there: give it that, too"
                )
        how = Reduction(
            self.flags.compression,
            self.flags.gradient_predivide_factor,
            self.flags.reduction,
            passes_per_step(self.initial.global_batch, self.size, self.flags.batch_size),
            find_unused_parameters,
        )
        self._find_unused = find_unused_parameters
        self.models = models
        self.replicas = [self.engine.distribute_model(model, how) for model in models]
        self.optimizers = [self.engine.distribute_optimizer(optimizer, named, how) for optimizer in optimizers]
        for optimizer in self.optimizers:
            own = {p for group in optimizer.param_groups for p in group["params"]}
            self._parameters[optimizer] = [(name, p) for name, p in named if p in own and p.requires_grad]
        for model in models:
            self.engine.broadcast_model(model)
        for optimizer in self.optimizers:
            self.engine.broadcast_optimizer_state(optimizer)
        self.checkpoints.restore(self.models, self.optimizers, self.scaler)
        ready = dict(zip(map(id, [*models, *optimizers]), [*self.replicas, *self.optimizers], strict=True))
        prepared = tuple(ready[id(part)] for part in parts)
        return prepared[0] if len(prepared) == 1 else prepared

    def register(self, **objects: Any) -> None:
        """Save these with every checkpoint, and fill them now from the one that is continued. A collective; after `prepare`.

        objects: anything with `state_dict` and `load_state_dict`, such as a scheduler of torch's, or averaged weights.
        """
        self._require_prepared("run.register()")
        for name, what in objects.items():
            if not (hasattr(what, "state_dict") and hasattr(what, "load_state_dict")):
                raise UserError(f"run.register({name}=...) got a {type(what).__name__}: it has no state_dict")
        self._registered |= objects
        self.checkpoints.restore_registered(objects)
        if self.checkpoints.facts is not None:
            # A scheduler of torch's sets the rate when it is made: here what was saved counts.
            for optimizer, held in zip(self.optimizers, self.checkpoints.facts["optimizers"], strict=True):
                for group, saved in zip(optimizer.param_groups, held["groups"], strict=True):
                    group.update(saved)

    def graph(self, model: nn.Module, example: Tensor) -> None:
        """Show TensorBoard the model, by running it once on `example`; nothing without --tensorboard."""
        if self.flags.tensorboard:
            self.telemetry.graph(model, example)

    # ---- the loop

    @property
    def progress(self) -> float:
        """How much of training is done, 0 to 1."""
        if self._step_limit is not None:
            return min(1.0, self.state.step / self._step_limit)
        if self._input is None or self._epochs is None:
            return 0.0
        return self.state.samples / (self._epochs * self._input[2].per_epoch)

    @property
    def epochs_done(self) -> float:
        """Epochs that are done, with the fraction of the one under way."""
        return self.state.samples / self._input[2].per_epoch if self._input is not None else float(self.state.epoch)

    def epochs(
        self, count: int | None = None, *, steps: int | None = None, stop_at: Mapping[str, float | None] | None = None
    ) -> Iterator[int]:
        """Yield the number of each epoch that is left, from 0; after each, a checkpoint is saved.

        count: epochs in all; or steps: steps in all. stop_at: stop after the epoch in which an evaluation reached all of
        these metrics; None is none. Where they are never reached, the exit code is 3.
        """
        self._require_prepared("run.epochs()")
        if (count is None) == (steps is None):
            raise UserError("run.epochs() takes a number of epochs, or steps=NUMBER")
        self._epochs, self._step_limit = count, steps
        self._goals = {name: goal for name, goal in (stop_at or {}).items() if goal is not None}
        for name in self._goals:
            if name not in self.metrics:
                raise UserError(f'stop_at: {name} has no direction: training.start(flags, metrics={{"{name}": "max"}})')
        while self._is_left() and not (self._goals and self._reached()):
            self._epoch_open, self._steps_open, self._steps_done = True, False, False
            self.clock.restart()
            yield self.state.epoch
            self._close_epoch()

    def _is_left(self) -> bool:
        if self._step_limit is not None:
            return self.state.step < self._step_limit
        assert self._epochs is not None
        return self.state.epoch < self._epochs

    def _reached(self) -> bool:
        held = self.state.evaluation
        return all(name in held and self.metrics[name].reached(held[name], goal) for name, goal in self._goals.items())

    def steps(self, *data: Any) -> Iterator[Step]:
        """Yield the steps of this epoch that are left: each sample once over all ranks, from where a checkpoint stood.

        data: tensors of equal length; or a number of samples, for their indices; or a DataLoader; or a source of ours.
        """
        self._require_prepared("run.steps()")
        if not self._epoch_open:
            raise UserError("run.steps() outside of run.epochs(): write `for epoch in run.epochs(N):` around it")
        if self._steps_open or self._steps_done:
            raise UserError("run.steps() was called twice in one epoch: one loop of steps in each")
        self._steps_open = True
        return self._steps(*self._opened(data))

    def _opened(self, data: tuple[Any, ...]) -> tuple[Input, Plan]:
        if self._input is not None and len(data) == len(self._input[0]):
            if all(
                one is other or (one == other and isinstance(one, int))
                for one, other in zip(data, self._input[0], strict=True)
            ):
                return self._input[1:]
        opened = open_input(self.engine, data, self.seed, self.flags.batch_size, self.telemetry)
        count = min(opened.per_epoch or opened.samples, opened.samples)
        if count < self.size:
            said = (
                f"{count} samples but {self.size} ranks: use -np {count} or fewer" if count else "there are no samples"
            )
            raise UserError(said, everywhere=True)
        if self._input is not None and self._input[2].total != opened.samples:
            raise UserError(f"run.steps() got {opened.samples} samples, and {self._input[2].total} in the epoch before")
        epochs = self._epochs
        if epochs is None:
            assert self._step_limit is not None
            epochs = self.state.epoch + 1 + -(-self._step_limit * self.initial.global_batch // count)
        plan = Plan(
            opened.samples, count, self.seed, epochs, self.rank, self.size, self.flags.batch_size,
            self.flags.accumulate, self.initial.global_batch, self.state.epoch, self.state.samples_of_epoch,
            opened.shuffle, self.device,
        )  # fmt: skip
        opened.begin(plan)
        self._input = data, opened, plan
        self.checkpoints.forget()
        return opened, plan

    def _steps(self, opened: Input, plan: Plan) -> Iterator[Step]:
        state = self.state
        for planned in plan.epoch(state.epoch):
            if self._step_limit is not None and state.step >= self._step_limit:
                break
            self.guard.begin_step(state, self.models)
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            number = state.step + 1
            last = state.samples_of_epoch + planned.count == plan.per_epoch or number == self._step_limit
            step = Step(self, planned, opened, logged=last or number == 1 or number % self.flags.log_steps == 0)
            yield step
            self._finish_step(step, opened)
        state.train_seconds += self.clock.lap()
        self.telemetry.event("ranks", epoch=state.epoch + 1, **self.clock.per_rank())
        self._steps_open, self._steps_done = False, True

    def _finish_step(self, step: Step, opened: Input) -> None:
        state, clock = self.state, self.clock
        step.require_complete()
        self.scaler.update()
        clock.mark("compute")
        self._record_evaluation()
        state.skipped = state.skipped + 1 if step.left_out else 0
        state.advance(step.count)
        clock.count(step.count, step.local_count)
        if step.logged:
            self._log(step, opened)
            clock.mark("reporting")
        self.profile.step(state.step, clock)
        stops = self.guard.should_stop(state)
        every = self.flags.checkpoint_steps
        if stops or (every is not None and state.step % every == 0):
            state.train_seconds += clock.lap()
            self._save()
            clock.mark("saving")
        if stops:
            raise Stopped

    def _log(self, step: Step, opened: Input) -> None:
        """Put a step's figures together, record and show them. A collective."""
        extra = opened.settle()
        names = list(step.sums.values)
        mine = [[float(step.sums.values[name]), float(step.sums.counts[name])] for name in names]
        total = self.engine.sum(torch.tensor(mine, dtype=torch.float64), "train").tolist()
        means = {
            name: value / count if count else float("nan") for name, (value, count) in zip(names, total, strict=True)
        }
        window = self.clock.measure(self.engine)
        objective = means.pop("loss")
        loss = means.pop("reported_loss", objective)
        shown = "reported_loss" if "reported_loss" in names else "loss"
        value, count = mine[names.index(shown)]
        self.state.train = {"loss": loss, **means}
        if shown != "loss":
            extra["objective"] = objective
        if step.gradient_norm is not None:
            extra["gradient_norm"] = float(step.gradient_norm)
        self.telemetry.event(
            "train",
            epoch=self.state.epoch + 1,
            step=self.state.step,
            samples=self.state.samples,
            loss=loss,
            **means,
            loss_rank0=value / max(count, 1),
            learning_rate=step.lr,
            **extra,
            **window.rates,
        )
        if self._epochs is not None:
            assert self._input is not None
            steps = self._epochs * -(-self._input[2].per_epoch // self.initial.global_batch)
        else:
            steps = self._step_limit or 0
        figures = [f"{name} {self._show(name, value)}" for name, value in self.state.train.items()]
        self.telemetry.progress(self._epoch_name(), self.state.step, steps, figures, window)

    def _epoch_name(self) -> str:
        return f"epoch {self.state.epoch + 1}" + (f"/{self._epochs}" if self._epochs is not None else "")

    def _show(self, name: str, value: float) -> str:
        return self.metrics.get(name, Metric("min")).show(value)

    def _save(self) -> None:
        self.guard.compare_replicas(self.state, self.models)  # no checkpoint of weights that one rank has alone
        self.checkpoints.save(self.state, self.models, self.optimizers, self.scaler, self._registered)

    def _close_epoch(self) -> None:
        if self._steps_open:
            taken, count = self.state.samples_of_epoch, self._input[2].per_epoch if self._input else 0
            raise UserError(
                f"epoch {self.state.epoch + 1} was left after {taken} of {count} samples: let `for step in run.steps(...)` "
                "run to its end (run.epochs(steps=N) ends after N steps)"
            )
        if not self._steps_done:
            raise UserError(f"epoch {self.state.epoch + 1} had no steps: write `for step in run.steps(...):` in it")
        self._epoch_open = False
        self._record_evaluation()
        name, state = self._epoch_name(), self.state
        state.end_epoch()
        self._save()
        parts = [name]
        if "loss" in state.train:
            parts.append(f"train loss {state.train['loss']:.4f}")
        prefix = f"{state.prefix} " if state.prefix else ""
        evaluated = {key: value for key, value in state.evaluation.items() if key != "count"}
        parts += [f"{prefix}{key} {self._show(key, value)}" for key, value in evaluated.items()]
        if evaluated:
            parts[-1] += f" of {state.evaluation['count']:,.0f}"
        parts.append(f"{state.samples / max(state.train_seconds, 1e-9):,.0f} samples/s")
        self.say("  ".join(parts))

    # ---- evaluation

    @contextlib.contextmanager
    def evaluating(self, data: Any, *, prefix: str = "") -> Iterator[Any]:
        """Give this rank's part of a test set: each sample once over all ranks. Models are in evaluation mode, with batch
        norm's running statistics averaged over ranks, and without gradients. A collective.

        data: a number of samples, for a slice of them; or a DataLoader, or a source of ours, for an iterator over batches.
        prefix: of the names in summary.json and on the screen, such as "test".
        """
        self._require_prepared("run.evaluating()")
        if self._evaluation is not None:
            raise UserError("run.evaluating() inside of run.evaluating(): end the first block before the next")
        self._record_evaluation()
        began = time.perf_counter()
        for model in self.models:
            self.engine.average_buffers(model)
        self._evaluation = evaluation = Evaluation(self.engine, data, self.seed, self.guard.heartbeat)
        modes = [(module, module.training) for model in self.replicas for module in model.modules()]
        for model in self.replicas:
            model.eval()
        seed_generators(mixed_seed(self.seed, "evaluate", self.state.step, self.rank), self.device)
        try:
            with torch.inference_mode(), self.autocast():
                yield evaluation.mine()
        finally:
            self._evaluation = None
            for module, training in modes:
                module.training = training
        self.state.evaluation = evaluation.means()
        self.state.prefix = prefix
        self._unrecorded = True
        self.clock.leave_out(time.perf_counter() - began)

    @property
    def evaluation(self) -> dict[str, float]:
        """The last evaluation: its metrics by name, and `count`."""
        return self.state.evaluation

    def record(self, *, count: Tensor | float | None = None, **values: Tensor | float) -> None:
        """Inside `evaluating`: add sums over samples of this rank (or a value for each). They are summed over ranks and divided
        by the number of samples; count: by the sum of these instead, as for tokens.

        After it: add values to that evaluation as they are, which are the same on all ranks.
        """
        if not values:
            raise UserError("run.record() got nothing: write run.record(loss=...)")
        if self._evaluation is not None:
            self._evaluation.add(values, count)
        elif self._unrecorded:
            self.state.evaluation |= {name: float(value) for name, value in values.items()}
        else:
            raise UserError(
                "run.record() outside of run.evaluating(): write `with run.evaluating(...):` around it (step.record() is for "
                "training metrics)"
            )

    def _record_evaluation(self) -> None:
        if not self._unrecorded:
            return
        self._unrecorded = False
        fields: dict[str, object] = dict(self.state.evaluation)
        fields["count"] = int(self.state.evaluation["count"])
        if self.state.prefix:
            fields["prefix"] = self.state.prefix
        if self._input is not None:
            fields |= self._input[1].settle()
        self.telemetry.event("evaluate", epoch=self.state.epoch + 1, step=self.state.step, **fields)

    # ---- the end

    def summary(self, **fields: object) -> None:
        """Add fields to summary.json."""
        self._summary |= fields

    def finish(self) -> None:
        """Wait for the last checkpoint, write the summary. Called at the end of `training.start`."""
        if self._epoch_open:  # the script has left `run.epochs` early
            self._close_epoch()
        self._record_evaluation()
        unsaved = self.checkpoints.close(self.guard.heartbeat)
        state = self.state
        prefix = f"{state.prefix}_" if state.prefix else ""
        evaluated: dict[str, object] = {f"{prefix}{name}": value for name, value in state.evaluation.items()}
        if state.evaluation:
            evaluated[f"{prefix}count"] = int(state.evaluation["count"])
        extra = self._input[1].summary() if self._input is not None else {}
        self.telemetry.end(
            dict(
                dataset=self._dataset,
                engine=self.engine.name,
                world_size=self.size,
                epochs=state.epoch,
                steps=state.step,
                samples=state.samples,
                **evaluated,
                **extra,
                train_seconds=state.train_seconds,
                total_seconds=seconds_since_process_start(),
                samples_per_second=state.samples / max(state.train_seconds, 1e-9),
                **({"parameters_sha256": parameters_sha256(*self.models)} if self.models else {}),
                **self._summary,
            )
        )
        if unsaved:
            raise Failure(unsaved)
        if self._goals and not self._reached():
            goals = " and ".join(f"{name} {self._show(name, goal)}" for name, goal in self._goals.items())
            self.say(f"target {goals} not reached")
            self.exit_code = TARGET_MISSED

    # ---- for Step

    def _require_prepared(self, what: str) -> None:
        if not self.models:
            raise UserError(
                f"{what} before run.prepare(): write `model, optimizer = run.prepare(model, optimizer)` first"
            )

    def require_own(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Return `optimizer` where it is one that `prepare` returned. Raises UserError."""
        if optimizer not in self._parameters:
            raise UserError("this optimizer did not come from run.prepare(): use the one that it returned")
        return optimizer

    def parameters_of(self, optimizers: list[torch.optim.Optimizer]) -> list[nn.Parameter]:
        return [parameter for optimizer in optimizers for _, parameter in self._parameters[optimizer]]

    def named_parameters_of(self, optimizers: list[torch.optim.Optimizer]) -> list[tuple[str, nn.Parameter]]:
        return [named for optimizer in optimizers for named in self._parameters[optimizer]]

    def note_missing_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Remember which parameters got none. Raises UserError where other ranks cannot learn of it through the gradients."""
        self._missing = [name for name, parameter in self._parameters[optimizer] if parameter.grad is None]
        if self._missing and not self._find_unused and not (self.engine.tells_missing_gradients and self.size > 1):
            raise UserError(self._about_missing(self._missing))

    @staticmethod
    def _about_missing(names: list[str]) -> str:
        return (
            f"{names[0]} got no gradient in this step: freeze it (requires_grad_(False)), or where that is meant, "
            "run.prepare(..., find_unused_parameters=True)"
        )

    def raise_where_gradients_are_missing(self) -> None:
        """Raise UserError on every rank where one of them has parameters without a gradient. A collective."""
        if self._find_unused:
            return
        everyone = self.engine.all_gather_object(self._missing, "missing_gradients")
        for rank, names in enumerate(everyone):
            if names:
                raise UserError(f"rank {rank}: {self._about_missing(names)}", everywhere=True)
