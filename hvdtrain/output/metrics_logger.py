"""Records and prints the steps, epochs and evaluations of a run, with the metric names of the script."""

import contextlib
import math
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hvdtrain.engines.accelerators import read_scalars
from hvdtrain.engines.base import Engine
from hvdtrain.engines.errors import UserError
from hvdtrain.output.clock import Clock
from hvdtrain.output.metric_names import Metric
from hvdtrain.output.run_output import RunOutput, parameters_sha256, seconds_since_process_start

if TYPE_CHECKING:
    from hvdtrain.loop.state import TrainState
    from hvdtrain.loop.step import Step


# In the prefixes of evaluations, and in the names of values of which less is better.
VALIDATION = re.compile("(^|[^a-z])(val|valid|validation|dev|eval)([^a-z]|$)")
TEST = re.compile("(^|[^a-z])test([^a-z]|$)")
SMALLER = re.compile("loss|err|mse|mae|rmse|ppl|perplexity|nll|fid|wer|cer|distance|diff")


def require_same_values(everyone: Sequence[Mapping[str, float]]) -> None:
    """Raise UserError if a value that the script has added to an evaluation differs between ranks. everyone: by rank."""
    for rank, theirs in enumerate(everyone):
        for name, value in theirs.items():
            own = everyone[0].get(name, value)
            # The same sum may be rounded differently on another kind of processor.
            if not math.isclose(own, value, rel_tol=1e-6, abs_tol=1e-12) and not math.isnan(own + value):
                message = (
                    f"run.record({name}=...) after run.evaluating(): {own:.6g} on rank 0, {value:.6g} on rank {rank}"
                )
                remedy = "record it in the block, or compute it from the rows of all ranks, as run.gather returns them"
                raise UserError(f"{message}: {remedy}", everywhere=True)


class MetricsLogger:
    """Reduces values over all ranks; rank 0 writes and prints them."""

    def __init__(self, engine: Engine, output: RunOutput, metrics: Mapping[str, Metric], state: "TrainState"):
        self._engine, self._output, self.metrics, self._state = engine, output, metrics, state
        self.dataset: str | None = None  # its name
        self.summary: dict[str, object] = {}  # fields of the script's own
        self.exported: list[Path] = []
        self.epochs: int | None = None  # planned epochs; None: determined by `steps`
        self.steps = 0  # planned steps
        self.only_evaluates = False  # --evaluate: the position is the checkpoint's, at the end of an epoch or within it
        self.unwritten = False  # whether there is an evaluation that is not recorded yet
        self._amended: dict[str, float] = {}  # by the script, to the last evaluation
        self.recorded: set[str] = set()  # names of all evaluations, and of logged steps
        self.evaluated_names: set[str] = set()
        # Of this epoch, the names of values by prefix, in order; None: which one decides has been looked at.
        self._evaluations: dict[str, set[str]] | None = {}

    def start(self, dataset: str, reason: str, config: dict[str, object]) -> None:
        """Print and record data set, configuration and environment at the start of the run. A collective."""
        self._output.start(self._engine, dataset, reason, config, self.metrics)

    def show(self, name: str, value: float) -> str:
        """Return the value of metric `name`, formatted for display."""
        return self.metrics.get(name, Metric("min")).show(value)

    def number(self) -> int:
        """Return the number of the current epoch, from 1."""
        if self.only_evaluates:
            return max(1, self._state.epoch + (self._state.samples_of_epoch > 0))
        return self._state.epoch + 1

    def _epoch(self) -> str:
        return f"epoch {self.number()}" + (f"/{self.epochs}" if self.epochs is not None else "")

    def step(self, step: "Step", clock: Clock) -> None:
        """Record a finished step. A collective."""
        state, extra = self._state, dict[str, object]()
        tallies = list(step.tallies.values())
        names = list(dict.fromkeys(name for tally in tallies for name in tally.sums))
        norm = [] if step.gradient_norm is None else [step.gradient_norm]
        # From an accelerator, with one copy. Of each rank of this process and each name, the sum and the count.
        numbers = read_scalars([*(part.get(name, 0.0) for own in tallies for name in names for part in own), *norm])
        window = clock.measure(self._engine, zlib.crc32(repr(names).encode()))
        rows = torch.tensor(numbers[: len(numbers) - len(norm)], dtype=torch.float64).view(len(tallies), len(names), 2)
        if not window.alike:  # a value may be of some ranks alone, or be recorded after others
            own, everyone = names, self._engine.processes.all_gather_object(names, "train.names")
            names = list(dict.fromkeys(name for theirs in everyone for name in theirs))
            places = torch.tensor([names.index(name) for name in own])
            rows = torch.zeros(len(tallies), len(names), 2, dtype=torch.float64).index_copy_(1, places, rows)
        sums = self._engine.sum_of_ranks(rows, "train").tolist()
        means = {n: value / count if count else float("nan") for n, (value, count) in zip(names, sums, strict=True)}
        trained_on = means.pop("loss")
        # A script may report a different loss than it trains on, such as one without label smoothing.
        reported = "reported_loss" if "reported_loss" in means else "loss"
        state.train = {"loss": means.pop(reported, trained_on), **means}
        self.recorded |= set(means)
        if reported != "loss":
            extra["objective"] = trained_on
        if step.gradient_norm is not None:
            extra["gradient_norm"] = numbers[-1]
        value, count = rows[0][names.index(reported)].tolist()
        self._output.event(
            "train",
            epoch=state.epoch + 1,
            step=state.step,
            samples=state.samples,
            **state.train,
            loss_rank0=value / max(count, 1),
            **({} if math.isnan(rate := step.lr) else {"learning_rate": rate}),
            **extra,
            **window.rates,
        )
        figures = [f"{name} {self.show(name, value)}" for name, value in state.train.items()]
        self._output.progress(self._epoch(), state.step, self.steps, figures, window)

    def ranks(self, clock: Clock) -> None:
        """Record the time that each rank spent in each phase of this epoch."""
        self._output.event("ranks", epoch=self._state.epoch + 1, **clock.per_rank())

    def evaluated(self, means: dict[str, float], prefix: str) -> None:
        """Store an evaluation. `amend` may add values before it is recorded."""
        self._state.evaluation, self._state.prefix = means, prefix
        self.recorded |= set(means)
        self.evaluated_names |= set(means)
        self.unwritten = True
        if self._evaluations is not None:
            self._evaluations.pop(prefix, None)
            self._evaluations[prefix] = set(means)

    def amend(self, values: Mapping[str, float]) -> None:
        """Add values to the last evaluation, which is not recorded yet."""
        self._amended |= values
        self._state.evaluation |= values
        self.recorded |= set(values)
        if self._evaluations:
            self._evaluations[self._state.prefix] |= set(values)

    def evaluation(self) -> None:
        """Record the last evaluation, if it is not recorded yet. A collective. Raises UserError on every rank if ranks have
        added different values."""
        if not self.unwritten:
            return
        self.unwritten = False
        amended, self._amended = self._amended, {}
        everyone = self._engine.processes.all_gather_object(amended, "evaluate.amended")
        require_same_values(everyone)
        state = self._state
        if not any(everyone) and state.evaluation.keys() == {"count"}:
            raise UserError("run.evaluating(): recorded nothing: write run.record(loss=...) in it", everywhere=True)
        fields: dict[str, object] = {**state.evaluation, "count": int(state.evaluation["count"])}
        if state.prefix:
            fields["prefix"] = state.prefix
        self._output.event("evaluate", epoch=self.number(), step=state.step, **fields)

    def epoch(self) -> str:
        """Return the line that is printed after an epoch, with training and evaluation values."""
        state, parts = self._state, [self._epoch()]
        if "loss" in state.train and not self.only_evaluates:
            # Of the last logged step; of what is evaluated, too, only the evaluation.
            names = ["loss", *(name for name in state.train if name != "loss" and name not in state.evaluation)]
            parts.append("train " + ", ".join(f"{name} {self.show(name, state.train[name])}" for name in names))
        prefix = f"{state.prefix} " if state.prefix else ""
        evaluated = {name: value for name, value in state.evaluation.items() if name != "count"}
        parts += [f"{prefix}{name} {self.show(name, value)}" for name, value in evaluated.items()]
        if evaluated:
            parts[-1] += f" of {state.evaluation['count']:,.0f}"
        if self.only_evaluates:
            return "  ".join(parts)
        parts.append(f"{state.samples / max(state.train_seconds, 1e-9):,.0f} samples/s")
        return "  ".join(parts)

    def undecided(self) -> str:
        """Return what to say, once, if the first epoch with evaluations ends, and the last of these does not decide which
        epoch is the best one, or is that of a test set; else an empty text."""
        if not (evaluations := self._evaluations):
            return ""
        self._evaluations, last = None, list(evaluations)[-1]
        others = [prefix for prefix in evaluations if VALIDATION.search(prefix.lower())]
        if TEST.search(last.lower()) and others:
            return f"the last evaluation of an epoch decides which is the best one: end it with {others[-1]}"
        having = [prefix or "the other" for prefix, names in evaluations.items() if names & self.metrics.keys()]
        names = [name for name in self._state.evaluation if name != "count"]
        if evaluations[last] & self.metrics.keys() or not names:
            return ""
        without = f"no {' or '.join(self.metrics)}"
        if having:
            return f"no epoch is the best one, as the last evaluation of it has {without}: end it with {having[-1]}"
        direction = "min" if SMALLER.search(names[0].lower()) else "max"
        named = f'training.start(flags, metrics={{"{names[0]}": "{direction}"}})'
        return f"no epoch is the best one, as its evaluation has {without}: name what decides, such as {named}"

    def omitted(self, metrics: Iterable[str], registered: Mapping[str, object]) -> Iterator[str]:
        """Yield what the script has announced and not done."""
        recorded = {*self._state.evaluation, *self._state.train, *self.recorded}
        for name in metrics:
            if name not in recorded:
                yield f"metrics: {name} was never recorded: write run.record({name}=...) in run.evaluating()"
        for name, what in registered.items():
            if int(getattr(what, "n_averaged", 1)) == 0:
                yield f"{name} has averaged nothing: call {name}.update_parameters(model) after step.update()"

    def end(self, models: Sequence[nn.Module], extra: Mapping[str, Any]) -> None:
        """Write summary.json and the `end` event: position, last evaluation, hash of the models, and the
        fields in `extra`. Print which epoch is the best. A collective."""
        state, engine = self._state, self._engine
        prefix = f"{state.prefix}_" if state.prefix else ""
        fields: dict[str, object] = dict(dataset=self.dataset, engine=engine.name, world_size=engine.size)
        fields |= dict(epochs=state.epoch + (state.samples_of_epoch > 0), steps=state.step, samples=state.samples)
        fields |= {f"{prefix}{name}": value for name, value in state.evaluation.items()}
        if state.evaluation:
            fields[f"{prefix}count"] = int(state.evaluation["count"])
        fields |= dict(train_seconds=state.train_seconds, total_seconds=seconds_since_process_start())
        fields["samples_per_second"] = state.samples / max(state.train_seconds, 1e-9)
        if models:
            fields["parameters_sha256"] = parameters_sha256(*models)
        self._output.end({**fields, **extra, **self.summary})
        told = [f"exported: {path}" for path in self.exported]
        if (best := extra.get("best")) and not self.only_evaluates:
            directory = self._output.output_dir or Path()
            with contextlib.suppress(ValueError, OSError):  # not below the working directory, which may be gone
                directory = directory.relative_to(Path.cwd())
            where = f": {directory}/checkpoints/{best['checkpoint']}" if "checkpoint" in best else ""
            value = self.show(best["metric"], best["value"])
            told = [f"best {best['metric']} {value}, of epoch {best['epoch']}{where}", *told]
        if told:
            self._output.say("; ".join(told))
