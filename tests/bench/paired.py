"""Paired measurements: each side of a comparison once per round, in a random order. A slow minute touches all sides."""

import random
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

Side = TypeVar("Side", bound=Hashable)
Result = TypeVar("Result")


def once(sides: Iterable[Side], measure: Callable[[Side], Result]) -> dict[Side, Result]:
    """Measure every side once, in a random order."""
    given = list(sides)
    return {side: measure(side) for side in random.sample(given, len(given))}


def rounds(number: int, sides: Iterable[Side], measure: Callable[[Side], Result]) -> dict[Side, list[Result]]:
    """Measure every side once in each round, and say so; return the results of each side, by round."""
    given, found = list(sides), defaultdict[Side, list[Result]](list)
    for count in range(1, number + 1):
        for side, result in once(given, measure).items():
            found[side].append(result)
            print(f"round {count}/{number}  {side}  {result}", file=sys.stderr, flush=True)
    return {side: found[side] for side in given}


def spread(values: Iterable[float], form: str = ".3g") -> str:
    """Return "median (least to most)"."""
    known = list(values)
    return f"{statistics.median(known):{form}} ({min(known):{form}} to {max(known):{form}})" if known else "-"
