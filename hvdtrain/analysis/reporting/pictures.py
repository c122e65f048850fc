"""The plots of a report, each as a PNG file and as SVG inside the page, with the page's colours and fonts."""

import io
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from hvdtrain.analysis import plotting
from hvdtrain.analysis.reporting import curves
from hvdtrain.analysis.reporting.reading import Record
from hvdtrain.analysis.reporting.runs import Run, time_shares

# Letters, lines, letters on bars; replaced by the page's own in the SVG.
INK, FAINT, ON = "#24292f", "#d8dee4", "#fefefe"
PHASES = {"loading": "#E69F00", "compute": "#0072B2", "communication": "#D55E00", "other": "#8c959f"}
LETTERS_ON = {"loading": "#1a1a1a", "compute": ON, "communication": ON, "other": ON}
# On the page: a variable of its style sheet, which has another value in the dark.
VARIABLES = {INK: "--ink", FAINT: "--line", "#8c959f": "--grey", "#ffffff": "--paper", ON: "--on"} | {
    colour: f"--c{place}" for place, colour in enumerate(plotting.COLOURS)
}
SIZE = (4.0, 2.8)  # inches: letters of 9 points can still be read at a phone's width
MOST_RANKS = 16  # bars of one run
COLUMNS = 8  # of the picture of mistakes
# The first of these that a run has is drawn.
RATES = {"samples_per_second": "samples per second, over all ranks", "steps_per_second": "steps per second"}
LETTERS: Any = {
    "font.size": 9, "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": INK, "xtick.color": INK,
    "ytick.color": INK, "grid.color": FAINT, "axes.grid": True, "axes.axisbelow": True, "axes.spines.top": False,
    "axes.spines.right": False, "axes.linewidth": 0.6, "legend.frameon": False, "svg.fonttype": "none",
    "text.parse_math": False,  # a directory's name may hold dollar signs
}  # fmt: skip


@dataclass(frozen=True)
class Picture:
    """A title, what to see in it, and its SVG. part: of the page, "learning", "time" or ""."""

    name: str
    title: str
    see: str
    svg: str
    part: str = ""


def draw_all(runs: Sequence[Run], directory: Path) -> Iterator[Picture]:
    """Draw what the runs have to show; write each picture to `directory`, and yield it for the page."""
    import matplotlib

    def finished(name: str, title: str, see: str, draw: Callable[..., None], *what: Any, part="", size=SIZE) -> Picture:
        return Picture(name, title, see, finish(directory, name, title, see, draw, *what, size=size), part)

    counted = "samples" if all(run.counts_samples for run in runs) else "steps"
    with matplotlib.rc_context(LETTERS):
        taken: set[str] = set()
        for name in curves.names_to_draw(runs)[0]:
            see, file = curves.see(runs, name), file_name(name, taken)
            for axis in (counted, "seconds"):
                title = f"{curves.titled(name)} over {axis}"
                yield finished(f"{file}-over-{axis}", title, see, curves.curves, runs, name, axis, part="learning")
        if any(time_shares(run) for run in runs):
            bars = sum(min(len(time_shares(run)), MOST_RANKS) for run in runs)
            size, see = (SIZE[0], max(1.5, 0.9 + 0.34 * bars)), "share of the time spent training"
            yield finished("time-shares", "Time by phase", see, shares, runs, part="time", size=size)
        for rate, see in RATES.items():
            if any(curves.rates(run, rate) for run in runs):
                yield finished("throughput", "Throughput", see, curves.throughput, runs, rate, counted, part="time")
                break
        for place, run in enumerate(runs, 1):
            if run.record is not None and len(run.record.confusion) <= 30:
                see = "samples by label and prediction; blue: right"
                yield finished(f"confusion-{place}", "Confusion", see, confusion, run.record, size=(SIZE[0], SIZE[0]))
            if run.record is not None and run.record.mistakes:
                finished(f"mistakes-{place}", "", "", montage, run.record,
                         size=(SIZE[0] * 1.6, 0.95 * -(-len(run.record.mistakes) // COLUMNS)))  # fmt: skip


def file_name(name: str, taken: set[str]) -> str:
    """Return what a value's pictures are called: letters and digits, and no name twice."""
    word = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40] or "value"
    found, number = word, 1
    while found in taken:
        number += 1
        found = f"{word}-{number}"
    taken.add(found)
    return found


def finish(directory: Path, name: str, title: str, see: str, draw: Callable[..., None], *what: Any, size) -> str:
    """Draw on a figure of its own, write it as PNG, and return its SVG for the page."""
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    draw(figure, *what)
    text = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):  # marks and clips of two pictures must not share their ids
        figure.savefig(text, format="svg", transparent=True)
    figure.suptitle(f"{title} ({see})" if title else "", fontsize=9)
    plotting.save(figure, directory / f"{name}.png")
    return for_page(text.getvalue(), f"{title}: {see}")


def for_page(svg: str, said: str) -> str:
    """Return an SVG for inside a page: its own head cut off, colours and letters those of the page."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<style type=.*?</style>|<!--.*?-->", "", svg, flags=re.S)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    box = re.match(r'<svg [^>]*?viewBox="([^"]*)"[^>]*>', svg, flags=re.S)
    assert box is not None
    svg = f'<svg viewBox="{box[1]}" role="img" aria-label="{escape(said)}">{svg[box.end() :]}'
    svg = re.sub(r"'DejaVu Sans'[^;\"]*", "system-ui, sans-serif", svg)
    for colour, variable in VARIABLES.items():
        svg = re.sub(rf"(?<=[ :\"]){colour}\b", f"var({variable})", svg, flags=re.I)
    return svg


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
            names.append(f"{curves.short(run.name)}, {rank}" if len(runs) > 1 else rank)
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
