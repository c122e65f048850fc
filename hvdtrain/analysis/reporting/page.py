"""Writes the page: one self-contained HTML file without scripts. `text` escapes every text from a run."""

import base64
import itertools
import time
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from math import isfinite, isnan
from typing import NamedTuple

from hvdtrain.analysis import plotting
from hvdtrain.analysis.reporting.pictures import MOST_VALUES, Picture, names_to_draw
from hvdtrain.analysis.reporting.runs import RecordedRun, Result, differing, results
from hvdtrain.output.metric_names import Metric, number

# The browser fetches and runs nothing, whatever the names in a run contain.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def text(value: object) -> str:
    """Return `value` escaped, for use as text or in a quoted attribute."""
    return escape(plotting.printable(value))


def build(runs: Sequence[RecordedRun], pictures: Sequence[Picture]) -> str:
    """Return the page as HTML: the results, then the pictures, then the configuration of the runs."""
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    data = dict.fromkeys(str(run.start.get("reason") or run.start.get("dataset") or "?") for run in runs)
    style = files("hvdtrain.analysis.reporting").joinpath("page.css").read_text()
    head = (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{text(title)} · hvdtrain</title>\n'
        f'<link rel="icon" href="data:,">\n<style>\n{style}</style>\n</head>\n<body>\n'
    )
    parts = [
        f'<h1>{text(title)}</h1><p class="soft">{text("; ".join(data))}</p>',
        f"<h2>Results</h2>{comparison(runs)}",
        notes(runs),
        section("Learning", [picture for picture in pictures if picture.part == "learning"], undrawn(runs)),
        section("Where the time goes", [picture for picture in pictures if picture.part == "time"]),
        configuration(runs),
        f"<footer><p>Made by hvdtrain.report, {moment(time.time())}.</p></footer>\n</body>\n</html>\n",
    ]
    return head + "\n".join(part for part in parts if part)


# ---- numbers as text


def moment(seconds: float) -> str:
    """Return seconds since the epoch as local date and time."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    except (OverflowError, ValueError, OSError):
        return "?"


def duration(seconds: float | None) -> str:
    """Return seconds as text, in minutes or hours if they are many."""
    if seconds is None or not isfinite(seconds):
        return "-"
    if seconds < 120:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def written(value: float, metric: Metric | None) -> str:
    """Return a value as the script prints it; very small and very large ones shorter."""
    if (metric is not None and metric.percent) or value == 0 or 1e-3 <= abs(value) < 1e5:
        return (metric or Metric("min")).show(value)
    return f"{value:.4g}"


def outdone(result: Result) -> bool:
    """Return whether an earlier evaluation was better than the last."""
    if result.metric is None or result.best is None:
        return False
    return result.metric.better(result.best, result.value) or isnan(result.value)


def figures(run: RecordedRun) -> dict[str, str]:
    """Return the results by name; for a run that has not ended, the results so far."""
    found: dict[str, str] = {}
    for result in results(run):
        found[result.label] = written(result.value, result.metric)
        if result.samples and isfinite(result.samples):
            found[result.label] += f" of {result.samples:,.0f}"
        if outdone(result):
            epoch = "" if result.best_epoch is None else f" in epoch {result.best_epoch:.0f}"
            found[f"best {result.label}"] = f"{written(result.best or 0.0, result.metric)}{epoch}"
    spent, whole = number(run.summary.get("train_seconds")), run.seconds
    if spent is not None:
        found["training"] = duration(spent)
    found["in all"] = duration(whole)
    found["throughput"] = throughput(run)
    samples = number(run.summary.get("samples")) or (run.train[-1]["samples"] if run.train else None)
    if run.counts_samples:
        found["samples"] = "-" if samples is None else f"{samples:,.0f}"
    else:
        found["steps"] = f"{run.train[-1]['step']:,.0f}"
    found["state"] = run.state
    if again := len(run.attempts) - 1:
        found["state"] += f", {again} restart{'s'[: again > 1]}, from step {run.attempts[-1].step:,.0f}"
    return found


def throughput(run: RecordedRun) -> str:
    """Return samples per second if they are counted, else steps per second between the recorded steps."""
    rate = number(run.summary.get("samples_per_second"))
    if rate is None and run.train:
        rate = number(run.train[-1].get("samples_per_second"))
    if rate is not None:
        tokens = number(run.summary.get("tokens_per_second"))
        return f"{rate:,.0f} samples/s" + (f", {tokens:,.0f} tokens/s" if tokens else "")
    pairs = [(a, b) for a, b in itertools.pairwise(run.train) if a["attempt"] == b["attempt"]]
    seconds = sum(b["seconds"] - a["seconds"] for a, b in pairs)
    return f"{sum(b['step'] - a['step'] for a, b in pairs) / seconds:.3g} steps/s" if seconds > 0 else "-"


# ---- tables


class TableRow(NamedTuple):
    """One row of a table. best: whether each cell is the best of the row."""

    name: str
    cells: Sequence[str]
    best: Sequence[bool] = ()


def table(columns: Sequence[str], rows: Sequence[TableRow]) -> str:
    """Return a table as HTML. columns: their heads, as HTML."""
    body = ""
    for row in rows:
        best = row.best or [False] * len(row.cells)
        cells = "".join(
            f'<td class="best">{text(cell)}</td>' if first else f"<td>{text(cell)}</td>"
            for cell, first in zip(row.cells, best, strict=True)
        )
        body += f"<tr><th>{text(row.name.replace('_', '-'))}</th>{cells}</tr>"
    head = "".join(f"<th>{name}</th>" for name in columns)
    return f'<div class="scroll"><table><thead><tr><th></th>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def heads(runs: Sequence[RecordedRun]) -> list[str]:
    """Return the head of the column of each run, with a dot in the colour of its curve, as HTML."""
    colours = itertools.cycle(plotting.COLOURS)
    dot = '<span class="dot" style="background: {}"></span>{}'
    return [dot.format(colour, text(run.name)) for colour, run in zip(colours, runs, strict=False)]


def comparison(runs: Sequence[RecordedRun]) -> str:
    """Return a table as HTML: the differences between the runs, then the results, with the best ones marked."""
    rows = [TableRow(name, [run.config.get(name, "-") for run in runs]) for name in differing(runs)]
    if len(runs) == 1:
        rows = [TableRow(name, [runs[0].config[name]]) for name in ("ranks", "engine")]
    found = [{result.label: result for result in results(run)} for run in runs]
    told = [figures(run) for run in runs]
    for label in dict.fromkeys(label for each in told for label in each):
        values = [each.get(label.removeprefix("best ")) for each in found]
        numbers = [None if v is None else v.best if label.startswith("best ") else v.value for v in values]
        metric = next((value.metric for value in values if value is not None and value.metric is not None), None)
        rows.append(TableRow(label, [each.get(label, "-") for each in told], first_of(numbers, metric)))
    return table(heads(runs), rows)


def first_of(values: Sequence[float | None], metric: Metric | None) -> list[bool]:
    """Return for each value whether it is the best; none is if the metric has no direction or all values are equal."""
    known = [value for value in values if value is not None]
    if metric is None:
        return [False] * len(values)
    best = [v is not None and not isnan(v) and not any(metric.better(other, v) for other in known) for v in values]
    return best if sum(best) < len(known) else [False] * len(values)


def configuration(runs: Sequence[RecordedRun]) -> str:
    """Return a table of all flags and facts as HTML."""
    names = dict.fromkeys(name for run in runs for name in run.config)
    rows = [TableRow(name, [run.config.get(name, "-") for run in runs]) for name in names]
    return f"<details><summary>Configuration</summary>{table(heads(runs), rows)}</details>"


# ---- the other parts


def notes(runs: Sequence[RecordedRun]) -> str:
    """Return the notes on damaged or incomplete records, as HTML."""
    lines = [(f"<b>{text(run.name)}</b>: " * (len(runs) > 1), note) for run in runs for note in run.notes]
    return (
        f'<div class="notes">{"".join(f"<p>{whose}{text(note)}</p>" for whose, note in lines)}</div>' if lines else ""
    )


def undrawn(runs: Sequence[RecordedRun]) -> str:
    """Return text about restarts and about values that are not drawn."""
    said = ["Dashed vertical line: restart."] if any(len(run.attempts) > 1 for run in runs) else []
    if left := names_to_draw(runs)[1]:
        said.append(f"Not drawn, as the record has more than {MOST_VALUES} values: {', '.join(left)}.")
    return " ".join(said)


def section(title: str, pictures: Sequence[Picture], more: str = "") -> str:
    """Return a heading with pictures as HTML; "" without pictures."""
    if not pictures:
        return ""
    cards = "".join(
        f"<figure><h3>{text(picture.title)}</h3><figcaption>{text(picture.caption)}</figcaption>"
        f'<img alt="{text(picture.title)}" src="data:image/png;base64,'
        f'{base64.b64encode(picture.png).decode()}"></figure>'
        for picture in pictures
    )
    return f'<h2>{text(title)}</h2><div class="pair">{cards}</div><p class="soft">{text(more)}</p>'
