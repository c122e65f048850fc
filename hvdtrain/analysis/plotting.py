"""The styles of all plots, for the screen and for papers. Imports matplotlib only when it draws."""

import textwrap
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from hvdtrain.engines import files
from hvdtrain.engines.errors import UserError

# Okabe and Ito's palette, which is safe for colour-blind readers (jfly.uni-koeln.de/color).
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = "osD^vP"
# Lines also differ in their dashes, for greyscale prints.
STYLES: Any = ("-", (0, (5, 1.5)), (0, (2, 1.2)), (0, (7, 2, 1.5, 2)), (0, (10, 2)), (0, (4, 1, 1, 1, 1, 1)))

FORMATS = ("svg", "pdf")  # for papers
COLUMN = 3.35  # inches: 85 mm, one column of a paper with two
# matplotlib's settings for a figure of that width, printed without scaling: fonts of 7 and 7.5 points.
PAPER: Any = {
    "font.size": 7.5, "axes.labelsize": 7.5, "axes.titlesize": 7.5, "figure.titlesize": 7, "legend.fontsize": 7,
    "xtick.labelsize": 7, "ytick.labelsize": 7, "axes.linewidth": 0.5, "grid.linewidth": 0.4, "xtick.major.width": 0.5,
    "ytick.major.width": 0.5, "xtick.major.size": 2.5, "ytick.major.size": 2.5, "lines.linewidth": 1.0,
    "lines.markersize": 3.2, "hatch.linewidth": 0.5,
}  # fmt: skip
COMMON: Any = {
    "axes.grid": True, "grid.alpha": 0.3, "axes.axisbelow": True, "axes.spines.top": False, "axes.spines.right": False,
    "legend.frameon": False, "errorbar.capsize": 2.0,
    "text.parse_math": False,  # a name may hold dollar signs
}  # fmt: skip
LETTERS_IN_COLUMN = 66  # at 7 points


class Panel(NamedTuple):
    """One plot of a picture.

    draw: called with matplotlib's axes. notes: shown above the plot. height: in inches, in a paper's column, without legend
    and notes.
    """

    name: str  # suffix of its file name
    title: str
    draw: Callable[[Any], None]
    notes: tuple[str, ...] = ()
    height: float = 2.1


def require_matplotlib(otherwise: str = ", or leave out --output-dir") -> None:
    """Raise UserError if matplotlib is not installed, so that this is known before measuring."""
    if find_spec("matplotlib") is None:
        raise UserError(f"the picture needs matplotlib: pip install 'hvdtrain[plot]'{otherwise}")


def write(path: Path, about: str, panels: Sequence[Panel], *, width: float = 5.5, height: float = 4.2) -> list[Path]:
    """Write the panels side by side to `path`, a PNG, and each as SVG and PDF, one column wide; return the paths.

    width, height: of one panel in the PNG, in inches. Notes are on all of them; SVG and PDF have no title.
    """
    import matplotlib
    from matplotlib.figure import Figure  # not pyplot, which would search for a window system

    notes = list(dict.fromkeys(note for panel in panels for note in panel.notes))
    with matplotlib.rc_context(COMMON):
        figure = Figure(figsize=(width * len(panels), height), layout="constrained")
        for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            panel.draw(axes)
            axes.set_title(panel.title, fontsize=11)
            if axes.get_legend_handles_labels()[1]:
                axes.legend()
        figure.suptitle("\n".join(filter(None, [about, *notes])), fontsize=10)
        save(figure, path, about)
    written = [path]
    for panel in panels:
        figure = column(panel)
        for kind in FORMATS:
            stem = f"{path.stem}-{panel.name}" if panel.name else path.stem
            written.append(path.with_name(f"{stem}.{kind}"))
            save(figure, written[-1], "; ".join(filter(None, [panel.title, about])))
    return written


def column(panel: Panel):
    """Return a figure one column wide, with the notes, but without a title, which belongs in a paper's caption."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(COMMON | PAPER):
        figure = Figure(figsize=(COLUMN, panel.height), layout="constrained")
        axes = figure.subplots()
        panel.draw(axes)
        rows = legend_below(figure)
        lines = [line for note in panel.notes for line in textwrap.wrap(note, LETTERS_IN_COLUMN)]
        if lines:
            figure.suptitle("\n".join(lines))
        figure.set_size_inches(COLUMN, panel.height + 0.14 * (rows + len(lines)))
    return figure


def legend_below(figure) -> int:
    """Put the legend of the first axes below the figure, in as many columns as fit, and return its number of rows."""
    handles, labels = figure.axes[0].get_legend_handles_labels()
    if not labels:
        return 0
    wide = 0.36 + 0.055 * max(map(len, labels))  # inches of one entry: the line, and text at 7 points
    columns = max(1, min(len(labels), int(COLUMN / wide)))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, handlelength=2.4, columnspacing=1.0)
    return -(-len(labels) // columns)


def above_one(ranges: Sequence[tuple[float, float]], what: str = "rounds") -> tuple[str, ...]:
    """Return a note that explains shares above 1; () if there are none. ranges: minimum and maximum of each share."""
    above = [(least, most) for least, most in ranges if most > 1]
    if not above:
        return ()
    if all(least <= 1 for least, _ in above):
        return (f"above 1: within the spread of the {what}; the bound itself was measured at another moment",)
    return (f"above 1: the bound was slower in all {what}, so it is not a bound here (noise, or other work)",)


def byte_axis(axes, sizes: list[int]) -> None:
    """Make x a logarithmic axis of bytes, marked 4 B, 64 B, 1 KiB, ..."""
    powers = [power for power in range(0, 64, 4) if min(sizes) <= 2 ** (power + 2) <= max(sizes)]
    ticks = [2 ** (power + 2) for power in powers]
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [bytes_text(tick).replace(" ", "\n") for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("size of the message")


def bytes_text(size: float) -> str:
    """Return 65536 as "64 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{size:.4g} {unit}"


def save(figure, path: Path, title: str = "") -> None:
    """Write `figure` to `path` atomically, as PNG, SVG or PDF according to its suffix.

    The same figure gives the same bytes: files contain no date and no random id. Text remains text: SVG has text elements,
    PDF has TrueType fonts, as publishers require.
    """
    import matplotlib

    kind = path.suffix[1:]
    title = "".join(c if c.isprintable() else "?" for c in title)
    metadata = {"svg": {"Date": None, "Title": title}, "pdf": {"CreationDate": None, "Title": title}}.get(kind)
    settings: Any = {"svg.hashsalt": path.stem, "svg.fonttype": "none", "pdf.fonttype": 42}
    with matplotlib.rc_context(settings), files.replacing(path, "wb") as file:
        figure.savefig(file, format=kind, dpi=110, metadata=metadata)
