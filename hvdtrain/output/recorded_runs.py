"""Reads runs from their output directories: metrics.jsonl, event by event, however the run ended.

A run that was killed and restarted has several attempts in its record, each beginning with a `start` event. Steps of an
attempt after the checkpoint from which the next one resumed are left out. Seconds are those in which an attempt ran,
without the pauses between attempts.
"""

import functools
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
from hvdtrain.output.metric_names import (
    PHASES,
    Metric,
    Series,
    finite_or_not,
    named_values,
    recorded_metrics,
    series_of,
)

RecordedEvent = dict[str, Any]

NOT_COMPARED = {"output_dir", "resume", "no_progress", "verbose"}  # flags that do not affect training
HARMLESS = ("checkpoint", "record")  # kinds of errors that do not end a run: a file could not be written
LARGEST_INTEGER = 2**53  # floats represent every integer below this
TRAIN = "train"  # prefix of the values of training, beside the data sets of evaluations
RATE = Series(TRAIN, "samples_per_second")


class CurvePoint(NamedTuple):
    """What was recorded at a position in training. seconds: that the attempts had run."""

    step: float
    samples: float
    seconds: float
    values: dict[Series, float]
    event: RecordedEvent


@dataclass
class Attempt:
    """One start of the run, until it ended or was killed."""

    began: float  # `elapsed` of its first event: seconds since its process started
    before: float  # seconds that earlier attempts ran
    ran: float = 0.0  # seconds, up to its last event
    step: float = 0.0  # from which it resumed
    samples: float = 0.0
    # Its `train` events, also of steps that a later attempt has repeated.
    trained: list[CurvePoint] = field(default_factory=list)


@dataclass
class RecordedRun:
    """A run, as its output directory records it."""

    name: str
    start: RecordedEvent = field(default_factory=dict)  # the newest `start` event
    attempts: list[Attempt] = field(default_factory=list)
    moments: list[CurvePoint] = field(default_factory=list)  # the `train` and `evaluate` events
    rank_times: list[RecordedEvent] = field(default_factory=list)  # `ranks` events: seconds by phase, a list over ranks
    summary: RecordedEvent = field(default_factory=dict)
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
    def metrics(self) -> dict[str, Metric]:
        """The metrics that the script declared, the most important first."""
        return recorded_metrics(self.start)

    @functools.cached_property
    def config(self) -> dict[str, str]:
        """All flags and other facts that distinguish runs, as text."""
        told = {"ranks": str(self.ranks)} | {name: str(self.start.get(name, "?")) for name in ("engine", "dataset")}
        flags = mapping(self.start.get("config"))
        told |= {name: shown_flag(value) for name, value in flags.items() if name not in NOT_COMPARED | told.keys()}
        ranks = self.start.get("ranks")
        hosts = [shown_flag(mapping(rank).get("host")) for rank in ranks] if isinstance(ranks, list) else []
        told["hosts"] = ", ".join(dict.fromkeys(hosts))
        return told | {f"{name} version": shown_flag(v) for name, v in mapping(self.start.get("versions")).items()}

    def metric(self, series: Series) -> Metric | None:
        """Return the metric that the script declared for a value, with its data (validation_loss) or without; or None."""
        return self.metrics.get(series.whole, self.metrics.get(series.name))

    def of_training(self, yes: bool = True) -> list[CurvePoint]:
        """Return the steps that were recorded; or the evaluations."""
        return [moment for moment in self.moments if (moment.event["event"] == "train") == yes]


def mapping(value: object) -> RecordedEvent:
    """Return `value` if it is a JSON object, else {}."""
    return value if isinstance(value, dict) else {}


def shown_flag(value: object) -> str:
    """Return a flag's value as text."""
    return "-" if value is None else str(value)


# ---- reading


def read_runs(directories: Sequence[Path]) -> list[RecordedRun]:
    """Return the runs in the directories, one in each. Raises UserError if a directory has no run."""
    names = [Path(os.path.realpath(path)).name for path in directories]
    return [
        read_run(path, name if names.count(name) == 1 else str(path))
        for path, name in zip(directories, names, strict=True)
    ]


def read_run(directory: Path, name: str) -> RecordedRun:
    """Return the run in `directory`. Raises UserError if it has none."""
    run, damaged, remedy = RecordedRun(name), list[int](), "name the --output-dir of a run"
    try:
        if not directory.is_dir():
            raise UserError(f"{directory} is not a directory: {remedy}")
        lines = files.read_text(directory / "metrics.jsonl").split("\n")
    except FileNotFoundError:
        raise UserError(f"{directory} has no metrics.jsonl: {remedy}") from None
    except OSError as error:
        raise UserError(f"{directory}/metrics.jsonl cannot be read ({error.strerror}): make it readable") from None
    for place, line in enumerate(lines, 1):
        try:
            take_event(run, records.parsed(line) or {})
        except (KeyError, TypeError, ValueError):
            # The last line has no line end if it is just being written: it is none that was damaged.
            if line.strip() and place < len(lines):
                damaged.append(place)
    if damaged:
        which = ", ".join(map(str, damaged[:5])) + ", ..." * (len(damaged) > 5)
        run.notes.insert(0, f"metrics.jsonl: left out unreadable lines (line {which})")
    if not run.attempts:
        raise UserError(f"{directory}/metrics.jsonl has no run in it (no line with a start event): {remedy}")
    if run.state == "not ended" and (summary := read_summary(directory, run.notes)):
        # A start removes the summary of an earlier run, so this run ended: only the last line of the record is lost.
        run.summary, run.state = summary, "ended"
        run.notes.append("the record stops before the end of the run: the results are from summary.json")
    if run.state == "not ended":
        run.notes.append("the record has no end: the run was killed, or is still running")
    if not run.of_training():
        run.notes.append("no step was recorded")
    elif len(run.of_training()) == len(run.moments) and run.state != "ended" and any(m.values for m in run.moments):
        run.notes.append("no evaluation yet: all values were measured in training")
    return run


def read_summary(directory: Path, notes: list[str]) -> RecordedEvent:
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


def finite(event: RecordedEvent, name: str, least: float = 0.0) -> float:
    """Return a field that is a number, at least `least`. Raises KeyError, ValueError."""
    value = finite_or_not(event[name])
    if value is None or not least <= value < LARGEST_INTEGER:
        raise ValueError(name)
    return value


def take_event(run: RecordedRun, event: RecordedEvent) -> None:
    """Add one event to the run. Raises KeyError, TypeError or ValueError for one that is damaged; the run is unchanged."""
    name, elapsed = event["event"], finite(event, "elapsed", -LARGEST_INTEGER)
    finite(event, "time", -LARGEST_INTEGER)
    if name == "start":
        finite(event, "world_size", 1.0)
        run.attempts.append(Attempt(elapsed, run.seconds))
        run.start, run.state, run.summary = event, "not ended", {}
        return
    for place in ("step", "samples"):
        if name in ("train", "resume") or event.get(place) is not None:
            finite(event, place)
    # It may be nan or inf.
    if name == "train" and event.get("loss") is not None and finite_or_not(event["loss"]) is None:
        raise ValueError("loss")
    if not run.attempts:
        return
    attempt = run.attempts[-1]
    attempt.ran = max(attempt.ran, elapsed - attempt.began)
    if name == "resume":
        attempt.step, attempt.samples = event["step"], event["samples"]
        go_back(run, event["step"])
    elif name == "train":
        go_back(run, event["step"] - 1)  # an attempt without a checkpoint repeats all steps
        values = {Series(TRAIN, key): value for key, value in named_values(event, run.metrics).items()}
        run.moments.append(CurvePoint(event["step"], event["samples"], run.seconds, values, event))
        attempt.trained.append(run.moments[-1])
    elif name == "evaluate":
        last: CurvePoint | Attempt = run.moments[-1] if run.moments else attempt
        step, samples = (getattr(last, key) if event.get(key) is None else event[key] for key in ("step", "samples"))
        go_back(run, step)  # as above
        prefix = event["prefix"] if isinstance(event.get("prefix"), str) else ""
        values = {series_of(prefix, key): value for key, value in named_values(event, run.metrics).items()}
        run.moments.append(CurvePoint(step, samples, run.seconds, values, event))
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
    """Drop what was recorded after `step`."""
    while run.moments and run.moments[-1].step > step:
        run.moments.pop()


# ---- what a run tells


def results(run: RecordedRun) -> dict[str, str]:
    """Return the last evaluation of each value as text, the most important first, and the best one if that was better; for a
    run without evaluations, the last values of training."""
    declared = [series_of(prefix, name) for name in run.metrics for prefix in ("test", "validation", "")]
    told = [series for series in declared if finite_or_not(run.summary.get(series.whole)) is not None]
    evaluations = run.of_training(False)
    seen = in_order(run, dict.fromkeys(told + [series for moment in evaluations for series in moment.values]))
    if not seen:
        last = {Series("", s.name): value for moment in run.moments for s, value in moment.values.items()}
        order = in_order(run, last)
        return {f"training {each.name.replace('_', ' ')}": shown_value(last[each], run.metric(each)) for each in order}
    found: dict[str, str] = {}
    for series in seen:
        label, metric = series.whole.replace("_", " "), run.metric(series)
        of_it = [moment for moment in evaluations if series in moment.values]
        value = finite_or_not(run.summary.get(series.whole))
        value = of_it[-1].values[series] if value is None else value
        found[label] = shown_value(value, metric)
        counts = [run.summary.get(Series(series.prefix, "count").whole), *(m.event.get("count") for m in of_it[-1:])]
        if samples := next((count for one in counts if (count := finite_or_not(one)) and math.isfinite(count)), None):
            found[label] += f" of {samples:,.0f}"
        valid = [moment for moment in of_it if not math.isnan(moment.values[series])]
        if metric is not None and valid:
            best = (max if metric.direction == "max" else min)(valid, key=lambda moment: moment.values[series])
            if metric.better(best.values[series], value) or math.isnan(value):
                epoch = finite_or_not(best.event.get("epoch"))
                found[f"best {label}"] = shown_value(best.values[series], metric)
                found[f"best {label}"] += "" if epoch is None else f" in epoch {epoch:.0f}"
    return found


def shown_value(value: float, metric: Metric | None) -> str:
    """Return a value as text."""
    return metric.show(value) if metric is not None and metric.percent else f"{value:.4g}"


def in_order(run: RecordedRun, found: Iterable[Series]) -> list[Series]:
    """Return the values in the order in which the script declared its metrics, then the others."""
    place = {name: place for place, name in enumerate(run.metrics)}
    last = len(place)
    return sorted(found, key=lambda each: min(place.get(each.whole, last), place.get(each.name, last)))


def differing(runs: Sequence[RecordedRun]) -> list[str]:
    """Return the names of the flags and facts in which the runs differ, ranks and engine first."""
    configs = [run.config for run in runs]
    names = dict.fromkeys(name for config in configs for name in config)
    return [name for name in names if len({config.get(name, "-") for config in configs}) > 1]


def time_shares(run: RecordedRun) -> list[dict[str, float]]:
    """Return each phase's share (0 to 1) of the training time by rank, once an epoch has ended."""
    totals: dict[int, dict[str, float]] = defaultdict(lambda: dict.fromkeys((*PHASES, "other"), 0.0))
    for event in run.rank_times:
        columns = [durations(event.get(f"{phase}_seconds")) for phase in (*PHASES, "elapsed")]
        for rank, (*seconds, elapsed) in enumerate(zip(*columns, strict=False)):
            for phase, value in zip(PHASES, seconds, strict=True):
                totals[rank][phase] += value
            totals[rank]["other"] += max(0.0, elapsed - sum(seconds))
    wholes = [(total, sum(total.values())) for total in totals.values()]
    valid = [(total, whole) for total, whole in wholes if whole > 0 and math.isfinite(whole)]
    return [{phase: value / whole for phase, value in total.items()} for total, whole in valid]


def durations(value: object) -> list[float]:
    """Return a list of seconds over ranks; [] if `value` is none."""
    numbers = [finite_or_not(one) for one in value] if isinstance(value, list) else []
    valid = [one for one in numbers if one is not None and one >= 0]
    return valid if len(valid) == len(numbers) else []
