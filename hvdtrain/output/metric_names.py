"""Determines which fields of an event are values recorded by the script, in which direction each is better, and which
checkpoint was evaluated best. Does not import torch."""

import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple, TypeVar

from hvdtrain.engines.errors import UserError

CheckpointFacts = dict[str, Any]  # of which only "best" is read here
Name = TypeVar("Name")
PHASES = ("loading", "compute", "communication")  # of the time of a step; the rest is reporting
# Fields of all events. Scripts cannot use these names for recorded values.
FIXED = frozenset({"event", "time", "elapsed", "seconds", "epoch", "step", "steps", "samples", "count", "prefix"})
# Fields recorded in addition to a script's values. They are not metrics unless the `start` event declares them.
ADDED = frozenset({"loss_rank0", "objective", "gradient_norm", "tokens", "world_size"})
ADDED_BEGINNINGS = ("learning_rate",)
ADDED_ENDINGS = ("_seconds", "_share", "_per_second", "_bytes")
# Fields of a `train` event that trackers show in addition to the script's values, and their names there.
ADDED_AND_SHOWN = {
    "objective": "train/objective",
    "gradient_norm": "train/gradient_norm",
    "learning_rate": "run/learning_rate",
    "samples_per_second": "run/samples_per_second",
    "tokens_per_second": "run/tokens_per_second",
    **{f"{phase}_share": f"share/{phase}" for phase in PHASES},
}
PREFIXES = ("test", "validation", "val")  # prefixes of metric names that include the data set, such as validation_loss


class Metric(NamedTuple):
    """A metric of evaluations: its direction and its format."""

    direction: Literal["min", "max"]  #: "min" if smaller is better, "max" if larger is better
    percent: bool = False  #: displayed in percent; recorded as a fraction from 0 to 1

    def better(self, value: float, than: float) -> bool:
        """Return whether `value` is strictly better than `than`."""
        return value > than if self.direction == "max" else value < than

    def reached(self, value: float, goal: float) -> bool:
        """Return whether `value` is at least as good as `goal`."""
        return value >= goal if self.direction == "max" else value <= goal

    def show(self, value: float) -> str:
        """Return `value` formatted for display."""
        return f"{value:.2%}" if self.percent else f"{value:.4f}"


class Series(NamedTuple):
    """The data set and the name of a value in evaluations, such as ("test", "accuracy") or ("", "perplexity")."""

    prefix: str
    name: str

    @property
    def whole(self) -> str:
        """The full name, such as "test_accuracy"."""
        return f"{self.prefix}_{self.name}" if self.prefix else self.name


def finite_or_not(value: object) -> float | None:
    """Return `value` as a float, including nan and inf; None if it is not a number or too large for a float."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def recorded_metrics(start: Mapping[str, Any]) -> dict[str, Metric]:
    """Return the metrics declared in a `start` event, the most important first."""
    declared = start.get("metrics")
    return {
        name: Metric(metric["direction"], metric.get("percent") is True)
        for name, metric in (declared.items() if isinstance(declared, dict) else ())
        if name not in FIXED and isinstance(metric, dict) and metric.get("direction") in ("min", "max")
    }


def named_values(event: Mapping[str, Any], metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Return the numbers in a `train` or `evaluate` event that the script recorded, including the loss."""
    return {
        name: value
        for name, field in event.items()
        if name not in FIXED
        and (name in metrics or not _is_added(name))
        and (value := finite_or_not(field)) is not None
    }


def _is_added(name: str) -> bool:
    return name in ADDED or name.startswith(ADDED_BEGINNINGS) or name.endswith(ADDED_ENDINGS)


def tagged_values(name: str, event: Mapping[str, Any], metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Return the numbers of an event under their names in TensorBoard and MLflow.

    Names are "train/loss", "test/accuracy", "run/learning_rate", "share/loading" for `train` and `evaluate` events, and
    "summary/NAME" for the `end` event. Other events have no numbers.
    """
    if name == "train":
        values = {f"train/{key}": value for key, value in named_values(event, metrics).items()}
        found = {tag: finite_or_not(event.get(key)) for key, tag in ADDED_AND_SHOWN.items()}
        return values | {tag: value for tag, value in found.items() if value is not None}
    if name == "evaluate":
        prefix = str(event.get("prefix") or "")
        series = {series_of(prefix, key): value for key, value in named_values(event, metrics).items()}
        return {f"{each.prefix or 'test'}/{each.name}": value for each, value in series.items()}
    if name == "end":
        return {f"summary/{key}": value for key, field in event.items() if (value := finite_or_not(field)) is not None}
    return {}


def series_of(prefix: str, name: str) -> Series:
    """Return the series for the prefix of an evaluation and the name of a value."""
    first, _, rest = name.partition("_")
    return Series(first, rest) if not prefix and rest and first in PREFIXES else Series(prefix, name)


def metrics_of(given: Mapping[str, Metric | str]) -> dict[str, Metric]:
    """Return `given` with "min" and "max" converted to Metric. Raises UserError for other strings and reserved names."""
    if not isinstance(given, Mapping):
        raise UserError(f'metrics={given!r}: give it names with directions, such as {{"accuracy": "max"}}')
    require_free(given)
    found = {}
    for name, value in given.items():
        direction = value if isinstance(value, str) else value.direction
        if direction not in ("min", "max"):
            raise UserError(f'metrics: {name} is {direction!r}: write "min" or "max", whichever is better')
        found[name] = Metric("min" if direction == "min" else "max") if isinstance(value, str) else value
    return found


def require_free(names: Iterable[str]) -> None:
    """Raise UserError if one of `names` is a field of every record."""
    if taken := FIXED.intersection(names):
        raise UserError(f"{min(taken)} is a field of every record: give the metric another name")


def best_of(facts: Mapping[Name, CheckpointFacts]) -> list[Name]:
    """Return the checkpoints that were evaluated, the best first; of equal ones, the oldest. facts: newest first.

    They are compared by the metric of the newest one.
    """
    # Sorting keeps the order of equal ones: turned round, the oldest of them comes first.
    scored = [name for name in reversed(list(facts)) if goodness(facts[name]) > -math.inf]
    metric = facts[scored[-1]]["best"].get("metric") if scored else None
    alike = [name for name in scored if facts[name]["best"].get("metric") == metric]
    return sorted(alike, key=lambda name: -goodness(facts[name]))


def goodness(facts: CheckpointFacts) -> float:
    """Return the value that its evaluation gave a checkpoint, higher for better ones; minus infinity if there is none."""
    try:
        value = float(facts["best"]["value"])
        return -math.inf if math.isnan(value) else value if facts["best"]["direction"] == "max" else -value
    except (KeyError, TypeError, ValueError, OverflowError):
        # Also in a damaged header, which `read_facts` does not verify.
        return -math.inf
