"""Reads the files of an --output-dir, even if damaged: metrics.jsonl, summary.json, mistakes.json."""

import base64
import binascii
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain.engines import files
from hvdtrain.engines.errors import UserError
from hvdtrain.training.records.misclassified import FILE as MISTAKES
from hvdtrain.training.records.named import number

COUNTABLE = 2**53  # floats represent every integer below this
NEEDED = {"train": ("step",), "resume": ("step",)}
IF_THERE = {"train": ("samples", "loss"), "resume": ("samples",), "evaluate": ("step", "samples")}  # may be null


@dataclass
class Record:
    """The content of mistakes.json."""

    confusion: list[list[int]]  # [label][prediction]
    shape: tuple[int, int]  # height, width
    mistakes: list[dict]  # index, label, predicted, loss, pixels (bytes)


def read_events(directory: Path, notes: list[str]) -> list[dict]:
    """Return the usable lines of metrics.jsonl, and note the others. Raises UserError if there is no readable file."""
    try:
        if not directory.is_dir():
            raise UserError(f"{directory} is not a directory: name the --output-dir of a run")
        lines = files.read_text(directory / "metrics.jsonl").split("\n")
    except FileNotFoundError:
        raise UserError(f"{directory} has no metrics.jsonl: name the --output-dir of a run") from None
    except OSError as error:
        raise UserError(f"{directory}/metrics.jsonl cannot be read ({error.strerror}): make it readable") from None
    events, damaged = [], []
    for place, line in enumerate(lines, 1):
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            event = None
        if usable(event):
            events.append(event)
        elif line.strip() and place < len(lines):  # without a line end: a line that is just being written
            damaged.append(place)
    if damaged:
        which = ", ".join(map(str, damaged[:5])) + ", ..." * (len(damaged) > 5)
        notes.append(f"metrics.jsonl: left out unreadable lines (line {which})")
    return events


def usable(event: object) -> bool:
    """Tell whether `event` has a valid time and position in the run. Unknown kinds of events are valid."""
    if not isinstance(event, dict) or not abs(number(event.get("time")) or math.nan) < COUNTABLE:
        return False
    name = event.get("event")
    if not isinstance(name, str):
        return False
    if name == "start":
        return 1 <= (number(event.get("world_size")) or 0) < COUNTABLE
    for key in (*NEEDED.get(name, ()), *IF_THERE.get(name, ())):
        if (said := event.get(key)) is None and key not in NEEDED.get(name, ()):
            continue
        value = number(said)
        # A loss may be nan or inf, but not a step or a number of samples.
        if value is None or (key in ("step", "samples") and not 0 <= value < COUNTABLE):
            return False
    return True


def read_json(directory: Path, name: str, notes: list[str]) -> dict:
    """Return the JSON object in a file; {} if there is none, with a note if the file is damaged."""
    try:
        value = json.loads(files.read_text(directory / name))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        notes.append(f"{name} is damaged: left out")
        return {}
    return value


def read_record(directory: Path, since: float, notes: list[str]) -> Record | None:
    """Return mistakes.json, if it is valid and not older than `since` (then it is of another run); else None."""
    found = read_json(directory, MISTAKES, notes)
    if not found or (number(found.get("time")) or 0) < since:
        return None
    try:
        return sound_record(found)
    except (KeyError, TypeError, ValueError, OverflowError, binascii.Error):
        notes.append(f"{MISTAKES} is damaged: left out")
        return None


def sound_record(found: dict) -> Record:
    """Return the record. Raises KeyError, TypeError, ValueError or OverflowError if it is invalid."""
    height, width = (_below(side, COUNTABLE) for side in found["shape"])
    confusion = [[_below(count, COUNTABLE) for count in row] for row in found["confusion"]]
    classes = len(confusion)
    mistakes: list[dict[str, Any]] = [
        dict(index=_below(m["index"], COUNTABLE), label=_below(m["label"], classes),
             predicted=_below(m["predicted"], classes), loss=float(m["loss"]),
             pixels=base64.b64decode(m["pixels"], validate=True))
        for m in found["mistakes"]
    ]  # fmt: skip
    square = classes > 0 and all(len(row) == classes for row in confusion)
    images = height > 0 < width and all(len(m["pixels"]) == height * width for m in mistakes)
    if not square or not images or not all(math.isfinite(m["loss"]) for m in mistakes):
        raise ValueError
    return Record(confusion, (height, width), mistakes)


def _below(value: Any, limit: int) -> int:
    """Return `value` as an integer from 0 to `limit` - 1. Raises ValueError if it is not one."""
    if not 0 <= (whole := int(value)) < limit:
        raise ValueError
    return whole
