"""The style of all plots, for the screen and for papers. Imports matplotlib only when it draws."""

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdtrain.engines import files
from hvdtrain.engines.errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, which is safe for colour-blind readers (jfly.uni-koeln.de/color).
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = "osD^vP"
# Lines also differ in their dashes, for greyscale prints.
DASHES: Any = ("-", (0, (5, 1.5)), (0, (2, 1.2)), (0, (7, 2, 1.5, 2)), (0, (10, 2)), (0, (4, 1, 1, 1, 1, 1)))

FORMATS = ("svg", "pdf")  # for papers
COLUMN = 3.35  # inches: 85 mm, one column of a paper with two
HEIGHT = 2.2
# matplotlib's settings for a figure of that width, printed without scaling. Text remains text, as publishers require: SVG
# has text elements, PDF has TrueType fonts.
STYLE: Any = {
    "font.size": 7.5, "axes.titlesize": 7.5, "figure.titlesize": 7, "legend.fontsize": 7, "xtick.labelsize": 7,
    "ytick.labelsize": 7, "axes.linewidth": 0.5, "grid.linewidth": 0.4, "lines.linewidth": 1.0, "lines.markersize": 3.2,
    "errorbar.capsize": 1.5, "axes.grid": True, "grid.alpha": 0.3, "axes.axisbelow": True, "axes.spines.top": False,
    "axes.spines.right": False, "legend.frameon": False, "svg.fonttype": "none", "pdf.fonttype": 42,
    "text.parse_math": False,  # a name may hold dollar signs
}  # fmt: skip

Draw = Callable[["Axes"], None]


def require_matplotlib(otherwise: str = ", or leave out --output-dir") -> None:
    """Raise UserError if matplotlib is not installed, so that this is known before measuring."""
    if find_spec("matplotlib") is None:
        raise UserError(f"the picture needs matplotlib: pip install 'hvdtrain[plot]'{otherwise}")


def printable(value: object) -> str:
    """Return `value` as text, with question marks for control characters."""
    return "".join(c if c.isprintable() else "?" for c in str(value))


def look(place: int) -> dict[str, Any]:
    """Return colour, dashes and marker of the curve at `place`."""
    around = place // len(COLOURS)
    return dict(
        color=COLOURS[place % len(COLOURS)],
        linestyle=DASHES[(place + around) % len(DASHES)],
        marker=MARKERS[place % len(MARKERS)],
    )


def figure_of(draws: Sequence[Draw], height: float = HEIGHT, title: str = "") -> "Figure":
    """Return a figure with the plots side by side, each one column wide, with one legend below."""
    import matplotlib
    from matplotlib.figure import Figure  # not pyplot, which would search for a window system

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(COLUMN * len(draws), height), layout="constrained")
        for draw, axes in zip(draws, figure.subplots(1, len(draws), squeeze=False)[0], strict=True):
            draw(axes)
        figure.suptitle(title)
        curves: dict[str, Any] = {}
        for axes in figure.axes:
            curves |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
        if len(curves) > 1:
            # Inches of one entry: the line, and text at 7 points.
            wide = 0.36 + 0.055 * max(map(len, curves))
            columns = max(1, min(len(curves), int(figure.get_figwidth() / wide)))
            figure.legend([*curves.values()], [*curves], loc="outside lower center", ncols=columns, handlelength=2.4)
            figure.set_figheight(height + 0.14 * -(-len(curves) // columns))
    return figure


def save(figure: "Figure", path: Path, title: str = "") -> None:
    """Write `figure` to `path` atomically, as PNG, SVG or PDF according to its suffix.

    The same figure gives the same bytes: files contain no date and no random id.
    """
    import matplotlib

    kind = path.suffix[1:]
    metadata = {
        "svg": {"Date": None, "Title": printable(title)},
        "pdf": {"CreationDate": None, "Title": printable(title)},
    }.get(kind)
    with matplotlib.rc_context(STYLE | {"svg.hashsalt": path.stem}), files.replacing(path, "wb") as file:
        figure.savefig(file, format=kind, dpi=200, metadata=metadata)


def write(path: Path, title: str, draws: Sequence[Draw], height: float = HEIGHT) -> list[Path]:
    """Write the plots, side by side, as PNG to `path`, and beside it as SVG and PDF; return the paths."""
    figure = figure_of(draws, height, title)
    paths = [path, *(path.with_suffix(f".{kind}") for kind in FORMATS)]
    for each in paths:
        save(figure, each, title)
    return paths


def bytes_text(size: float) -> str:
    """Return 65536 as "64 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{size:.4g} {unit}"
