"""Reads runs from their output directories: metrics.jsonl, event by event, however the run ended.

A run that was killed and restarted has several attempts in its record, each beginning with a `start` event. Steps of an
attempt after the checkpoint from which the next one resumed are left out. Seconds are those in which an attempt ran,
without the pauses between attempts.
"""

import json
import math
import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from hvdtrain.engines import files
from hvdtrain.engines.errors import UserError
from hvdtrain.output import records
from hvdtrain.output.clock import PHASES
from hvdtrain.output.metric_names import Metric, Series, named_values, number, recorded_metrics, series_of

Event = dict[str, Any]

NOT_COMPARED = {"output_dir", "resume", "no_progress", "verbose"}  # flags that do not affect training
HARMLESS = ("checkpoint", "record")  # kinds of errors that do not end a run: a file could not be written
LARGEST = 2**53  # floats represent every integer below this


class Result(NamedTuple):
    """A result of a run: its last evaluation, or its training if there is no evaluation."""

    label: str
    metric: Metric | None  # None if its direction is not known
    value: float
    samples: float | None = None  # number of samples evaluated
    best: float | None = None  # of all evaluations; None if the metric has no direction
    best_epoch: float | None = None


@dataclass
class Attempt:
    """One start of the run, until it ended or was killed."""

    began: float  # `elapsed` of its first event: seconds on a monotonic clock
    before: float  # seconds that earlier attempts ran
    ran: float = 0.0  # seconds, up to its last event
    step: float = 0.0  # from which it resumed
    samples: float | None = 0.0


@dataclass
class RecordedRun:
    """A run, as its output directory records it."""

    name: str
    start: Event = field(default_factory=dict)  # the newest `start` event
    attempts: list[Attempt] = field(default_factory=list)
    # `train` and `evaluations` have added keys: `seconds`, `step`, `samples` (None if they are not recorded), and `values`,
    # by name in training and by series in evaluations.
    train: list[Event] = field(default_factory=list)
    evaluations: list[Event] = field(default_factory=list)
    rank_times: list[Event] = field(default_factory=list)  # `ranks` events: seconds by phase, a list over ranks
    summary: Event = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    state: str = "not ended"  # ended, stopped, failed

    @property
    def ranks(self) -> int:
        """The number of ranks of the last attempt."""
        return int(self.start["world_size"])

    @property
    def seconds(self) -> float:
        """The seconds that all attempts ran."""
        return self.attempts[-1].before + self.attempts[-1].ran if self.attempts else 0.0

    @property
    def counts_samples(self) -> bool:
        """Whether every train event has a number of samples."""
        return all(event["samples"] is not None for event in self.train)

    @property
    def metrics(self) -> dict[str, Metric]:
        """The metrics that the script declared, the most important first."""
        return recorded_metrics(self.start)

    @property
    def config(self) -> dict[str, str]:
        """All flags and other facts that distinguish runs, as text."""
        told = {"ranks": str(self.ranks)} | {name: str(self.start.get(name, "?")) for name in ("engine", "dataset")}
        flags = mapping(self.start.get("config"))
        told |= {name: shown(value) for name, value in flags.items() if name not in NOT_COMPARED | told.keys()}
        ranks = self.start.get("ranks")
        hosts = [shown(mapping(rank).get("host")) for rank in ranks] if isinstance(ranks, list) else []
        told["hosts"] = ", ".join(dict.fromkeys(hosts))
        return told | {f"{name} version": shown(v) for name, v in mapping(self.start.get("versions")).items()}

    def metric(self, series: Series) -> Metric | None:
        """Return the metric that the script declared for a value, with its data (validation_loss) or without; or None."""
        return self.metrics.get(series.whole, self.metrics.get(series.name))


def mapping(value: object) -> Event:
    """Return `value` if it is a JSON object, else {}."""
    return value if isinstance(value, dict) else {}


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


# ---- reading


def read_runs(directories: Sequence[Path]) -> list[RecordedRun]:
    """Return the runs in the directories, one in each. Raises UserError if a directory has no run."""
    names = [Path(os.path.realpath(path)).name for path in directories]
    return [
        read(path, name if names.count(name) == 1 else str(path)) for path, name in zip(directories, names, strict=True)
    ]


def read(directory: Path, name: str) -> RecordedRun:
    """Return the run in `directory`. Raises UserError if it has none."""
    run = RecordedRun(name)
    for event in read_events(directory, run.notes):
        take(run, event)
    if not run.attempts:
        how = "name the --output-dir of a run"
        raise UserError(f"{directory}/metrics.jsonl has no run in it (no line with a start event): {how}")
    if run.state == "not ended" and (summary := read_summary(directory, run.notes)):
        # A start removes the summary of an earlier run, so this run ended: only the last line of the record is lost.
        run.summary, run.state = summary, "ended"
        run.notes.append("the record stops before the end of the run: the results are from summary.json")
    if run.state == "not ended":
        run.notes.append("the record has no end: the run was killed, or is still running")
    if not run.train:
        run.notes.append("no step was recorded")
    elif not run.evaluations and run.state != "ended" and any(event["values"] for event in run.train):
        run.notes.append("no evaluation yet: all values were measured in training")
    return run


def read_events(directory: Path, notes: list[str]) -> list[Event]:
    """Return the usable lines of metrics.jsonl, and note the others. Raises UserError if there is no readable file."""
    try:
        if not directory.is_dir():
            raise UserError(f"{directory} is not a directory: name the --output-dir of a run")
        lines = files.read_text(directory / "metrics.jsonl").split("\n")
    except FileNotFoundError:
        raise UserError(f"{directory} has no metrics.jsonl: name the --output-dir of a run") from None
    except OSError as error:
        raise UserError(f"{directory}/metrics.jsonl cannot be read ({error.strerror}): make it readable") from None
    events: list[Event] = []
    damaged: list[int] = []
    for place, line in enumerate(lines, 1):
        event = records.parsed(line)
        if event is not None and usable(event):
            events.append(event)
        elif line.strip() and place < len(lines):  # without a line end: a line that is just being written
            damaged.append(place)
    if damaged:
        which = ", ".join(map(str, damaged[:5])) + ", ..." * (len(damaged) > 5)
        notes.append(f"metrics.jsonl: left out unreadable lines (line {which})")
    return events


def usable(event: Event) -> bool:
    """Return whether an event has a valid time and position in the run. Unknown kinds of events are valid."""
    name = event.get("event")
    times = [number(event.get(clock)) for clock in ("time", "elapsed")]
    if not isinstance(name, str) or not all(at is not None and abs(at) < LARGEST for at in times):
        return False
    if name == "start":
        return 1 <= (number(event.get("world_size")) or 0) < LARGEST
    if name in ("train", "resume") and event.get("step") is None:
        return False
    # A loss may be nan or inf, but not a step or a number of samples.
    places = [event[key] for key in ("step", "samples") if event.get(key) is not None]
    valid = all((value := number(place)) is not None and 0 <= value < LARGEST for place in places)
    loss = event.get("loss") if name == "train" else None
    return valid and (loss is None or number(loss) is not None)


def read_summary(directory: Path, notes: list[str]) -> Event:
    """Return summary.json; {} if there is none, with a note if it is damaged."""
    try:
        summary = records.parsed(files.read_text(directory / "summary.json"))
    except FileNotFoundError:
        return {}
    except OSError:
        summary = None
    if summary is None:
        notes.append("summary.json is damaged: left out")
    return summary or {}


def take(run: RecordedRun, event: Event) -> None:
    """Add one event to the run."""
    name = event["event"]
    if name == "start":
        run.attempts.append(Attempt(event["elapsed"], run.seconds))
        run.start, run.state, run.summary = event, "not ended", {}
        return
    if not run.attempts:
        return
    attempt = run.attempts[-1]
    attempt.ran = max(attempt.ran, event["elapsed"] - attempt.began)
    event["seconds"] = run.seconds
    if name == "resume":
        attempt.step, attempt.samples = event["step"], event.get("samples")
        go_back(run, event["step"])
    elif name == "train":
        go_back(run, event["step"] - 1)  # an attempt without a checkpoint repeats all steps
        run.train.append(event | dict(samples=event.get("samples"), values=named_values(event, run.metrics)))
    elif name == "evaluate":
        last = run.train[-1] if run.train else dict(step=attempt.step, samples=attempt.samples)
        place = {key: last[key] if event.get(key) is None else event[key] for key in ("step", "samples")}
        prefix = event["prefix"] if isinstance(event.get("prefix"), str) else ""
        found = {series_of(prefix, key): value for key, value in named_values(event, run.metrics).items()}
        run.evaluations.append(event | place | dict(values=found))
    elif name == "ranks":
        run.rank_times.append(event)
    elif name == "end":
        run.state, run.summary = "ended", event
    elif name == "stop":
        run.state = "stopped"
        run.notes.append(f"stopped on request ({event.get('reason', '?')}); the same command resumes the run")
    elif name == "error":
        run.state = run.state if event.get("kind") in HARMLESS else "failed"
        run.notes.append(f"error: {event.get('message', '?')}")


def go_back(run: RecordedRun, step: float) -> None:
    """Drop the train events and the evaluations after `step`."""
    while run.train and run.train[-1]["step"] > step:
        run.train.pop()
    while run.evaluations and run.evaluations[-1]["step"] > step:
        run.evaluations.pop()


# ---- what a run tells


def results(run: RecordedRun) -> list[Result]:
    """Return the results of evaluations, the most important first; for a run without evaluations, those of training."""
    declared = [Series(prefix, name) for name in run.metrics for prefix in ("test", "validation", "")]
    told = [series_of(*series) for series in declared if number(run.summary.get(series.whole)) is not None]
    seen = [series for event in run.evaluations for series in event["values"]]
    found = [result_of(run, series) for series in in_order(run, dict.fromkeys(told + seen))]
    if found:
        return found
    last = {Series("", name): value for event in run.train for name, value in event["values"].items()}
    return [
        Result(f"training {each.name.replace('_', ' ')}", run.metric(each), last[each]) for each in in_order(run, last)
    ]


def result_of(run: RecordedRun, series: Series) -> Result:
    """Return the last evaluation of a value, and its best one."""
    events = [event for event in run.evaluations if series in event["values"]]
    last = events[-1] if events else {"values": {series: math.nan}}
    told, count = number(run.summary.get(series.whole)), Series(series.prefix, "count").whole
    value = last["values"][series] if told is None else told
    samples = number(run.summary.get(count)) or number(last.get("count"))
    label, metric = series.whole.replace("_", " "), run.metric(series)
    valid = [event for event in events if not math.isnan(event["values"][series])]
    if metric is None or not valid:
        return Result(label, metric, value, samples)
    choose = max if metric.direction == "max" else min
    best = choose(valid, key=lambda event: event["values"][series])
    return Result(label, metric, value, samples, best["values"][series], number(best.get("epoch")))


def in_order(run: RecordedRun, found: Iterable[Series]) -> list[Series]:
    """Return the values in the order in which the script declared its metrics, then the others."""
    order = list(run.metrics)
    rank = {name: place for place, name in enumerate(order)}
    return sorted(found, key=lambda each: min(rank.get(each.whole, len(order)), rank.get(each.name, len(order))))


def differing(runs: Sequence[RecordedRun]) -> list[str]:
    """Return the names of the flags and facts in which the runs differ, ranks and engine first."""
    configs = [run.config for run in runs]
    names = dict.fromkeys(name for config in configs for name in config)
    return [name for name in names if len({config.get(name, "-") for config in configs}) > 1]


def time_shares(run: RecordedRun) -> list[dict[str, float]]:
    """Return each phase's share (0 to 1) of the training time by rank; only of rank 0 if no others are recorded."""
    totals: dict[int, dict[str, float]] = defaultdict(lambda: dict.fromkeys((*PHASES, "other"), 0.0))
    for event in run.rank_times:
        columns = [durations(event.get(f"{phase}_seconds")) for phase in (*PHASES, "elapsed")]
        for rank, (*seconds, elapsed) in enumerate(zip(*columns, strict=False)):
            for phase, value in zip(PHASES, seconds, strict=True):
                totals[rank][phase] += value
            totals[rank]["other"] += max(0.0, elapsed - sum(seconds))
    if not totals:
        unit, before = "samples" if run.counts_samples else "step", 0.0  # what the recorded seconds are per
        for event in run.train:
            for phase in PHASES:
                each = max(0.0, number(event.get(f"{phase}_seconds")) or 0.0)
                totals[0][phase] += each * max(event[unit] - before, 0)
            before = event[unit]
    wholes = [sum(total.values()) for total in totals.values()]
    return [
        {phase: value / whole for phase, value in total.items()}
        for total, whole in zip(totals.values(), wholes, strict=True)
        if whole > 0 and math.isfinite(whole)
    ]


def durations(value: object) -> list[float]:
    """Return a list of seconds over ranks; [] if `value` is none."""
    numbers = [number(one) for one in value] if isinstance(value, list) else []
    valid = [one for one in numbers if one is not None and one >= 0]
    return valid if len(valid) == len(numbers) else []
