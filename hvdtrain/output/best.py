"""Which checkpoint was evaluated best. Does not import torch."""

import math
from collections.abc import Mapping
from typing import Any, TypeVar

Facts = dict[str, Any]  # those of a checkpoint; here, only "best" is read
Name = TypeVar("Name")


def best_of(facts: Mapping[Name, Facts]) -> list[Name]:
    """Return the checkpoints that were evaluated, the best first; of equal ones, the oldest. facts: newest first.

    They are compared by the metric of the newest one.
    """
    scored = [name for name in reversed(list(facts)) if goodness(facts[name]) > -math.inf]
    metric = facts[scored[-1]]["best"].get("metric") if scored else None
    alike = [name for name in scored if facts[name]["best"].get("metric") == metric]
    return sorted(alike, key=lambda name: -goodness(facts[name]))


def goodness(facts: Facts) -> float:
    """Return the value that its evaluation gave a checkpoint, higher for better ones; minus infinity if there is none."""
    try:
        value = float(facts["best"]["value"])
        return -math.inf if math.isnan(value) else value if facts["best"]["direction"] == "max" else -value
    except (KeyError, TypeError, ValueError, OverflowError):
        # Also in a damaged header, which `read_facts` does not verify.
        return -math.inf
