"""The style of all plots. Imports matplotlib only when it draws."""

import io
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from hvdtrain.engines.errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's palette, which is safe for colour-blind readers (jfly.uni-koeln.de/color).
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = "osD^vP"
DASHES = ("-", "--", "-.", ":")

WIDTH, HEIGHT = 3.35, 2.2  # inches of one plot
DPI = 200
STYLE: Any = {
    "font.size": 7.5, "axes.titlesize": 7.5, "axes.linewidth": 0.5, "lines.linewidth": 1.0,
    "lines.markersize": 3.2, "axes.grid": True, "grid.alpha": 0.3, "axes.axisbelow": True,
    "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False,
    "text.parse_math": False,  # a name may hold dollar signs
}  # fmt: skip

Draw = Callable[["Axes"], None]


def require_matplotlib() -> None:
    """Raise UserError if matplotlib is not installed."""
    if find_spec("matplotlib") is None:
        raise UserError("the report needs matplotlib: pip install 'hvdtrain[plot]'")


def printable(value: object) -> str:
    """Return `value` as text, with question marks for control characters."""
    return "".join(c if c.isprintable() else "?" for c in str(value))


def look(place: int) -> dict[str, Any]:
    """Return colour, dashes and marker of the curve at `place`. The next six have the same colours and other dashes."""
    dashes = DASHES[(place + place // len(COLOURS)) % len(DASHES)]
    return dict(color=COLOURS[place % len(COLOURS)], linestyle=dashes, marker=MARKERS[place % len(MARKERS)])


def png(draws: Sequence[Draw], height: float = HEIGHT) -> bytes:
    """Return the plots side by side, with one legend below, as a PNG file."""
    import matplotlib
    from matplotlib.figure import Figure  # not pyplot, which would search for a window system

    written = io.BytesIO()
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH * len(draws), height), layout="constrained", dpi=DPI)
        for draw, axes in zip(draws, figure.subplots(1, len(draws), squeeze=False)[0], strict=True):
            draw(axes)
        curves: dict[str, Any] = {}
        for axes in figure.axes:
            curves |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
        if len(curves) > 1:
            columns = max(1, int(figure.get_figwidth() / (0.36 + 0.055 * max(map(len, curves)))))  # inches of an entry
            figure.legend([*curves.values()], [*curves], loc="outside lower center", ncols=columns, handlelength=2.4)
            figure.set_figheight(height + 0.14 * -(-len(curves) // columns))
        figure.savefig(written, format="png")
    return written.getvalue()
