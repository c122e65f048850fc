"""Draws the plots of a report: named values over samples, steps or seconds, and where the time goes."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import isfinite
from typing import TYPE_CHECKING, Any

from hvdtrain.analysis import plotting
from hvdtrain.analysis.reporting.runs import Event, RecordedRun, time_shares
from hvdtrain.output.metric_names import Series, number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SMOOTH_FROM = 40  # recorded steps: with more, they are drawn faintly, with their running mean as the line
MOST_VALUES = 12  # limit for drawn values
MOST_RANKS = 16  # bars per run
PHASES = {"loading": "#E69F00", "compute": "#0072B2", "communication": "#D55E00", "other": "#8c959f"}
POSITION = {"samples": "samples", "steps": "step", "seconds": "seconds"}  # axis: key of an event
DATA = {"test": "test set", "validation": "validation set", "val": "validation set", "": "evaluations"}

Points = list[tuple[Event, float]]  # events, and their finite values


@dataclass(frozen=True)
class Picture:
    """A plot for the page. part: section of the page, "learning" or "time"."""

    title: str
    caption: str
    part: str
    png: bytes


def draw_all(runs: Sequence[RecordedRun]) -> Iterator[Picture]:
    """Yield all plots of the runs."""
    counted = "samples" if all(run.counts_samples for run in runs) else "steps"
    for name in names_to_draw(runs)[0]:
        for axis in (counted, "seconds"):
            png = plotting.png([partial(draw_values, runs=runs, name=name, axis=axis)])
            title = shortened(name.replace("_", " "))
            yield Picture(f"{title[:1].upper()}{title[1:]} over {axis}", caption(runs, name), "learning", png)
    bars = [(f"{shortened(run.name)}, rank {rank}", share) for run in runs
            for rank, share in enumerate(time_shares(run)[:MOST_RANKS])]  # fmt: skip
    if bars:
        png = plotting.png([partial(draw_shares, bars=bars)], 0.9 + 0.22 * len(bars))
        yield Picture("Time by phase", "share of the time spent training", "time", png)
    if any(rates(run) for run in runs):
        png = plotting.png([partial(draw_rate, runs=runs, axis=counted)])
        yield Picture("Throughput", "samples per second, over all ranks", "time", png)


# ---- what there is to draw


def points(events: Sequence[Event], value_of: Callable[[Event], float | None]) -> Points:
    """Return the events that have a finite value."""
    return [(event, value) for event in events if (value := value_of(event)) is not None and isfinite(value)]


def trained(run: RecordedRun, name: str) -> Points:
    """Return the points of training that have the value `name`."""
    return points(run.train, lambda event: event["values"].get(name))


def tested(run: RecordedRun, series: Series) -> Points:
    """Return the points of evaluations that have the value `series`."""
    return points(run.evaluations, lambda event: event["values"].get(series))


def rates(run: RecordedRun) -> Points:
    """Return the points of training that have a throughput."""
    return points(run.train, lambda event: number(event.get("samples_per_second")))


def prefixes(runs: Sequence[RecordedRun], name: str) -> list[str]:
    """Return the data sets on which the runs evaluated `name`."""
    found = [series for run in runs for event in run.evaluations for series in event["values"]]
    return list(dict.fromkeys(series.prefix for series in found if series.name == name))


def names_to_draw(runs: Sequence[RecordedRun]) -> tuple[list[str], list[str]]:
    """Return the names to draw, and those beyond `MOST_VALUES`: the loss first, then in the order of the scripts."""
    named = [name for run in runs for name in run.metrics]
    seen = dict.fromkeys(name for run in runs for event in run.train for name in event["values"])
    seen |= dict.fromkeys(series.name for run in runs for event in run.evaluations for series in event["values"])
    found = [name for name in dict.fromkeys(["loss", *named, *seen]) if name in seen]
    return found[:MOST_VALUES], found[MOST_VALUES:]


def caption(runs: Sequence[RecordedRun], name: str) -> str:
    """Return what lines and dots are."""
    data = [DATA.get(prefix, prefix) for prefix in prefixes(runs, name)]
    parts = ["line: training"] if any(trained(run, name) for run in runs) else []
    parts += [f"dots: {data[0]}"] if data else []
    parts += [f"hollow: {', '.join(data[1:])}"] if len(data) > 1 else []
    return ", ".join(parts)


def shortened(name: str) -> str:
    """Return `name`, shortened to fit a legend."""
    name = plotting.printable(name)
    return name if len(name) <= 28 else f"{name[:12]}…{name[-15:]}"


# ---- drawing


def draw_values(axes: "Axes", runs: Sequence[RecordedRun], name: str, axis: str) -> None:
    """Draw training as lines, evaluations as dots, and restarts as dashed vertical lines."""
    for place, run in enumerate(runs):
        style: dict[str, Any] = plotting.look(place) | {"linestyle": (0, (1, 2)), "clip_on": False}
        label = "" if draw_line(axes, run, place, trained(run, name), axis) else shortened(run.name)
        for order, prefix in enumerate(prefixes(runs, name)):
            fill = "none" if order else style["color"]
            axes.plot(*curve(tested(run, Series(prefix, name)), axis), **style, markerfacecolor=fill, label=label)
            label = ""
    scale(axes, runs, name)
    axes.set_ylabel(shortened(name.replace("_", " ")))
    finish(axes, axis)


def draw_rate(axes: "Axes", runs: Sequence[RecordedRun], axis: str) -> None:
    """Draw the throughput as lines."""
    from matplotlib.ticker import EngFormatter

    for place, run in enumerate(runs):
        draw_line(axes, run, place, rates(run), axis)
    axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set_ylim(bottom=0)
    axes.set_ylabel("samples/s")
    finish(axes, axis)


def draw_line(axes: "Axes", run: RecordedRun, place: int, points: Points, axis: str) -> bool:
    """Draw a line, or its running mean if it has many points, and the restarts. Return whether there were any points."""
    style, (x, y) = plotting.look(place) | {"marker": ""}, curve(points, axis)
    if len(y) > SMOOTH_FROM:
        axes.plot(x, y, **style, linewidth=0.6, alpha=0.3)
        y = running_mean(y, len(y) // 20)
    for attempt in run.attempts[1:]:
        at = {"samples": attempt.samples, "steps": attempt.step, "seconds": attempt.before}[axis]
        if at is not None:
            axes.axvline(at, color=style["color"], linestyle=(0, (4, 3)), linewidth=0.9)
    if y:
        axes.plot(x, y, **style | {"marker": "." if len(y) == 1 else ""}, label=shortened(run.name))
    return bool(y)


def curve(points: Points, axis: str) -> tuple[list[float], list[float]]:
    """Return the points as x and y."""
    return [event[POSITION[axis]] for event, _ in points], [value for _, value in points]


def running_mean(numbers: Sequence[float], width: int) -> list[float]:
    """Return the mean over the last `width` numbers at each place; over fewer at the beginning."""
    windows = [numbers[max(0, end - width) : end] for end in range(1, len(numbers) + 1)]
    return [sum(window) / len(window) for window in windows]


def scale(axes: "Axes", runs: Sequence[RecordedRun], name: str) -> None:
    """Fit the y axis to the values: percents to all evaluations, whose dots are not clipped, and to training after its first
    tenth, as earlier values may lie outside of the plot; others logarithmically if the first values would leave no room for
    the rest."""
    from matplotlib.ticker import PercentFormatter

    series = [Series(prefix, name) for prefix in ("", *prefixes(runs, name))]
    metric = next((found for each in series for run in runs if (found := run.metric(each)) is not None), None)
    training = [point for run in runs for point in trained(run, name)]
    evaluations = [value for run in runs for each in series for _, value in tested(run, each)]
    if metric is not None and metric.percent:
        tenth = max((event["step"] for run in runs for event in run.train), default=0.0) / 10
        values = [value for event, value in training if event["step"] >= tenth] + evaluations
        if values and min(values) >= 0 and max(values) <= 1:
            room = 0.1 * max(max(values) - min(values), 0.01)
            axes.set_ylim(max(0.0, min(values) - room), min(1.0, max(values) + room))
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        return
    values = [value for _, value in training] + evaluations
    if (metric is None or metric.direction == "min") and values and 0 < 8 * min(values) < max(values):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")


def finish(axes: "Axes", axis: str) -> None:
    """Set the label and the numbers of the x axis."""
    from matplotlib.ticker import EngFormatter

    axes.set_xlabel("time (s)" if axis == "seconds" else axis)
    if axis != "seconds":  # 0.05 would be 50m
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set_xlim(left=0)


def draw_shares(axes: "Axes", bars: Sequence[tuple[str, dict[str, float]]]) -> None:
    """Draw one bar per run and rank, from 0 to 100 %."""
    from matplotlib.ticker import PercentFormatter

    left = [0.0] * len(bars)
    for phase, colour in PHASES.items():
        shares = [share.get(phase, 0.0) for _, share in bars]
        drawn = axes.barh(range(len(bars)), shares, left=left, height=0.62, color=colour, label=phase)
        said = [f"{share:.0%}" if share >= 0.09 else "" for share in shares]
        axes.bar_label(drawn, said, label_type="center", color="white")
        left = [before + share for before, share in zip(left, shares, strict=True)]
    axes.set_yticks(range(len(bars)), [label for label, _ in bars])
    axes.invert_yaxis()
    axes.grid(False)
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
