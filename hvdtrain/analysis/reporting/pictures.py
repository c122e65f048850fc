"""The pictures of a report, each as PNG file and as SVG inside the page, where colours and letters follow the page's own."""

import io
import re
from collections.abc import Callable, Iterator, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

from hvdtrain.analysis import plotting
from hvdtrain.analysis.reporting.runs import Record, Run, number, samples_at, time_shares

# Letters, lines, letters on bars; replaced by the page's own in the SVG.
INK, FAINT, ON = "#24292f", "#d8dee4", "#fefefe"
PHASES = {"loading": "#E69F00", "compute": "#0072B2", "communication": "#D55E00", "other": "#8c959f"}
LETTERS_ON = {"loading": "#1a1a1a", "compute": ON, "communication": ON, "other": ON}
# On the page: a variable of its style sheet, which has another value in the dark.
VARIABLES = {INK: "--ink", FAINT: "--line", "#8c959f": "--grey", "#ffffff": "--paper", ON: "--on"} | {
    colour: f"--c{place}" for place, colour in enumerate(plotting.COLOURS)
}
SMOOTH_FROM = 40  # recorded steps: with more, the line is their running mean, and they themselves are drawn faintly
STYLES = ("-", (0, (5, 1.5)), (0, (2, 1.2)), (0, (7, 2, 1.5, 2)))  # of two lines on each other, both are seen
SIZE = (4.0, 2.8)  # inches: letters of 9 points can still be read at a phone's width
MOST_RANKS = 16  # bars of one run
COLUMNS = 8  # of the picture of mistakes
LETTERS: Any = {
    "font.size": 9, "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": INK, "xtick.color": INK,
    "ytick.color": INK, "grid.color": FAINT, "axes.grid": True, "axes.axisbelow": True, "axes.spines.top": False,
    "axes.spines.right": False, "axes.linewidth": 0.6, "legend.frameon": False, "svg.fonttype": "none",
    "text.parse_math": False,  # a directory's name may hold dollar signs
}  # fmt: skip


class Picture:
    """A title, what to see in it, and its SVG."""

    def __init__(self, name: str, title: str, see: str, svg: str):
        self.name, self.title, self.see, self.svg = name, title, see, svg


def draw_all(runs: Sequence[Run], directory: Path) -> Iterator[Picture]:
    """Draw what the runs have to show; write each picture to `directory`, and yield it for the page."""
    import matplotlib

    with matplotlib.rc_context(LETTERS):
        for quantity in ("loss", "accuracy"):
            trained = any(points(run.train, quantity) for run in runs)
            if not trained and not any(points(run.evaluations, quantity) for run in runs):
                continue
            see = "line: training, dots: test set" if trained else "of the test set"
            for axis in ("samples", "seconds"):
                title = f"{quantity.capitalize()} over {axis}"
                yield finish(directory, f"{quantity}-over-{axis}", title, see, curves, runs, quantity, axis)
        if any(time_shares(run) for run in runs):
            bars = sum(min(len(time_shares(run)), MOST_RANKS) for run in runs)
            size = SIZE[0], max(1.5, 0.9 + 0.34 * bars)
            yield finish(
                directory, "time-shares", "Time by phase", "share of the time spent training", shares, runs, size=size
            )
        if any(points(run.train, "samples_per_second") for run in runs):
            yield finish(directory, "throughput", "Throughput", "samples per second, over all ranks", curves, runs,
                         "samples_per_second", "samples")  # fmt: skip
        for place, run in enumerate(runs, 1):
            if run.record is not None and len(run.record.confusion) <= 30:
                see = "samples by label and prediction; blue: right"
                yield finish(directory, f"confusion-{place}", "Confusion", see, confusion, run.record,
                             size=(SIZE[0], SIZE[0]))  # fmt: skip
            if run.record is not None and run.record.mistakes:
                finish(directory, f"mistakes-{place}", "", "", montage, run.record,
                       size=(SIZE[0] * 1.6, 0.95 * -(-len(run.record.mistakes) // COLUMNS)))  # fmt: skip


def finish(
    directory: Path, name: str, title: str, see: str, draw: Callable[..., None], *what: Any, size=SIZE
) -> Picture:
    """Draw on a figure of its own, write it as PNG, and return it with its SVG."""
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    draw(figure, *what)
    text = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):  # marks and clips of two pictures must not share their ids
        figure.savefig(text, format="svg", transparent=True)
    figure.suptitle(f"{title} ({see})" if title else "", fontsize=9)
    plotting.save(figure, directory / f"{name}.png")
    return Picture(name, title, see, for_page(text.getvalue(), f"{title}: {see}"))


def for_page(svg: str, said: str) -> str:
    """Return an SVG for inside a page: its own head cut off, colours and letters those of the page."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<style type=.*?</style>|<!--.*?-->", "", svg, flags=re.S)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    svg = re.sub(
        r'^<svg [^>]*?viewBox="([^"]*)"[^>]*>', rf'<svg viewBox="\1" role="img" aria-label="{said}">', svg, flags=re.S
    )
    svg = re.sub(r"'DejaVu Sans'[^;\"]*", "system-ui, sans-serif", svg)
    for colour, variable in VARIABLES.items():
        svg = re.sub(rf"(?<=[ :\"]){colour}\b", f"var({variable})", svg, flags=re.I)
    return svg


def style_of(place: int) -> dict[str, Any]:
    colours = plotting.COLOURS
    return dict(color=colours[place % len(colours)], linestyle=STYLES[place % len(STYLES)])


def points(events: Sequence[dict], quantity: str) -> list[dict]:
    return [event for event in events if number(event.get(quantity)) is not None]


def short(name: str) -> str:
    """Return a name that fits a legend."""
    name = "".join(c if c.isprintable() else "?" for c in name)
    return name if len(name) <= 28 else f"{name[:12]}…{name[-15:]}"


def values(events: Sequence[dict], quantity: str) -> list[float]:
    """Return the numbers; what is not finite is a gap in the line."""
    return [value if isfinite(value := float(event[quantity])) else float("nan") for event in events]


def running_mean(numbers: Sequence[float], width: int) -> list[float]:
    """Return the mean over the `width` newest numbers, gaps left out; at the beginning over those that there are."""
    import numpy

    known = ~numpy.isnan(numbers)
    sums, counts = numpy.nancumsum(numbers), numpy.cumsum(known)
    sums[width:], counts[width:] = sums[width:] - sums[:-width], counts[width:] - counts[:-width]
    return numpy.where(counts > 0, sums / numpy.maximum(counts, 1), numpy.nan).tolist()


def curves(figure, runs: Sequence[Run], quantity: str, axis: str) -> None:
    """Lines of the training steps, dots of the evaluations; below, restarts (broken line) and checkpoints (ticks)."""
    axes = figure.subplots()
    for place, run in enumerate(runs):
        style, trained = style_of(place), points(run.train, quantity)
        x, y = values(trained, axis), values(trained, quantity)
        label = short(run.name)
        if len(y) > SMOOTH_FROM:
            axes.plot(x, y, **style, linewidth=0.6, alpha=0.3)
            y = running_mean(y, len(y) // 20)
        if y:
            axes.plot(x, y, **style, linewidth=1.5, label=label, marker="." if len(y) == 1 else "")
            label = ""
        tested = points(run.evaluations, quantity)
        marker = plotting.MARKERS[place % len(plotting.MARKERS)]
        if tested:
            joined = {**style, "linestyle": (0, (1, 2)) if trained else style["linestyle"]}
            axes.plot(values(tested, axis), values(tested, quantity), **joined, marker=marker, markersize=4.5,
                      linewidth=1, label=label, clip_on=False)  # fmt: skip
        marks(axes, run, axis, style["color"], place)
    axes.set_xlabel(axis)
    if quantity == "loss":
        scale_loss(axes, runs)
    if quantity == "accuracy":
        scale_accuracy(axes, runs)
    axes.xaxis.set_major_formatter(lambda value, _: thousands(value))
    if quantity == "samples_per_second":
        axes.yaxis.set_major_formatter(lambda value, _: thousands(value))
        axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    legend(figure, axes, len(runs))


def scale_loss(axes, runs: Sequence[Run]) -> None:
    """Where the first loss would leave the others no room, make the axis logarithmic."""
    losses = [loss for run in runs for loss in values(run.train + run.evaluations, "loss") if loss == loss]
    if losses and 0 < 8 * min(losses) < max(losses):
        from matplotlib.ticker import LogLocator, NullLocator

        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")


def scale_accuracy(axes, runs: Sequence[Run]) -> None:
    """Leave the room to what follows the first tenth of training: the curves may come into the picture from below."""
    end = max((event["samples"] for run in runs for event in run.train), default=0.0)
    later = [event for run in runs for event in points(run.train, "accuracy") if event["samples"] >= end / 10]
    tested = [event for run in runs for event in points(run.evaluations, "accuracy")]
    lowest = min((value for value in values(later + tested, "accuracy") if value == value), default=0.0)
    if 0 <= lowest <= 1:
        axes.set_ylim(max(0.0, lowest - 0.5 * max(1 - lowest, 0.01)), 1.0)
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.4g} %")


def legend(figure, axes, count: int) -> None:
    if count > 1 and axes.get_legend_handles_labels()[1]:
        figure.legend(loc="outside lower left", ncols=min(count, 3), fontsize=8, handlelength=1.6)


def thousands(value: float) -> str:
    """Return 60000 as "60k": short enough for a phone."""
    for factor, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.4g}{letter}"
    return f"{value:.4g}"


def marks(axes, run: Run, axis: str, colour: str, place: int) -> None:
    """Mark restarts by a broken line and checkpoints by ticks on the ground."""
    for attempt in run.attempts[1:]:
        axes.axvline(attempt.samples if axis == "samples" else attempt.before, color=colour, linestyle=(0, (4, 3)),
                     linewidth=0.9)  # fmt: skip
    if axis == "samples":
        at = samples_at(run, values(points(run.checkpoints, "step"), "step"))
    else:
        at = [event["seconds"] for event in run.checkpoints]
    ground = axes.get_xaxis_transform()
    axes.plot(
        at, [0.015 + 0.035 * place] * len(at), "|", color=colour, markersize=6, markeredgewidth=1, transform=ground
    )


def shares(figure, runs: Sequence[Run]) -> None:
    """One bar per run and rank, from 0 to 100 %."""
    axes = figure.subplots()
    names: list[str] = []
    shown_phases: list[str] = []
    for run in runs:
        for rank, share in time_shares(run)[:MOST_RANKS]:
            left = 0.0
            for phase, part in share.items():
                new = phase not in shown_phases
                axes.barh(len(names), part, left=left, height=0.62, color=PHASES[phase], label=phase if new else None)
                shown_phases += [phase] * new
                if part >= 0.09:
                    axes.text(left + part / 2, len(names), f"{part:.0%}", ha="center", va="center", fontsize=8.5,
                              color=LETTERS_ON[phase])  # fmt: skip
                left += part
            names.append(f"{short(run.name)}, {rank}" if len(runs) > 1 else rank)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.grid(False)
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
    axes.spines["left"].set_visible(False)
    axes.tick_params(left=False)
    figure.legend(loc="outside lower left", ncols=4, fontsize=8, handlelength=1, handleheight=1)


def confusion(figure, record: Record) -> None:
    """Every sample of the test set in its cell. Right answers are tinted by share of their class, wrong ones stronger."""
    from matplotlib.patches import Rectangle

    axes = figure.subplots()
    count = len(record.confusion)
    wrong = max((n for i, row in enumerate(record.confusion) for j, n in enumerate(row) if i != j), default=0)
    for label, row in enumerate(record.confusion):
        for taken, samples in enumerate(row):
            right = label == taken
            strength = 0.3 * samples / max(sum(row), 1) if right else 0.15 + 0.6 * samples / max(wrong, 1)
            if samples:
                colour = plotting.COLOURS[0] if right else plotting.COLOURS[1]
                axes.add_patch(
                    Rectangle((taken - 0.47, label - 0.47), 0.94, 0.94, color=colour, alpha=strength, linewidth=0)
                )
            if samples and count <= 16:
                axes.text(taken, label, f"{samples}", ha="center", va="center", fontsize=8.5)
    axes.set(xlim=(-0.5, count - 0.5), ylim=(count - 0.5, -0.5), aspect="equal", xlabel="prediction", ylabel="label")
    axes.set_xticks(range(count))
    axes.set_yticks(range(count))
    axes.tick_params(length=0)
    axes.grid(False)
    axes.spines[:].set_visible(False)


def grey(record: Record, mistake: dict):
    """Return the image as uint8 [height, width]."""
    import numpy

    return numpy.frombuffer(mistake["pixels"], dtype=numpy.uint8).reshape(record.shape)


def png(record: Record, mistake: dict) -> bytes:
    """Return the image as a PNG file."""
    from matplotlib.image import imsave

    file = io.BytesIO()
    imsave(file, grey(record, mistake), cmap="gray", vmin=0, vmax=255, format="png")
    return file.getvalue()


def montage(figure, record: Record) -> None:
    """The worst mistakes side by side."""
    rows = -(-len(record.mistakes) // COLUMNS)
    for axes in figure.subplots(rows, COLUMNS, squeeze=False).flat:
        axes.axis("off")
    for axes, mistake in zip(figure.axes, record.mistakes, strict=False):
        axes.imshow(grey(record, mistake), cmap="gray", vmin=0, vmax=255)
        axes.set_title(f"{mistake['label']} → {mistake['predicted']}", fontsize=8)
