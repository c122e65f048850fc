"""What all plots share: one style, and matplotlib imported only when needed."""

from importlib.util import find_spec
from pathlib import Path

from hvdtrain.engines.errors import UserError
from hvdtrain.training.records import files

# Okabe and Ito's colours, which people with any colour vision can tell apart (jfly.uni-koeln.de/color).
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = "osD^vP"


def require_matplotlib(otherwise: str = ", or leave out --output-dir") -> None:
    """Raise UserError where there is no matplotlib: before anything is measured, not after."""
    if find_spec("matplotlib") is None:
        raise UserError(f"the picture needs matplotlib: pip install 'hvdtrain[plot]'{otherwise}")


def panels(titles: list[str], *, width: float = 5.5, height: float = 4.2):
    """Return a matplotlib figure and one axes per title, side by side. Nothing is shown on a screen."""
    from matplotlib.figure import Figure  # not pyplot: no window system is looked for

    figure = Figure(figsize=(width * len(titles), height), layout="constrained")
    axes = figure.subplots(1, len(titles), squeeze=False)[0]
    for axis, title in zip(axes, titles, strict=True):
        axis.set_title(title, fontsize=11)
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    return figure, list(axes)


def byte_axis(axes, sizes: list[int]) -> None:
    """Make x a logarithmic axis of bytes, marked 4 B, 64 B, 1 KiB, ..."""
    powers = [power for power in range(0, 64, 4) if min(sizes) <= 2 ** (power + 2) <= max(sizes)]
    ticks = [2 ** (power + 2) for power in powers]
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [bytes_text(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("size")


def bytes_text(size: float) -> str:
    """Return 65536 as "64 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{size:.4g} {unit}"


def save(figure, path: Path) -> None:
    """Write `figure` as PNG, under its name only when it is complete."""
    with files.replacing(path, "wb") as file:
        figure.savefig(file, format="png", dpi=110)
