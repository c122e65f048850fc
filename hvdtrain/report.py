"""Write one page with plots from the output directories of runs: metrics, time by phase, differences between runs.

python -m hvdtrain.report out                                    one run
python -m hvdtrain.report out-1 out-2 --output-dir runs/report   several runs, compared; differences first

DIR is the --output-dir of a run of hvdtrain.mnist, hvdtrain.imagenet or your own program, with any metrics. The run may
still be running, or have been killed. The page (report.html) needs no network and no other file. It shows the state at the
time of the command: repeat the command to update it.
"""

import base64
import io
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from html import escape
from importlib.util import find_spec
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdtrain import cli
from hvdtrain.engines import atomic, files
from hvdtrain.engines.errors import UserError
from hvdtrain.engines.launchers import announced
from hvdtrain.engines.lines import say
from hvdtrain.flags import Flags
from hvdtrain.launching import exit_codes
from hvdtrain.output.metric_names import Series, finite_or_not
from hvdtrain.output.recorded_runs import (
    RATE,
    TRAIN,
    CurvePoint,
    RecordedRun,
    differing,
    read_runs,
    results,
    time_shares,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# The browser fetches and runs nothing, whatever the names in a run contain.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
STYLE_SHEET = """
:root { color-scheme: light dark; }
body { max-width: 68rem; margin: auto; padding: 2rem 1rem; font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
figure { margin: 0 0 1.5rem; overflow-x: auto; }
img { display: block; max-width: 100%; background: #ffffff; }
table { border-collapse: collapse; font-size: 0.9rem; font-variant-numeric: tabular-nums; }
th, td { padding: 0.4rem 0.9rem 0.4rem 0; text-align: left; vertical-align: top; border-bottom: 1px solid #80808055; }
.notes { padding: 0.1rem 1rem; background: #ffcc0033; }
"""
MOST_VALUES = 12  # limit for drawn values
MOST_DRAWN_RANKS = 16  # bars per run
PHASE_COLORS = {"loading": "#E69F00", "compute": "#0072B2", "communication": "#D55E00", "other": "#8c959f"}
DATA = {"test": "test set", "validation": "validation set", "val": "validation set", "": "evaluations"}
MARKER_NAMES = {"o": "dots", "^": "triangles", "s": "squares"}  # of the first data sets that a value was evaluated on
# Okabe and Ito's palette, which is safe for colour-blind readers (jfly.uni-koeln.de/color).
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
DASHES = ("-", "--", "-.", ":")
WIDTH, HEIGHT, DPI = 3.35, 2.2, 200  # inches of one plot
PLOT_STYLE: Any = {
    "font.size": 7.5, "axes.titlesize": 7.5, "axes.linewidth": 0.5, "lines.linewidth": 1.0,
    "lines.markersize": 3.2, "axes.grid": True, "grid.alpha": 0.3, "axes.axisbelow": True,
    "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False,
    "text.parse_math": False, "text.usetex": False,  # a name may hold dollar signs, and LaTeX be missing
}  # fmt: skip
Draw = Callable[["Axes"], None]


def parse(argv: Sequence[str] | None = None) -> Flags:
    """Return the parsed command line. Raises UserError on bad input."""
    parser = cli.Parser("hvdtrain.report", __doc__)
    parser.add_argument("directories", nargs="+", type=Path, metavar="DIR", help="--output-dir of a run")
    default = Path("runs/report")
    parser.add_argument("--output-dir", type=cli.path, default=default, help="for the page (default: runs/report)")
    return parser.parse_args(argv)


# ---- the page: `escaped` escapes every text from a run


def printable(value: object) -> str:
    """Return `value` as text, with question marks for control characters."""
    return "".join(c if c.isprintable() else "?" for c in str(value))


def escaped(value: object) -> str:
    """Return `value` escaped, for use as text or in a quoted attribute."""
    return escape(printable(value))


def build(runs: Sequence[RecordedRun], drawn: Iterable[tuple[str, bytes]]) -> str:
    """Return the page as HTML: the results, the plots (titles and PNG files), the configuration of the runs."""
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    data = dict.fromkeys(str(run.start.get("reason") or run.start.get("dataset") or "?") for run in runs)
    notes = [f"{run.name}: {note}" if len(runs) > 1 else note for run in runs for note in run.notes]
    if left := names_to_draw(runs)[MOST_VALUES:]:
        notes.append(f"not drawn, as the record has more than {MOST_VALUES} values: {', '.join(left)}")
    shown = "".join(
        f'<figure><figcaption>{escaped(name)}</figcaption><img alt="{escaped(name)}" src="data:image/png;base64,'
        f'{base64.b64encode(png).decode()}"></figure>\n'
        for name, png in drawn
    )
    config = {name: [run.config.get(name, "-") for run in runs] for run in runs for name in run.config}
    first = differing(runs) if len(runs) > 1 else ["ranks", "engine"]
    results_of = [figures(run) for run in runs]
    rows = {name: config[name] for name in first}
    rows |= {
        label: [each.get(label, "-") for each in results_of]
        for label in dict.fromkeys(label for each in results_of for label in each)
    }
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{escaped(title)} · hvdtrain</title>\n'
        f'<link rel="icon" href="data:,">\n<style>\n{STYLE_SHEET}</style>\n</head>\n<body>\n'
        f"<h1>{escaped(title)}</h1><p>{escaped('; '.join(data))}</p>\n{html_table(runs, rows)}\n"
        + (f'<div class="notes">{"".join(f"<p>{escaped(note)}</p>" for note in notes)}</div>\n' if notes else "")
        + f"{shown}<details><summary>Configuration</summary>{html_table(runs, config)}</details>\n"
        f"<p>Made by hvdtrain.report, {time.strftime('%Y-%m-%d %H:%M:%S')}.</p>\n</body>\n</html>\n"
    )


def html_table(runs: Sequence[RecordedRun], rows: Mapping[str, Sequence[str]]) -> str:
    """Return a table as HTML: a column for each run. rows: cells by name."""
    head = "".join(f"<th>{escaped(run.name)}</th>" for run in runs)
    body = "".join(
        f"<tr><th>{escaped(name.replace('_', '-'))}</th>{''.join(f'<td>{escaped(cell)}</td>' for cell in cells)}</tr>\n"
        for name, cells in rows.items()
    )
    return f"<figure><table><thead><tr><th></th>{head}</tr></thead><tbody>{body}</tbody></table></figure>"


def figures(run: RecordedRun) -> dict[str, str]:
    """Return the results by name; for a run that has not ended, the results so far."""
    found = results(run)
    spent = finite_or_not(run.summary.get("train_seconds"))
    wholes = [attempt.began + attempt.ran for attempt in run.attempts]  # of each process, from its start
    wholes[-1:] = [finite_or_not(run.summary.get("total_seconds")) or wholes[-1]]
    if spent is not None and isfinite(spent):
        found["training"] = f"{spent:,.1f} s"
    found["in all"] = f"{sum(wholes):,.1f} s"
    last = run.of_training()[-1].event if run.of_training() else {}
    for name, unit in ((RATE.name, "samples/s"), ("tokens_per_second", "tokens/s"), ("samples", "")):
        value = finite_or_not(run.summary.get(name, last.get(name)))
        if value is not None and isfinite(value):
            found[unit or name] = f"{value:,.0f}"
    found["state"] = run.state
    if again := len(run.attempts) - 1:
        found["state"] += f", {again} restart{'s'[: again > 1]}, from step {run.attempts[-1].step:,.0f}"
    return found


# ---- plots


def draw_all(runs: Sequence[RecordedRun]) -> Iterator[tuple[str, bytes]]:
    """Yield the plots of the runs with their titles: each value over samples and over seconds, then where the time goes."""
    for name in [*names_to_draw(runs)[:MOST_VALUES], RATE.name]:
        if any(points(run.moments, Series(TRAIN, name)) for run in runs) or evaluated_datasets(runs, name):
            both = [partial(draw_values, runs=runs, name=name, axis=axis) for axis in ("samples", "seconds")]
            yield caption(runs, name), png(both)
    bars = [(f"{shortened(run.name)}, rank {rank}", share) for run in runs
            for rank, share in enumerate(time_shares(run)[:MOST_DRAWN_RANKS])]  # fmt: skip
    if bars:
        drawn = png([partial(draw_shares, bars=bars)], 0.9 + 0.22 * len(bars))
        yield "Time by phase: share of the time spent training", drawn


def names_to_draw(runs: Sequence[RecordedRun]) -> list[str]:
    """Return the names of the values that were recorded: the loss first, then in the order of the scripts."""
    named = [name for run in runs for name in run.metrics]
    seen = dict.fromkeys(each.name for run in runs for moment in run.moments for each in moment.values)
    return [name for name in dict.fromkeys(["loss", *named, *seen]) if name in seen]


def caption(runs: Sequence[RecordedRun], name: str) -> str:
    """Return the title of a plot: its value, and what lines and markers are."""
    title = "samples per second, over all ranks" if name == RATE.name else shortened(name.replace("_", " "))
    parts = ["line: training"] if any(points(run.moments, Series(TRAIN, name)) for run in runs) else []
    data = [DATA.get(prefix, prefix) for prefix in evaluated_datasets(runs, name)]
    parts += [f"{kind}: {which}" for which, kind in zip(data, MARKER_NAMES.values(), strict=False)]
    parts += ["dashed: restart"] if any(len(run.attempts) > 1 for run in runs) else []
    return f"{title[:1].upper()}{title[1:]} ({', '.join(parts)})"


def points(moments: Sequence[CurvePoint], series: Series, axis: str = "samples") -> list[tuple[float, float]]:
    """Return where a value was recorded, and its finite values."""
    found = [
        (
            getattr(moment, axis),
            finite_or_not(moment.event.get(RATE.name)) if series == RATE else moment.values.get(series),
        )
        for moment in moments
    ]
    return [(at, value) for at, value in found if value is not None and isfinite(value)]


def evaluated_datasets(runs: Sequence[RecordedRun], name: str) -> list[str]:
    """Return the data sets on which the runs evaluated `name`."""
    found = [series for run in runs for moment in run.moments for series in moment.values]
    return list(dict.fromkeys(each.prefix for each in found if each.name == name and each.prefix != TRAIN))


def shortened(name: str) -> str:
    """Return `name`, shortened to fit a legend."""
    name = printable(name)
    return name if len(name) <= 28 else f"{name[:12]}…{name[-15:]}"


def look(place: int) -> dict[str, Any]:
    """Return colour and dashes of the curves at `place`. The next six have the same colours and other dashes."""
    dashes = DASHES[(place + place // len(COLOURS)) % len(DASHES)]
    return dict(color=COLOURS[place % len(COLOURS)], linestyle=dashes)


def draw_values(axes: "Axes", runs: Sequence[RecordedRun], name: str, axis: str) -> None:
    """Draw training as lines, evaluations as markers, and restarts as dashed vertical lines."""
    from matplotlib.ticker import EngFormatter, LogFormatter, PercentFormatter

    every: list[float] = []
    for place, run in enumerate(runs):
        label = shortened(run.name)
        # Over seconds, training has a curve for each attempt: with the steps that a kill has lost, and no line to the next.
        attempts = [attempt.trained for attempt in run.attempts] if axis == "seconds" else [run.moments]
        curves: list[tuple[list[CurvePoint], str, dict[str, Any]]]
        curves = [(moments, TRAIN, dict(linewidth=0.8)) for moments in attempts]
        curves += [
            (run.moments, prefix, dict(marker=marker, linestyle=(0, (1, 2))))
            for marker, prefix in zip(MARKER_NAMES, evaluated_datasets(runs, name), strict=False)
        ]
        for moments, prefix, style in curves:
            if drawn := points(moments, Series(prefix, name), axis):
                axes.plot(*zip(*drawn, strict=True), **look(place) | style, label=label)
                every, label = every + [value for _, value in drawn], ""
        for attempt in run.attempts[1:]:
            at = attempt.samples if axis == "samples" else attempt.before
            axes.axvline(at, color=look(place)["color"], linestyle=(0, (4, 3)), linewidth=0.9)
    metrics = [run.metric(Series(prefix, name)) for run in runs for prefix in ("", *evaluated_datasets(runs, name))]
    metric = next(filter(None, metrics), None)
    if metric is not None and metric.percent:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    elif (
        name != RATE.name
        and (metric is None or metric.direction == "min")
        and 0 < 8 * min(every, default=0) < max(every)
    ):
        axes.set_yscale("log")  # the first values would leave no room for the rest
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_minor_formatter(LogFormatter())  # the default writes mathematics, which PLOT_STYLE switches off
    axes.set(xlabel="time (s)" if axis == "seconds" else axis, ylabel=shortened(name.replace("_", " ")), xlim=(0, None))
    if axis == "samples":
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))


def draw_shares(axes: "Axes", bars: Sequence[tuple[str, dict[str, float]]]) -> None:
    """Draw one bar per run and rank, from 0 to 100 %."""
    from matplotlib.ticker import PercentFormatter

    left = [0.0] * len(bars)
    for phase, colour in PHASE_COLORS.items():
        shares = [share.get(phase, 0.0) for _, share in bars]
        drawn = axes.barh(range(len(bars)), shares, left=left, height=0.62, color=colour, label=phase)
        labels = [f"{share:.0%}" if share >= 0.09 else "" for share in shares]
        axes.bar_label(drawn, labels, label_type="center", color="white")
        left = [before + share for before, share in zip(left, shares, strict=True)]
    axes.set_yticks(range(len(bars)), [label for label, _ in bars])
    axes.invert_yaxis()
    axes.grid(False)
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))


def png(draws: Sequence[Draw], height: float = HEIGHT) -> bytes:
    """Return the plots side by side, with one legend below, as a PNG file."""
    os.environ.pop("MPLBACKEND", None)  # a notebook's may be unknown here, and plots are files
    import matplotlib
    from matplotlib.figure import Figure  # not pyplot, which would search for a window system

    written = io.BytesIO()
    with matplotlib.rc_context(PLOT_STYLE):
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


# ---- the command


def make_report(directories: Sequence[Path], output_dir: Path) -> Path:
    """Read the runs, write the page, and return its path. Raises UserError."""
    runs = read_runs(directories)
    whole = build(runs, draw_all(runs))
    path = output_dir / "report.html"
    with files.output_to(output_dir):
        output_dir.mkdir(parents=True, exist_ok=True)
        atomic.write_atomically(path, whole.encode(), sync=False)
    return path


def main() -> int:
    """Run the command. Return its exit code."""
    flags = parse()
    if announced().size > 1:
        raise UserError("hvdtrain.report reads what a run has left: start it without a launcher", everywhere=True)
    if find_spec("matplotlib") is None:
        raise UserError("the report needs matplotlib: pip install 'hvdtrain[plot]'")
    say(f"{make_report(flags.directories, flags.output_dir)}: open it in a browser")
    return 0


if __name__ == "__main__":
    exit_codes.run_command(main)
