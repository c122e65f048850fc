"""Draws the plots of a report: PNG files, SVG in the page's colours and fonts, and one-column SVG and PDF for papers."""

import io
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from hvdtrain.analysis import plotting
from hvdtrain.analysis.reporting import curves, seeds
from hvdtrain.analysis.reporting.reading import Record
from hvdtrain.analysis.reporting.runs import time_shares
from hvdtrain.analysis.reporting.seeds import Group

# Colours of text, of lines and of text on bars; replaced by the page's own in the SVG.
INK, FAINT, ON = "#24292f", "#d8dee4", "#fefefe"
PHASES = {"loading": "#E69F00", "compute": "#0072B2", "communication": "#D55E00", "other": "#8c959f"}
LETTERS_ON = {"loading": "#1a1a1a", "compute": ON, "communication": ON, "other": ON}
# Colours and the style sheet's variables that replace them on the page; these have other values in dark mode.
VARIABLES = {INK: "--ink", FAINT: "--line", "#8c959f": "--grey", "#ffffff": "--paper", ON: "--on"} | {
    colour: f"--c{place}" for place, colour in enumerate(plotting.COLOURS)
}
SIZE = (4.0, 2.8)  # inches: text at 9 points is still legible on a phone
LETTERS_IN_TITLE = 58  # at 9 points, in the width of a PNG
MOST_RANKS = 16  # bars per run
MOST_RESULTS = 4  # results drawn over seeds
COLUMNS = 8  # of the picture of mistakes
# The first one that a run has is drawn.
RATES = {"samples_per_second": "samples per second, over all ranks", "steps_per_second": "steps per second"}
UNITS = {"samples_per_second": "samples/s, all ranks", "steps_per_second": "steps/s"}
HATCHES = {
    "loading": "",
    "compute": "",
    "communication": "////",
    "other": "....",
}  # for greyscale prints
LETTERS: Any = {
    "font.size": 9, "legend.fontsize": 8, "axes.titlesize": 8, "hatch.linewidth": 0.6, "lines.linewidth": 1.5,
    "errorbar.capsize": 1.5, "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": INK, "xtick.color": INK,
    "ytick.color": INK, "grid.color": FAINT, "axes.grid": True, "axes.axisbelow": True, "axes.spines.top": False,
    "axes.spines.right": False, "axes.linewidth": 0.6, "legend.frameon": False, "svg.fonttype": "none",
    "text.parse_math": False,  # a directory's name may hold dollar signs
}  # fmt: skip


@dataclass(frozen=True)
class Picture:
    """A plot for the page. see: caption. part: section of the page, "learning", "time" or ""."""

    name: str
    title: str
    see: str
    svg: str
    part: str = ""


def draw_all(groups: Sequence[Group], directory: Path, formats: Sequence[str] = ()) -> Iterator[Picture]:
    """Draw all pictures of the runs, write each to `directory`, and yield it for the page.

    formats: also write the pictures for papers in each of these `plotting.FORMATS`.
    """
    import matplotlib

    def finished(
        name: str, title: str, see: str, draw: Callable[..., None], *what: Any, part="", size=SIZE, unit=""
    ) -> Picture:
        for_paper(
            directory,
            formats,
            name,
            f"{title} ({see})" if title else "Worst mistakes",
            draw,
            *what,
            size=size,
            unit=unit,
        )
        with matplotlib.rc_context(LETTERS):
            return Picture(name, title, see, finish(directory, name, title, see, draw, *what, size=size), part)

    runs = [run for group in groups for run in group.runs]
    folded = any(group.folded for group in groups)
    counted = "samples" if all(run.counts_samples for run in runs) else "steps"
    taken: set[str] = set()
    names = curves.names_to_draw(runs)[0]
    for name in names:
        see, file = curves.see(runs, name) + "; band, bars: s.d. over seeds" * folded, file_name(name, taken)
        for axis in (counted, "seconds"):
            title = f"{curves.titled(name)} over {axis}"
            yield finished(f"{file}-over-{axis}", title, see, curves.curves, groups, name, axis, part="learning",
                           unit=name.replace("_", " "))  # fmt: skip
    for label, found, percent in compared(groups) if folded else ():
        size, see = (SIZE[0], 0.8 + 0.4 * len(groups)), "mean over seeds with its 95 % interval; hollow: each seed"
        yield finished(file_name(f"seeds {label}", taken), curves.titled(label), see, curves.over_seeds, groups, found,
                       percent, part="learning", size=size)  # fmt: skip
    if any(time_shares(run) for run in runs):
        bars = sum(1 if group.folded else min(len(time_shares(group.runs[0])), MOST_RANKS) for group in groups)
        size = (SIZE[0], max(1.5, 0.9 + 0.34 * bars))
        see = "share of the time spent training" + "; of seeds over all ranks, bars: s.d." * folded
        yield finished("time-shares", "Time by phase", see, shares, groups, part="time", size=size)
    for rate, see in RATES.items():
        if any(curves.rates(run, rate) for run in runs):
            yield finished("throughput", "Throughput", see, curves.throughput, groups, rate, counted, part="time",
                           unit=UNITS[rate])  # fmt: skip
            break
    for place, run in enumerate(runs, 1):
        if run.record is not None and len(run.record.confusion) <= 30:
            see = "samples by label and prediction; blue: right"
            yield finished(f"confusion-{place}", "Confusion", see, confusion, run.record, size=(SIZE[0], SIZE[0]))
        if run.record is not None and run.record.mistakes:
            finished(f"mistakes-{place}", "", "", montage, run.record,
                     size=(SIZE[0] * 1.6, 0.95 * -(-len(run.record.mistakes) // COLUMNS)))  # fmt: skip


def compared(groups: Sequence[Group]) -> list[tuple[str, list[seeds.Figure], bool]]:
    """Return the results that all groups have: name, figures by group, and whether it is a percentage."""
    by_group = [{f.label: f for f in seeds.figures(group, lambda value, result: f"{value:g}")} for group in groups]
    found = []
    for label, figure in by_group[0].items():
        if figure.result is not None and all(label in each for each in by_group):
            metric = figure.result.metric
            found.append((label, [each[label] for each in by_group], metric is not None and metric.percent))
    return found[:MOST_RESULTS]


def file_name(name: str, taken: set[str]) -> str:
    """Return a unique file name of letters, digits and hyphens for `name`, and add it to `taken`."""
    word = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40] or "value"
    found, number = word, 1
    while found in taken:
        number += 1
        found = f"{word}-{number}"
    taken.add(found)
    return found


def for_paper(
    directory: Path,
    formats: Sequence[str],
    name: str,
    title: str,
    draw: Callable[..., None],
    *what: Any,
    size,
    unit: str,
) -> None:
    """Write a picture for a paper: one column wide, with a unit at its y axis, without a title (a paper has captions)."""
    import matplotlib
    from matplotlib.figure import Figure

    if not formats:
        return
    with matplotlib.rc_context(LETTERS | plotting.PAPER):
        figure = Figure(figsize=(plotting.COLUMN, size[1] * plotting.COLUMN / size[0]), layout="constrained")
        draw(figure, *what)
        if unit:
            figure.axes[0].set_ylabel(curves.short(unit))
        for legend in figure.legends[:]:
            legend.remove()
        if len(figure.axes[0].get_legend_handles_labels()[1]) > 1:
            rows = plotting.legend_below(figure)
            figure.set_size_inches(plotting.COLUMN, figure.get_figheight() + 0.14 * (rows - 1))
        for kind in formats:
            plotting.save(figure, directory / f"{name}.{kind}", title)


def finish(directory: Path, name: str, title: str, see: str, draw: Callable[..., None], *what: Any, size) -> str:
    """Draw on a new figure, write it as PNG, and return its SVG for the page."""
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    draw(figure, *what)
    text = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):  # ids of markers and clips must differ between pictures
        figure.savefig(text, format="svg", transparent=True)
    figure.suptitle(textwrap.fill(f"{title} ({see})", LETTERS_IN_TITLE) if title else "", fontsize=9)
    plotting.save(figure, directory / f"{name}.png")
    return for_page(text.getvalue(), f"{title}: {see}")


def for_page(svg: str, said: str) -> str:
    """Return an SVG to embed in the page, without its head, in the colours and fonts of the page."""
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


def shares(figure, groups: Sequence[Group]) -> None:
    """Draw one bar per run and rank, from 0 to 100 %; for several seeds, one bar over all ranks."""
    axes = figure.subplots()
    bars: list[tuple[str, dict[str, seeds.Share]]] = []
    for group in groups:
        if group.folded:
            bars.append((curves.short(group.name), seeds.shares(group)))
            continue
        for rank, share in time_shares(group.runs[0])[:MOST_RANKS]:
            label = f"{curves.short(group.name)}, {rank}" if len(groups) > 1 else rank
            bars.append((label, {phase: seeds.Share(part, None) for phase, part in share.items()}))
    known: list[str] = []
    for place, (_, phases) in enumerate(bars):
        left = 0.0
        for phase, (part, spread) in phases.items():
            new = phase not in known
            known += [phase] * new
            axes.barh(place, part, left=left, height=0.62, color=PHASES[phase], label=phase if new else None,
                      hatch=HATCHES[phase], edgecolor=ON, linewidth=0)  # fmt: skip
            left += part
            if spread is not None:
                axes.errorbar([left], [place + 0.2], xerr=[spread], color=INK, elinewidth=0.8, capsize=1.5)
            if part >= 0.09:
                axes.text(left - part / 2, place, f"{part:.0%}", ha="center", va="center", color=LETTERS_ON[phase],
                          bbox=dict(facecolor=PHASES[phase], edgecolor="none", pad=1))  # fmt: skip
    axes.set_yticks(range(len(bars)), [name for name, _ in bars])
    axes.invert_yaxis()
    axes.grid(False)
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
    axes.set_xlabel("share of the time")
    axes.spines["left"].set_visible(False)
    axes.tick_params(left=False)
    figure.legend(loc="outside lower left", ncols=4, handlelength=1, handleheight=1)


def confusion(figure, record: Record) -> None:
    """Draw the confusion matrix. Correct answers are tinted by their share of the class, wrong ones more strongly."""
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
                axes.text(taken, label, f"{samples}", ha="center", va="center")
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
    """Draw the worst mistakes side by side."""
    rows = -(-len(record.mistakes) // COLUMNS)
    for axes in figure.subplots(rows, COLUMNS, squeeze=False).flat:
        axes.axis("off")
    for axes, mistake in zip(figure.axes, record.mistakes, strict=False):
        axes.imshow(grey(record, mistake), cmap="gray", vmin=0, vmax=255)
        axes.set_title(f"{mistake['label']} → {mistake['predicted']}")
