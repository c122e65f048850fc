"""Combines several seeds of one configuration into their mean and spread."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from hvdtrain.analysis.reporting.runs import NOT_COMPARED, RecordedRun


@dataclass
class Group:
    """One run, or several that differ only in their seeds."""

    name: str
    runs: list[RecordedRun]

    @property
    def folded(self) -> bool:
        """Whether the group has several runs."""
        return len(self.runs) > 1

    def takes(self, run: RecordedRun) -> bool:
        """Return whether `run` may join the group. It has the same flags, ranks, number of hosts, data and versions, a
        seed that the group does not have yet, and has ended: an incomplete run would bias the mean, and a repeated seed is
        not independent."""
        first = self.runs[0]
        ended = run.state == first.state == "ended"
        another = run.seed is not None and run.seed not in [each.seed for each in self.runs]
        return ended and another and alike(run) == alike(first)


def alike(run: RecordedRun) -> dict[str, str]:
    """Return the facts that must be equal in all runs of a group."""
    told = {name: value for name, value in run.config.items() if name not in NOT_COMPARED | {"seed"}}
    return told | {"hosts": str(len(run.hosts))}


def fold(runs: Sequence[RecordedRun], each_run: bool = False) -> list[Group]:
    """Return the runs in groups, in the order of their first runs. each_run: make one group per run."""
    groups: list[Group] = []
    for run in runs:
        joined = next((group for group in groups if not each_run and group.takes(run)), None)
        if joined is None:
            groups.append(Group(run.name, [run]))
        else:
            joined.runs.append(run)
    taken: set[str] = set()
    for group in groups:
        if group.folded:
            base = f"{common([run.name for run in group.runs])}, {len(group.runs)} seeds"
            tries = (base, *(f"{base} ({number})" for number in range(2, len(groups) + 2)))
            group.name = next(name for name in tries if name not in taken)
            taken.add(group.name)
    return groups


def common(names: Sequence[str]) -> str:
    """Return the common beginning of the names, without a trailing "seed" or similar."""
    unlike = (place for place, letters in enumerate(zip(*names, strict=False)) if len(set(letters)) > 1)
    prefix = names[0][: next(unlike, min(map(len, names)))]
    return re.sub(r"[-_. =/]*(seed|s|run)?[-_. =/]*\d*$", "", prefix) or names[0]


Curve = tuple[list[float], list[float]]  # x, y


def mean_curve(curves: Sequence[Curve]) -> tuple[list[float], list[float], list[float]]:
    """Return x, the mean of y and its standard deviation, point by point, for as many points as all curves have. A nan in
    one curve is a nan in the mean."""
    import numpy

    count = min(len(x) for x, _ in curves)
    xs, ys = numpy.array([x[:count] for x, _ in curves]), numpy.array([y[:count] for _, y in curves])
    return xs.mean(axis=0).tolist(), ys.mean(axis=0).tolist(), ys.std(axis=0, ddof=1).tolist()
