"""Combines several seeds of one configuration into their mean and spread.

Plots show the standard deviation over seeds (with n - 1). Tables also have the 95 % interval of the mean by Student's t
(source: `measuring.mean`).
"""

import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import isfinite, nan
from typing import NamedTuple

from hvdtrain.analysis.measuring import Mean, mean
from hvdtrain.analysis.reporting import cost
from hvdtrain.analysis.reporting.runs import PHASES, UNTOLD, Result, Run, results, time_shares
from hvdtrain.training.records.named import number

APART = UNTOLD | {"seed"}  # flags in which runs of one group may differ
POINTS = 200  # of a mean curve, if the runs were not recorded at the same x


@dataclass
class Group:
    """One run, or several that differ only in their seeds."""

    name: str
    runs: list[Run]

    @property
    def folded(self) -> bool:
        """Whether the group has several runs."""
        return len(self.runs) > 1


def fold(runs: Sequence[Run], each_run: bool = False) -> list[Group]:
    """Return the runs in groups, in the order of their first runs. each_run: make one group per run.

    A run joins a group if it has the same flags, ranks, number of hosts, data and versions, a seed that the group does not
    have yet, and has ended: an incomplete run would bias the mean, and a repeated seed is not independent.
    """
    groups: list[Group] = []
    for run in runs:
        joined = next((group for group in groups if not each_run and joins(run, group)), None)
        if joined is None:
            groups.append(Group(run.name, [run]))
        else:
            joined.runs.append(run)
    taken: set[str] = set()
    for place, group in enumerate(groups):
        if group.folded:
            group.name = free(f"{common([run.name for run in group.runs])}, {len(group.runs)} seeds", taken)
        for run in group.runs:
            run.place = place
    return groups


def joins(run: Run, group: Group) -> bool:
    """Tell whether `run` belongs to `group`."""
    first = group.runs[0]
    ended = run.state == first.state == "ended"
    another = seed(run) is not None and seed(run) not in map(seed, group.runs)
    return ended and another and alike(run) == alike(first)


def seed(run: Run) -> object:
    """Return the seed of a run; None if it is not recorded."""
    config = run.start.get("config")
    return config.get("seed") if isinstance(config, dict) else None


def alike(run: Run) -> dict[str, str]:
    """Return the facts that must be equal in all runs of a group."""
    told = {name: value for name, value in run.config.items() if name not in APART}
    return told | {"hosts": str(len(run.hosts))}


def common(names: Sequence[str]) -> str:
    """Return the common beginning of the names, without a trailing "seed" or similar."""
    unlike = (place for place, letters in enumerate(zip(*names, strict=False)) if len(set(letters)) > 1)
    prefix = names[0][: next(unlike, min(map(len, names)))]
    return re.sub(r"[-_. =/]*(seed|s|run)?[-_. =/]*\d*$", "", prefix) or names[0]


def free(name: str, taken: set[str]) -> str:
    """Return `name`, with a number if it is in `taken`, and add it there."""
    number, found = 1, name
    while found in taken:
        number += 1
        found = f"{name} ({number})"
    taken.add(found)
    return found


class Line(NamedTuple):
    """A mean over runs. spread: the standard deviation at each x."""

    x: list[float]
    y: list[float]
    spread: list[float]


def mean_line(lines: Sequence[tuple[Sequence[float], Sequence[float]]]) -> Line:
    """Return the mean of curves (x, y) over the range that all of them cover. A nan in one curve is a nan in the mean."""
    import numpy

    if not all(len(x) for x, _ in lines):
        return Line([], [], [])
    first = list(lines[0][0])
    if any(
        list(x) != first for x, _ in lines
    ):  # always for seconds; for samples, if evaluations were at different ones
        start, end = max(x[0] for x, _ in lines), min(x[-1] for x, _ in lines)
        if start > end:
            return Line([], [], [])
        first = numpy.linspace(start, end, POINTS if end > start else 1).tolist()
    rows = numpy.array([numpy.interp(first, x, y) for x, y in lines])
    return Line(first, rows.mean(axis=0).tolist(), rows.std(axis=0, ddof=1).tolist())


def mean_dots(lines: Sequence[tuple[Sequence[float], Sequence[float]]]) -> Line:
    """Return the mean of curves point by point, for as many points as all of them have."""
    count = min(len(x) for x, _ in lines)
    x = [statistics.fmean(line[0][place] for line in lines) for place in range(count)]
    values = [[line[1][place] for line in lines] for place in range(count)]
    finite = [all(map(isfinite, there)) for there in values]
    return Line(
        x,
        [statistics.fmean(there) if sound else nan for there, sound in zip(values, finite, strict=True)],
        [statistics.stdev(there) if sound else nan for there, sound in zip(values, finite, strict=True)],
    )


class Figure(NamedTuple):
    """One figure over the runs of a group. values: of the runs that have it, in their order."""

    label: str
    values: list[float]
    show: Callable[[float], str]
    result: Result | None = None  # of an evaluation

    @property
    def mean(self) -> Mean:
        """The mean over the runs, with its 95 % interval."""
        return mean(self.values)

    @property
    def deviation(self) -> float | None:
        """The standard deviation over the runs; None for one run."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None


OTHERS: tuple[tuple[str, Callable[[Run], float | None], Callable[[float], str]], ...] = (
    ("training", lambda run: number(run.summary.get("train_seconds")), lambda value: f"{value:,.4g} s"),
    ("throughput", lambda run: number(run.summary.get("samples_per_second")), lambda value: f"{value:,.0f}/s"),
    ("energy", lambda run: run.energy.get("energy_joules"), cost.joules),
)


def figures(group: Group, written: Callable[..., str]) -> list[Figure]:
    """Return the results of the runs, the most important first. written: `written(value, result=...)` formats a value."""
    found: dict[str, Figure] = {}
    for run in group.runs:
        for each in results(run):
            if each.label not in found:
                found[each.label] = Figure(each.label, [], partial(written, result=each), each)
            if isfinite(each.value):
                found[each.label].values.append(each.value)
    for label, value_of, show in OTHERS:
        known = [value for run in group.runs if (value := value_of(run)) is not None and isfinite(value)]
        found[label] = Figure(label, known, show)
    return [figure for figure in found.values() if figure.values]


def summary(figure: Figure) -> str:
    """Return mean, 95 % interval, standard deviation and n as a cell of a table."""
    middle, deviation = figure.mean, figure.deviation
    if middle.low is None or middle.high is None or deviation is None:
        return f"{figure.show(middle.mean)} (n = 1)"
    interval = f"95 %: {figure.show(middle.low)} to {figure.show(middle.high)}"
    return f"{figure.show(middle.mean)} ({interval}; s.d. {figure.show(deviation)}, n = {middle.n})"


class Share(NamedTuple):
    """A phase's mean share of the time (0 to 1) over ranks and seeds. spread: over seeds; None for one run."""

    mean: float
    spread: float | None


def shares(group: Group) -> dict[str, Share]:
    """Return each phase's share, averaged over the ranks of each run, then over runs; {} if none are recorded."""
    rows = []
    for run in group.runs:
        ranks = [share for _, share in time_shares(run)]
        names = dict.fromkeys(name for share in ranks for name in share)
        if ranks:
            rows.append({name: statistics.fmean(share.get(name, 0.0) for share in ranks) for name in names})
    found = {}
    for name in (*PHASES, "other"):
        values = [row.get(name, 0.0) for row in rows]
        if any(values):
            found[name] = Share(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None)
    return found
