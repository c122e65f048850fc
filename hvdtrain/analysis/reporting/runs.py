"""What a run's output directory says: metrics.jsonl read line by line, whatever became of the run.

A run may have been killed and started again. Then its record has several parts (attempts), each from a `start` event on.
Steps that a killed attempt took after the checkpoint that the next one went on from are counted as lost. Seconds are those
in which an attempt ran: the pause between two attempts is left out.
"""

import base64
import binascii
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvdtrain.engines.errors import UserError
from hvdtrain.training.records.misclassified import FILE as MISTAKES

UNTOLD = {"output_dir", "resume", "no_progress"}  # flags that say nothing about what a run does
COUNTABLE = 2**53  # from here on not every whole number is a float
NEEDED = {"train": ("step", "samples", "loss"), "evaluate": ("loss", "accuracy"), "resume": ("step", "samples")}


@dataclass
class Attempt:
    """One start of the run, up to its end or to whatever ended it."""

    began: float  # seconds since the epoch
    ended: float  # of its last event
    before: float  # seconds that earlier attempts ran
    ranks: int
    step: int = 0  # where it went on from
    samples: float = 0.0


@dataclass
class Record:
    """What mistakes.json says."""

    confusion: list[list[int]]  # [class][taken for]
    shape: tuple[int, int]  # height, width
    mistakes: list[dict]  # index, label, predicted, loss, pixels (bytes)


@dataclass
class Run:
    directory: Path
    name: str
    start: dict = field(default_factory=dict)  # the newest `start` event
    attempts: list[Attempt] = field(default_factory=list)
    train: list[dict] = field(default_factory=list)  # these and the next have `seconds` and `samples` added
    evaluations: list[dict] = field(default_factory=list)
    checkpoints: list[dict] = field(default_factory=list)
    rank_times: list[dict] = field(default_factory=list)  # `ranks` events: seconds by phase, a list over ranks
    lost: list[dict] = field(default_factory=list)  # train events that a later attempt took again
    kept: list[str] = field(default_factory=list)  # names in checkpoints/, oldest first
    summary: dict = field(default_factory=dict)
    record: Record | None = None
    notes: list[str] = field(default_factory=list)
    state: str = "not ended"  # ended, stopped, failed

    @property
    def ranks(self) -> int:
        return self.attempts[-1].ranks

    @property
    def seconds(self) -> float:
        """How long all attempts ran."""
        last = self.attempts[-1]
        return last.before + last.ended - last.began

    @property
    def engine(self) -> str:
        return str(self.start.get("engine", "?"))

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


def number(value: object) -> float | None:
    """Return `value` as a float, nan and inf included; None where it is no number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def read_runs(directories: Sequence[Path]) -> list[Run]:
    """Read every directory. Raises UserError where one holds no run at all."""
    names = [path.resolve().name for path in directories]
    return [
        read(path, name if names.count(name) == 1 else str(path)) for path, name in zip(directories, names, strict=True)
    ]


def read(directory: Path, name: str) -> Run:
    run = Run(directory, name)
    for event in read_events(run):
        take(run, event)
    if not run.attempts:
        how = "name the --output-dir of a run of hvdtrain.mnist or hvdtrain.imagenet"
        raise UserError(f"{directory}/metrics.jsonl tells of no run (no line with a start event): {how}")
    if not run.summary:
        run.summary = read_json(run, "summary.json") if run.state == "ended" else {}
    run.record = read_record(run)
    run.kept = sorted(path.name for path in (directory / "checkpoints").glob("step-*.safetensors"))
    if run.state == "not ended":
        run.notes.append("the record has no end: the run was killed, or still goes on")
    if not run.train:
        run.notes.append("no step was recorded")
    elif not run.evaluations:
        run.notes.append("no evaluation yet: there is no accuracy to show")
    return run


def read_events(run: Run) -> list[dict]:
    """Return the lines of metrics.jsonl that can be used; note how many cannot."""
    if not run.directory.is_dir():
        raise UserError(f"{run.directory} is no directory: name the --output-dir of a run")
    try:
        lines = (run.directory / "metrics.jsonl").read_text(errors="replace").splitlines()
    except FileNotFoundError:
        how = "name the --output-dir of a run, as it was given to hvdtrain.mnist or hvdtrain.imagenet"
        raise UserError(f"{run.directory} has no metrics.jsonl: {how}") from None
    except OSError as error:
        raise UserError(f"{run.directory}/metrics.jsonl cannot be read ({error.strerror}): make it readable") from None
    events, damaged = [], []
    for place, line in enumerate(lines, 1):
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            event = None
        if usable(event):
            events.append(event)
        elif line.strip():
            damaged.append(place)
    if damaged:
        which = ", ".join(map(str, damaged[:5])) + ", ..." * (len(damaged) > 5)
        run.notes.append(f"metrics.jsonl: left out what cannot be read (line {which})")
    return events


def usable(event: object) -> bool:
    if not isinstance(event, dict) or not abs(number(event.get("time")) or math.nan) < COUNTABLE:
        return False
    name = event.get("event")
    if name == "start":
        return 1 <= (number(event.get("world_size")) or 0) < COUNTABLE
    if not isinstance(name, str) or any(number(event.get(key)) is None for key in NEEDED.get(name, ())):
        return False
    # A loss may be nan or inf; a step and a number of samples may not.
    return all(0 <= event[key] < COUNTABLE for key in NEEDED.get(name, ()) if key in ("step", "samples"))


def take(run: Run, event: dict) -> None:
    """Add one event to the run."""
    name = event["event"]
    if name == "start":
        before = run.seconds if run.attempts else 0.0
        run.attempts.append(Attempt(event["time"], event["time"], before, int(event["world_size"])))
        run.start, run.state, run.summary = event, "not ended", {}
        return
    if not run.attempts:
        return
    attempt = run.attempts[-1]
    attempt.ended = max(attempt.ended, event["time"])
    event["seconds"] = attempt.before + max(0.0, event["time"] - attempt.began)
    if name == "resume":
        attempt.step, attempt.samples = int(event["step"]), event["samples"]
        go_back(run, event["samples"])
    elif name == "train":
        go_back(run, event["samples"] - 1)  # a start that had nothing to resume takes all of it again
        run.train.append(event)
    elif name == "evaluate":
        event["samples"] = run.train[-1]["samples"] if run.train else attempt.samples
        run.evaluations.append(event)
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
        run.state = "failed" if event.get("kind") != "checkpoint" else run.state
        run.notes.append(f"error: {event.get('message', '?')}")


def go_back(run: Run, samples: float) -> None:
    """Count as lost what was recorded beyond `samples`."""
    while run.train and run.train[-1]["samples"] > samples:
        run.lost.append(run.train.pop())
    while run.evaluations and run.evaluations[-1]["samples"] > samples:
        run.evaluations.pop()


def read_json(run: Run, name: str) -> dict:
    """Return the object in a file; {} where there is none, with a note where it is damaged."""
    try:
        value = json.loads((run.directory / name).read_text(errors="replace"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        run.notes.append(f"{name} is damaged: left out")
        return {}
    return value


def read_record(run: Run) -> Record | None:
    """Return what the last evaluation left in mistakes.json, if it is sound and this run's own."""
    found = read_json(run, MISTAKES)
    if not found or (number(found.get("time")) or 0) < run.attempts[0].began:
        return None
    try:
        height, width = (int(side) for side in found["shape"])
        confusion = [[int(count) for count in row] for row in found["confusion"]]
        mistakes: list[dict[str, Any]] = [
            dict(index=int(m["index"]), label=int(m["label"]), predicted=int(m["predicted"]), loss=float(m["loss"]),
                 pixels=base64.b64decode(m["pixels"], validate=True))
            for m in found["mistakes"]
        ]  # fmt: skip
    except (KeyError, TypeError, ValueError, OverflowError, binascii.Error):
        sound = False
    else:
        square = bool(confusion) and all(len(row) == len(confusion) for row in confusion)
        pictures = height > 0 < width and all(len(m["pixels"]) == height * width for m in mistakes)
        sound = square and pictures and min(map(min, confusion)) >= 0
    if not sound:
        run.notes.append(f"{MISTAKES} is damaged: left out")
        return None
    return Record(confusion, (height, width), mistakes)


def differing(runs: Sequence[Run]) -> list[str]:
    """Return the names of the flags and facts in which the runs differ, ranks and engine first."""
    configs = [run.config for run in runs]
    names = dict.fromkeys(name for config in configs for name in config)
    return [name for name in names if len({config.get(name, "-") for config in configs}) > 1]


def time_shares(run: Run) -> list[tuple[str, dict[str, float]]]:
    """Return, by rank, each phase's share (0 to 1) of the time spent training; only rank 0's where no more was recorded."""
    phases = ("loading", "compute", "communication")
    totals: dict[int, dict[str, float]] = {}
    for event in run.rank_times:
        lists = [event.get(f"{phase}_seconds") for phase in (*phases, "elapsed")]
        if not all(isinstance(values, list) and all(number(v) is not None for v in values) for values in lists):
            continue
        for rank, (*seconds, elapsed) in enumerate(zip(*lists, strict=False)):
            total = totals.setdefault(rank, dict.fromkeys((*phases, "other"), 0.0))
            for phase, value in zip(phases, seconds, strict=True):
                total[phase] += value
            total["other"] += max(0.0, elapsed - sum(seconds))
    if not totals:
        total, before = dict.fromkeys(phases, 0.0), 0.0
        for event in run.train:
            for phase in phases:
                total[phase] += (number(event.get(f"{phase}_seconds")) or 0.0) * max(event["samples"] - before, 0)
            before = event["samples"]
        totals[0] = total
    shares = []
    for rank, total in totals.items():
        if (whole := sum(total.values())) > 0 and math.isfinite(whole):
            shares.append((f"rank {rank}", {phase: value / whole for phase, value in total.items()}))
    return shares


def samples_at(run: Run, steps: Sequence[float]) -> list[float]:
    """Return how many samples had been taken after each of `steps`, from the recorded steps on both sides of it."""
    import numpy

    known_steps = [0.0, *(event["step"] for event in run.train)]
    known_samples = [0.0, *(event["samples"] for event in run.train)]
    return numpy.interp(steps, known_steps, known_samples).tolist()
