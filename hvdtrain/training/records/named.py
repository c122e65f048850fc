"""Determines which fields of an event are values recorded by the script, and in which direction each is better."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from hvdtrain.training.records.clock import Clock
from hvdtrain.training.state import FIXED, Metric

# Fields recorded in addition to a script's values. They are not metrics unless the `start` event declares them.
BESIDE = frozenset(
    {"loss_rank0", "objective", "gradient_norm", "corrupt", "broken", "tokens", "world_size", "slowest_rank"}
)
BESIDE_BEGINNINGS = ("learning_rate",)
BESIDE_ENDINGS = ("_seconds", "_share", "_per_second", "_bytes")
# Fields of a `train` event that trackers show in addition to the script's values, and their names there.
SHOWN_BESIDE = {
    "objective": "train/objective",
    "gradient_norm": "train/gradient_norm",
    "learning_rate": "run/learning_rate",
}
SHOWN_BESIDE |= {name: f"run/{name}" for name in ("samples_per_second", "tokens_per_second")}
SHOWN_BESIDE |= {f"{phase}_share": f"share/{phase}" for phase in Clock.PHASES}
PREFIXES = ("test", "validation", "val")  # prefixes of metric names that include the data set, such as validation_loss


class Series(NamedTuple):
    """The data set and the name of a value in evaluations, such as ("test", "accuracy") or ("", "perplexity")."""

    prefix: str
    name: str

    @property
    def whole(self) -> str:
        """The full name, such as "test_accuracy"."""
        return f"{self.prefix}_{self.name}" if self.prefix else self.name


# Metrics of old records, from before scripts declared their metrics.
UNNAMED = {"accuracy": Metric("max", percent=True), "loss": Metric("min")}


def number(value: object) -> float | None:
    """Return `value` as a float, including nan and inf; None if it is not a number or too large for a float."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def recorded_metrics(start: Mapping[str, Any]) -> dict[str, Metric] | None:
    """Return the metrics declared in a `start` event, the most important first; None if it declares none."""
    told = start.get("metrics")
    if not isinstance(told, dict):
        return None
    return {
        name: Metric(metric["direction"], metric.get("percent") is True)
        for name, metric in told.items()
        if name not in FIXED and isinstance(metric, dict) and metric.get("direction") in ("min", "max")
    }


def named_values(event: Mapping[str, Any], metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Return the numbers in a `train` or `evaluate` event that the script recorded, including the loss."""
    return {
        name: value
        for name, said in event.items()
        if name not in FIXED and (name in metrics or not _beside(name)) and (value := number(said)) is not None
    }


def tagged_values(name: str, event: Mapping[str, Any], metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Return the numbers of an event under their names in TensorBoard and MLflow.

    Names are "train/loss", "test/accuracy", "run/learning_rate", "share/loading" for `train` and `evaluate` events, and
    "summary/NAME" for the `end` event. Other events have no numbers.
    """
    if name == "train":
        values = {f"train/{key}": value for key, value in named_values(event, metrics).items()}
        found = {tag: number(event.get(key)) for key, tag in SHOWN_BESIDE.items()}
        return values | {tag: value for tag, value in found.items() if value is not None}
    if name == "evaluate":
        prefix = str(event.get("prefix") or "")
        series = {series_of(prefix, key): value for key, value in named_values(event, metrics).items()}
        return {f"{each.prefix or 'test'}/{each.name}": value for each, value in series.items()}
    if name == "end":
        return {f"summary/{key}": value for key, said in event.items() if (value := number(said)) is not None}
    return {}


def _beside(name: str) -> bool:
    return name in BESIDE or name.startswith(BESIDE_BEGINNINGS) or name.endswith(BESIDE_ENDINGS)


def series_of(prefix: str, name: str) -> Series:
    """Return the series for the prefix of an evaluation and the name of a value."""
    first, _, rest = name.partition("_")
    return Series(first, rest) if not prefix and rest and first in PREFIXES else Series(prefix, name)
