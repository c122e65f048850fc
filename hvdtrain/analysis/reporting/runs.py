"""Reads runs from their output directories: metrics.jsonl, event by event, however the run ended.

If a run was killed and restarted, its record has several attempts, each beginning with a `start` event. Steps of an attempt
after the checkpoint from which the next one resumed are counted as lost. Seconds are those in which an attempt ran, without
the pauses between attempts. They are from the monotonic clock (`elapsed`) if it is recorded, else from the wall clock.
"""

import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from hvdtrain.analysis.reporting.reading import Record, read_events, read_json, read_record
from hvdtrain.engines.errors import UserError
from hvdtrain.training.records.named import UNNAMED, Series, named_values, number, recorded_metrics, series_of
from hvdtrain.training.state import Metric

UNTOLD = {"output_dir", "resume", "no_progress", "verbose"}  # flags that do not affect training
GOES_ON = ("checkpoint", "record")  # kinds of errors that do not end a run: a file could not be written
ENERGY = ("energy_joules", "energy_cpu_joules", "energy_gpu_joules")
PHASES = ("loading", "compute", "communication")


class Result(NamedTuple):
    """A result of a run."""

    label: str
    metric: Metric | None  # None if its direction is not known
    value: float
    samples: float | None  # number of samples evaluated
    best: float | None  # of all evaluations; None if the metric has no direction
    best_epoch: float | None
    training: bool = False  # True if there is no evaluation: the value is from training


@dataclass
class Attempt:
    """One start of the run, until it ended or was killed."""

    began: float  # seconds since the epoch
    ended: float  # of its last event
    before: float  # seconds that earlier attempts ran
    ranks: int
    clock: float | None  # monotonic seconds at its start; None if the record has only wall-clock times
    ran: float = 0.0  # seconds, up to its last event
    step: float = 0.0  # from which it resumed
    samples: float | None = 0.0
    energy: dict[str, float] = field(default_factory=dict)  # joules by ENERGY, up to its last event that has them
    energy_complete: bool = True


@dataclass
class Run:
    """A run, as its output directory records it."""

    directory: Path
    name: str
    start: dict = field(default_factory=dict)  # the newest `start` event
    attempts: list[Attempt] = field(default_factory=list)
    # `train` and `evaluations` have added keys: `seconds`, `step`, `samples` (None if they are not recorded), and `values`,
    # by name in training and by series in evaluations.
    train: list[dict] = field(default_factory=list)
    evaluations: list[dict] = field(default_factory=list)
    checkpoints: list[dict] = field(default_factory=list)
    rank_times: list[dict] = field(default_factory=list)  # `ranks` events: seconds by phase, a list over ranks
    lost: list[dict] = field(default_factory=list)  # train events that a later attempt repeated
    kept: list[str] = field(default_factory=list)  # names in checkpoints/, oldest first
    summary: dict = field(default_factory=dict)
    record: Record | None = None
    notes: list[str] = field(default_factory=list)
    state: str = "not ended"  # ended, stopped, failed
    place: int = 0  # index of its group, which determines its colour

    @property
    def ranks(self) -> int:
        """The number of ranks of the last attempt."""
        return self.attempts[-1].ranks

    @property
    def seconds(self) -> float:
        """The seconds that all attempts ran."""
        return self.attempts[-1].before + self.attempts[-1].ran

    @property
    def energy(self) -> dict[str, float]:
        """Joules of all attempts, including lost steps; {} if none were measured."""
        return {
            key: sum(attempt.energy.get(key, 0.0) for attempt in self.attempts)
            for key in ENERGY
            if any(key in attempt.energy for attempt in self.attempts)
        }

    @property
    def engine(self) -> str:
        """The name of the engine; "?" if it is not recorded."""
        return str(self.start.get("engine", "?"))

    @property
    def counts_samples(self) -> bool:
        """Whether every train event has a number of samples."""
        return all(event["samples"] is not None for event in self.train)

    @property
    def metrics(self) -> dict[str, Metric]:
        """The metrics that the script declared, the most important first."""
        named = recorded_metrics(self.start)
        return UNNAMED if named is None else named

    def metric(self, series: Series) -> Metric | None:
        """Return the metric that the script declared for a value, with its data (validation_loss) or without; or None."""
        metrics = self.metrics
        if metrics is UNNAMED and series.name.startswith("accuracy"):  # accuracy_top5, too
            return UNNAMED["accuracy"]
        return metrics.get(series.whole, metrics.get(series.name))

    @property
    def config(self) -> dict[str, str]:
        """All flags and other facts that distinguish runs, as text."""
        config, versions = self.start.get("config"), self.start.get("versions")
        told = {"ranks": str(self.ranks), "engine": self.engine, "dataset": str(self.start.get("dataset", "?"))}
        if isinstance(config, dict):
            told |= {str(k): shown(v) for k, v in config.items() if k not in UNTOLD | told.keys()}
        told["hosts"] = shown(self.hosts)
        if isinstance(versions, dict):
            told |= {f"{k} version": shown(v) for k, v in versions.items()}
        return told

    @property
    def hosts(self) -> list[str]:
        """The names of the hosts, without duplicates."""
        ranks = self.start.get("ranks")
        named = [str(rank.get("host")) for rank in ranks if isinstance(rank, dict)] if isinstance(ranks, list) else []
        return list(dict.fromkeys(named))


def shown(value: object) -> str:
    """Return a flag's value as text."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list):  # lists in it as JSON: a record may have hundreds of levels
        return ", ".join(json.dumps(one) if isinstance(one, list) else shown(one) for one in value)
    return str(value)


def read_runs(directories: Sequence[Path]) -> list[Run]:
    """Return the runs in the directories, one in each. Raises UserError if a directory has no run."""
    names = [Path(os.path.realpath(path)).name for path in directories]
    return [
        read(path, name if names.count(name) == 1 else str(path)) for path, name in zip(directories, names, strict=True)
    ]


def read(directory: Path, name: str) -> Run:
    """Return the run in `directory`. Raises UserError if it has none."""
    run = Run(directory, name)
    events = read_events(directory, run.notes)
    for event in events:
        take(run, event)
    if not run.attempts:
        how = "name the --output-dir of a run"
        raise UserError(f"{directory}/metrics.jsonl has no run in it (no line with a start event): {how}")
    if run.state == "not ended" and (summary := read_json(directory, "summary.json", run.notes)):
        # A start removes the summary of an earlier run, so this run ended: only the last line of the record is lost.
        run.summary, run.state = summary, "ended"
        run.notes.append("the record stops before the end of the run: the results are from summary.json")
    run.record = read_record(directory, min(event["time"] for event in events), run.notes)
    run.kept = sorted(path.name for path in (directory / "checkpoints").glob("step-*.safetensors"))
    add_rates(run.train)
    if run.state == "not ended":
        run.notes.append("the record has no end: the run was killed, or is still running")
    if not run.train:
        run.notes.append("no step was recorded")
    elif not run.evaluations and run.state != "ended" and any(event["values"] for event in run.train):
        run.notes.append("no evaluation yet: all values were measured in training")
    return run


def take(run: Run, event: dict) -> None:
    """Add one event to the run."""
    name = event["event"]
    if name == "start":
        before = run.seconds if run.attempts else 0.0
        run.attempts.append(
            Attempt(event["time"], event["time"], before, int(event["world_size"]), finite(event.get("elapsed")))
        )
        run.start, run.state, run.summary = event, "not ended", {}
        return
    if not run.attempts:
        return
    attempt = run.attempts[-1]
    attempt.ended = event["time"]
    seconds = since(attempt, event)
    attempt.ran = max(attempt.ran, seconds)
    event["seconds"] = attempt.before + seconds
    if (joules := {key: value for key in ENERGY if (value := finite(event.get(key))) is not None}).get(ENERGY[0]):
        attempt.energy, attempt.energy_complete = joules, event.get("energy_incomplete") is not True
    if name == "resume":
        attempt.step, attempt.samples = event["step"], event.get("samples")
        go_back(run, event["step"])
    elif name == "train":
        go_back(run, event["step"] - 1)  # an attempt without a checkpoint repeats all steps
        run.train.append(event | dict(samples=event.get("samples"), values=named_values(event, run.metrics),
                                      attempt=len(run.attempts)))  # fmt: skip
    elif name == "evaluate":
        last = run.train[-1] if run.train else dict(step=attempt.step, samples=attempt.samples)
        place = {key: last[key] if event.get(key) is None else event[key] for key in ("step", "samples")}
        run.evaluations.append(event | place | dict(values=evaluated(run, event)))
    elif name == "checkpoint":
        run.checkpoints.append(event)
    elif name == "ranks":
        run.rank_times.append(event)
    elif name == "end":
        run.state, run.summary = "ended", event
    elif name == "stop":
        run.state = "stopped"
        run.notes.append(f"stopped on request ({event.get('reason', '?')}); the same command resumes the run")
    elif name == "error":
        run.state = run.state if event.get("kind") in GOES_ON else "failed"
        run.notes.append(f"error: {event.get('message', '?')}")


def finite(value: object) -> float | None:
    """Return `value` as a float; None if it is not a finite number."""
    return known if (known := number(value)) is not None and math.isfinite(known) else None


def since(attempt: Attempt, event: dict) -> float:
    """Return the seconds from an attempt's start to an event, by the monotonic clock if it is recorded."""
    if attempt.clock is None:
        return max(0.0, event["time"] - attempt.began)
    elapsed = finite(event.get("elapsed"))
    return attempt.ran if elapsed is None else max(0.0, elapsed - attempt.clock)


def evaluated(run: Run, event: dict) -> dict[Series, float]:
    """Return an evaluation's values by series. Without a recorded prefix, the data is the test set if the script declared
    no metrics."""
    prefix = event.get("prefix")
    if not isinstance(prefix, str):
        prefix = "test" if recorded_metrics(run.start) is None else ""
    return {series_of(prefix, name): value for name, value in named_values(event, run.metrics).items()}


def go_back(run: Run, step: float) -> None:
    """Move the train events after `step` to `run.lost`, and drop the evaluations after it."""
    while run.train and run.train[-1]["step"] > step:
        run.lost.append(run.train.pop())
    while run.evaluations and run.evaluations[-1]["step"] > step:
        run.evaluations.pop()


def add_rates(train: Sequence[dict]) -> None:
    """Add `steps_per_second`, since the previous event of the same attempt, to train events without it."""
    for before, event in pairwise(train):
        seconds = event["seconds"] - before["seconds"]
        if event["attempt"] == before["attempt"] and seconds > 0 and number(event.get("steps_per_second")) is None:
            event["steps_per_second"] = (event["step"] - before["step"]) / seconds


def results(run: Run) -> list[Result]:
    """Return the results of evaluations, the most important first; for a run without evaluations, those of training."""
    found = []
    names = [Series(prefix, name) for name in run.metrics for prefix in ("test", "validation", "")]
    told = [series_of(*series) for series in names if number(run.summary.get(series.whole)) is not None]
    seen = [series for event in run.evaluations for series in event["values"]]
    for series in in_order(run, dict.fromkeys(told + seen)):
        metric, events = run.metric(series), [event for event in run.evaluations if series in event["values"]]
        value = number(run.summary.get(series.whole))
        value = events[-1]["values"][series] if value is None else value
        count = number(run.summary.get(Series(series.prefix, "count").whole))
        count = number(events[-1].get("count")) if count is None and events else count
        best, best_epoch = None, None
        for event in events:
            there = event["values"][series]
            if metric is not None and not math.isnan(there) and (best is None or metric.better(there, best)):
                best, best_epoch = there, number(event.get("epoch"))
        found.append(Result(series.whole.replace("_", " "), metric, value, count, best, best_epoch))
    if found:
        return found
    last = {name: value for event in run.train for name, value in event["values"].items()}
    everything = in_order(run, [Series("", name) for name in last])
    return [
        Result(f"training {each.name.replace('_', ' ')}", run.metric(each), last[each.name], None, None, None, True)
        for each in everything
    ]


def in_order(run: Run, found: Iterable[Series]) -> list[Series]:
    """Return the values in the order in which the script declared its metrics, then the others."""
    order = list(run.metrics)
    rank = {name: place for place, name in enumerate(order)}
    return sorted(found, key=lambda each: min(rank.get(each.whole, len(order)), rank.get(each.name, len(order))))


def differing(runs: Sequence[Run]) -> list[str]:
    """Return the names of the flags and facts in which the runs differ, ranks and engine first."""
    configs = [run.config for run in runs]
    names = dict.fromkeys(name for config in configs for name in config)
    return [name for name in names if len({config.get(name, "-") for config in configs}) > 1]


def time_shares(run: Run) -> list[tuple[str, dict[str, float]]]:
    """Return each phase's share (0 to 1) of the training time by rank; only of rank 0 if no others are recorded."""
    totals: dict[int, dict[str, float]] = {}
    for event in run.rank_times:
        lists = [event.get(f"{phase}_seconds") for phase in (*PHASES, "elapsed")]
        if not all(isinstance(values, list) and all(number(v) is not None for v in values) for values in lists):
            continue
        for rank, (*seconds, elapsed) in enumerate(zip(*lists, strict=False)):
            total = totals.setdefault(rank, dict.fromkeys((*PHASES, "other"), 0.0))
            for phase, value in zip(PHASES, seconds, strict=True):
                total[phase] += value
            total["other"] += max(0.0, elapsed - sum(seconds))
    if not totals:
        unit = "samples" if run.counts_samples else "step"  # what the recorded seconds are per
        total, before = dict.fromkeys(PHASES, 0.0), 0.0
        for event in run.train:
            for phase in PHASES:
                total[phase] += (number(event.get(f"{phase}_seconds")) or 0.0) * max(event[unit] - before, 0)
            before = event[unit]
        totals[0] = total
    shares = []
    for rank, total in totals.items():
        if (whole := sum(total.values())) > 0 and math.isfinite(whole):
            shares.append((f"rank {rank}", {phase: value / whole for phase, value in total.items()}))
    return shares


def samples_at(run: Run, steps: Sequence[float]) -> list[float]:
    """Return the number of samples used up to each of `steps`, interpolated between recorded steps."""
    import numpy

    known = [event for event in run.train if event["samples"] is not None]
    known_steps = [0.0, *(event["step"] for event in known)]
    known_samples = [0.0, *(event["samples"] for event in known)]
    return numpy.interp(steps, known_steps, known_samples).tolist()
