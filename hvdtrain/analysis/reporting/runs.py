"""What a run's output directory says: metrics.jsonl, event by event, however the run ended.

A run may have been killed and started again. Then its record has several parts (attempts), each from a `start` event on.
Steps that a killed attempt took after the checkpoint that the next one went on from are counted as lost. Seconds are those
in which an attempt ran: the pause between two attempts is left out. They are those of the monotonic clock (`elapsed`)
where the record has it, else of the clock on the wall.
"""

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

UNTOLD = {"output_dir", "resume", "no_progress", "verbose"}  # flags that say nothing about what a run does
GOES_ON = ("checkpoint", "record")  # kinds of errors that end no run: something could not be written
ENERGY = ("energy_joules", "energy_cpu_joules", "energy_gpu_joules")
PHASES = ("loading", "compute", "communication")


class Result(NamedTuple):
    """A value that the run came to."""

    label: str
    metric: Metric | None  # None: no direction is known
    value: float
    samples: float | None  # that it is of
    best: float | None  # of all evaluations; None if the metric has no direction
    best_epoch: float | None
    training: bool = False  # there is no evaluation: from the last recorded step that has it


@dataclass
class Attempt:
    """One start of the run, up to its end or to whatever ended it."""

    began: float  # seconds since the epoch
    ended: float  # of its last event
    before: float  # seconds that earlier attempts ran
    ranks: int
    clock: float | None  # monotonic seconds at its start; None where the record has only times of the day
    ran: float = 0.0  # seconds, up to its last event
    step: float = 0.0  # where it went on from
    samples: float | None = 0.0
    energy: dict[str, float] = field(default_factory=dict)  # joules by ENERGY, up to its last event that has them
    energy_complete: bool = True


@dataclass
class Run:
    directory: Path
    name: str
    start: dict = field(default_factory=dict)  # the newest `start` event
    attempts: list[Attempt] = field(default_factory=list)
    # These and the next have `seconds`, `step` and `samples` (None where the record does not count them) added, and
    # `values`: of training by name, of evaluations by series.
    train: list[dict] = field(default_factory=list)
    evaluations: list[dict] = field(default_factory=list)
    checkpoints: list[dict] = field(default_factory=list)
    rank_times: list[dict] = field(default_factory=list)  # `ranks` events: seconds by phase, a list over ranks
    lost: list[dict] = field(default_factory=list)  # train events that a later attempt took again
    kept: list[str] = field(default_factory=list)  # names in checkpoints/, oldest first
    summary: dict = field(default_factory=dict)
    record: Record | None = None
    notes: list[str] = field(default_factory=list)
    state: str = "not ended"  # ended, stopped, failed
    place: int = 0  # of its group among those that are shown: its colour

    @property
    def ranks(self) -> int:
        return self.attempts[-1].ranks

    @property
    def seconds(self) -> float:
        """How long all attempts ran."""
        return self.attempts[-1].before + self.attempts[-1].ran

    @property
    def energy(self) -> dict[str, float]:
        """Joules of all attempts, whose lost steps were paid for, too; {} where none was measured."""
        return {
            key: sum(attempt.energy.get(key, 0.0) for attempt in self.attempts)
            for key in ENERGY
            if any(key in attempt.energy for attempt in self.attempts)
        }

    @property
    def engine(self) -> str:
        return str(self.start.get("engine", "?"))

    @property
    def counts_samples(self) -> bool:
        return all(event["samples"] is not None for event in self.train)

    @property
    def metrics(self) -> dict[str, Metric]:
        """What the script named, the most important first."""
        named = recorded_metrics(self.start)
        return UNNAMED if named is None else named

    def metric(self, series: Series) -> Metric | None:
        """Return what the script said of a value, if anything; it may name it with its data (validation_loss) or without."""
        metrics = self.metrics
        if metrics is UNNAMED and series.name.startswith("accuracy"):  # accuracy_top5, too
            return UNNAMED["accuracy"]
        return metrics.get(series.whole, metrics.get(series.name))

    @property
    def config(self) -> dict[str, str]:
        """Every flag and what else tells runs apart, as text."""
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
        ranks = self.start.get("ranks")
        named = [str(rank.get("host")) for rank in ranks if isinstance(rank, dict)] if isinstance(ranks, list) else []
        return list(dict.fromkeys(named))


def shown(value: object) -> str:
    """Return a flag's value as a person writes it."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    return ", ".join(map(shown, value)) if isinstance(value, list) else str(value)


def read_runs(directories: Sequence[Path]) -> list[Run]:
    """Read every directory. Raises UserError where one holds no run at all."""
    names = [Path(os.path.realpath(path)).name for path in directories]
    return [
        read(path, name if names.count(name) == 1 else str(path)) for path, name in zip(directories, names, strict=True)
    ]


def read(directory: Path, name: str) -> Run:
    run = Run(directory, name)
    events = read_events(directory, run.notes)
    for event in events:
        take(run, event)
    if not run.attempts:
        how = "name the --output-dir of a run"
        raise UserError(f"{directory}/metrics.jsonl has no run in it (no line with a start event): {how}")
    if run.state == "not ended" and (summary := read_json(directory, "summary.json", run.notes)):
        # A start removes what an earlier run left, so this one came to its end: only the record's last line is lost.
        run.summary, run.state = summary, "ended"
        run.notes.append("the record breaks off before the run's end: the results are those of summary.json")
    run.record = read_record(directory, min(event["time"] for event in events), run.notes)
    run.kept = sorted(path.name for path in (directory / "checkpoints").glob("step-*.safetensors"))
    add_rates(run.train)
    if run.state == "not ended":
        run.notes.append("the record has no end: the run was killed, or still goes on")
    if not run.train:
        run.notes.append("no step was recorded")
    elif not run.evaluations and run.state != "ended" and any(event["values"] for event in run.train):
        run.notes.append("no evaluation yet: all that is shown was measured in training")
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
        go_back(run, event["step"] - 1)  # a start that had nothing to resume takes all of it again
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
        run.notes.append(
            f"stopped on request ({event.get('reason', '?')}); typed again, the command goes on from there"
        )
    elif name == "error":
        run.state = run.state if event.get("kind") in GOES_ON else "failed"
        run.notes.append(f"error: {event.get('message', '?')}")


def finite(value: object) -> float | None:
    return known if (known := number(value)) is not None and math.isfinite(known) else None


def since(attempt: Attempt, event: dict) -> float:
    """Return the seconds from an attempt's start to an event. A clock that is set meanwhile does not matter where the
    record has the monotonic one."""
    if attempt.clock is None:
        return max(0.0, event["time"] - attempt.began)
    elapsed = finite(event.get("elapsed"))
    return attempt.ran if elapsed is None else max(0.0, elapsed - attempt.clock)


def evaluated(run: Run, event: dict) -> dict[Series, float]:
    """Return an evaluation's values by series. Where nothing says on which data: on the test set, in records of scripts
    that named no metrics."""
    prefix = event.get("prefix")
    if not isinstance(prefix, str):
        prefix = "test" if recorded_metrics(run.start) is None else ""
    return {series_of(prefix, name): value for name, value in named_values(event, run.metrics).items()}


def go_back(run: Run, step: float) -> None:
    """Count as lost what was recorded beyond `step`."""
    while run.train and run.train[-1]["step"] > step:
        run.lost.append(run.train.pop())
    while run.evaluations and run.evaluations[-1]["step"] > step:
        run.evaluations.pop()


def add_rates(train: Sequence[dict]) -> None:
    """Give each train event without `steps_per_second` that since the one before it, in the same attempt."""
    for before, event in pairwise(train):
        seconds = event["seconds"] - before["seconds"]
        if event["attempt"] == before["attempt"] and seconds > 0 and number(event.get("steps_per_second")) is None:
            event["steps_per_second"] = (event["step"] - before["step"]) / seconds


def results(run: Run) -> list[Result]:
    """Return what evaluations came to, the most important first; of a run without any, what training came to."""
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
    """Return the values in the order in which the script named its metrics, then the others."""
    order = list(run.metrics)
    rank = {name: place for place, name in enumerate(order)}
    return sorted(found, key=lambda each: min(rank.get(each.whole, len(order)), rank.get(each.name, len(order))))


def differing(runs: Sequence[Run]) -> list[str]:
    """Return the names of the flags and facts in which the runs differ, ranks and engine first."""
    configs = [run.config for run in runs]
    names = dict.fromkeys(name for config in configs for name in config)
    return [name for name in names if len({config.get(name, "-") for config in configs}) > 1]


def time_shares(run: Run) -> list[tuple[str, dict[str, float]]]:
    """Return, by rank, each phase's share (0 to 1) of the time spent training; only rank 0's where no more was recorded."""
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
    """Return how many samples had been taken after each of `steps`, from the recorded steps on both sides of it."""
    import numpy

    known = [event for event in run.train if event["samples"] is not None]
    known_steps = [0.0, *(event["step"] for event in known)]
    known_samples = [0.0, *(event["samples"] for event in known)]
    return numpy.interp(steps, known_steps, known_samples).tolist()
