"""Writes the page: one self-contained HTML file without scripts. `text` escapes every text from a run."""

import base64
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from html import escape
from importlib.resources import files
from itertools import pairwise
from math import isfinite, isnan
from typing import NamedTuple

from hvdtrain.analysis import plotting
from hvdtrain.analysis.measuring import mean
from hvdtrain.analysis.reporting.groups import Group
from hvdtrain.analysis.reporting.pictures import MOST_VALUES, Picture, names_to_draw
from hvdtrain.analysis.reporting.runs import NOT_COMPARED, RecordedRun, Result, differing, results, shown
from hvdtrain.output.energy import said
from hvdtrain.output.metric_names import Metric, number

# The browser fetches and runs nothing, whatever the names in a run contain.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def text(value: object) -> str:
    """Return `value` escaped, for use as text or in a quoted attribute."""
    return escape(plotting.printable(value))


def build(groups: Sequence[Group], pictures: Sequence[Picture]) -> str:
    """Return the page as HTML: the results, then the pictures, then the history and configuration of the runs."""
    runs = [run for group in groups for run in group.runs]
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
        over_seeds(groups) if len(groups) < len(runs) else "",
        f"<h2>Results</h2>{comparison(groups)}",
        notes(runs),
        section("Learning", [picture for picture in pictures if picture.part == "learning"], undrawn(runs)),
        section("Where the time goes", [picture for picture in pictures if picture.part == "time"]),
        f"<h2>How it ran</h2>{''.join(history(run) for run in runs)}",
        configuration(groups),
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


def joules(value: float) -> str:
    """Return 3600000 as "3.6 MJ (1 kWh)"."""
    if abs(value) >= 1e6:
        return f"{value / 1e6:.4g} MJ ({value / 3.6e6:.3g} kWh)"
    return f"{value / 1e3:.4g} kJ" if abs(value) >= 1e3 else f"{value:.4g} J"


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
    known = [attempt.joules for attempt in run.attempts if attempt.joules is not None]
    if known:
        complete = len(known) == len(run.attempts) and all(attempt.joules_complete for attempt in run.attempts)
        found["energy"] = "at least " * (not complete) + joules(sum(known))
        if samples:
            found["energy"] += f", {joules(sum(known) / samples)} per sample"
    again = len(run.attempts) - 1
    return found | {"state": run.state + (f", {again} restart{'s'[: again > 1]}" if again else "")}


def throughput(run: RecordedRun) -> str:
    """Return samples per second if they are counted, else steps per second between the recorded steps."""
    rate = number(run.summary.get("samples_per_second"))
    if rate is None and run.train:
        rate = number(run.train[-1].get("samples_per_second"))
    if rate is not None:
        tokens = number(run.summary.get("tokens_per_second"))
        return f"{rate:,.0f} samples/s" + (f", {tokens:,.0f} tokens/s" if tokens else "")
    pairs = [(a, b) for a, b in pairwise(run.train) if a["attempt"] == b["attempt"]]
    seconds = sum(b["seconds"] - a["seconds"] for a, b in pairs)
    return f"{sum(b['step'] - a['step'] for a, b in pairs) / seconds:.3g} steps/s" if seconds > 0 else "-"


# ---- tables


class Row(NamedTuple):
    """One row of a table. best: whether each cell is the best of the row."""

    name: str
    cells: Sequence[str]
    best: Sequence[bool] = ()


def dot(place: int) -> str:
    """Return a dot in the colour of the curve at `place`, as HTML."""
    return f'<span class="dot" style="background: {plotting.COLOURS[place % len(plotting.COLOURS)]}"></span>'


def table(heads: Sequence[str], rows: Sequence[Row]) -> str:
    """Return a table as HTML. heads: of the columns, as HTML."""
    body = ""
    for row in rows:
        best = row.best or [False] * len(row.cells)
        cells = "".join(
            f'<td class="best">{text(cell)}</td>' if first else f"<td>{text(cell)}</td>"
            for cell, first in zip(row.cells, best, strict=True)
        )
        body += f"<tr><th>{text(row.name.replace('_', '-'))}</th>{cells}</tr>"
    head = "".join(f"<th>{name}</th>" for name in heads)
    return f'<div class="scroll"><table><thead><tr><th></th>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def columns(groups: Sequence[Group]) -> tuple[list[RecordedRun], list[str]]:
    """Return the runs, and the head of the column of each."""
    pairs = [(run, place) for place, group in enumerate(groups) for run in group.runs]
    return [run for run, _ in pairs], [f"{dot(place)}{text(run.name)}" for run, place in pairs]


def comparison(groups: Sequence[Group]) -> str:
    """Return a table as HTML: the differences between the runs, then the results, with the best ones marked."""
    runs, heads = columns(groups)
    rows = [Row(name, [run.config.get(name, "-") for run in runs]) for name in differing(runs)]
    if len(runs) == 1:
        rows = [Row(name, [runs[0].config[name]]) for name in ("ranks", "engine")]
    found = [{result.label: result for result in results(run)} for run in runs]
    told = [figures(run) for run in runs]
    for label in dict.fromkeys(label for each in told for label in each):
        values = [each.get(label.removeprefix("best ")) for each in found]
        numbers = [None if v is None else v.best if label.startswith("best ") else v.value for v in values]
        metric = next((value.metric for value in values if value is not None and value.metric is not None), None)
        rows.append(Row(label, [each.get(label, "-") for each in told], first_of(numbers, metric)))
    return table(heads, rows)


def first_of(values: Sequence[float | None], metric: Metric | None) -> list[bool]:
    """Return for each value whether it is the best; none is if the metric has no direction or all values are equal."""
    known = [value for value in values if value is not None]
    if metric is None:
        return [False] * len(values)
    best = [v is not None and not isnan(v) and not any(metric.better(other, v) for other in known) for v in values]
    return best if sum(best) < len(known) else [False] * len(values)


def over_seeds(groups: Sequence[Group]) -> str:
    """Return a table as HTML, with the means over seeds in a column per configuration, and the differences first."""
    firsts = [group.runs[0] for group in groups]
    rows = [
        Row(name, [run.config.get(name, "-") for run in firsts])
        for name in differing(firsts)
        if name not in NOT_COMPARED | {"seed", "hosts"}
    ]
    found = [{result.label: result for run in group.runs for result in results(run)} for group in groups]
    for label in dict.fromkeys(label for each in found for label in each):
        metric = next((each[label].metric for each in found if label in each), None)
        values = [[r.value for run in group.runs for r in results(run) if r.label == label] for group in groups]
        known = [[value for value in each if isfinite(value)] for each in values]
        means = [statistics.fmean(each) if each else None for each in known]
        cells = [with_interval(each, functools.partial(written, metric=metric)) for each in known]
        rows.append(Row(label, cells, first_of(means, metric)))
    rates = [[number(run.summary.get("samples_per_second")) for run in group.runs] for group in groups]
    cells = [with_interval([r for r in each if r is not None and isfinite(r)], "{:,.0f}/s".format) for each in rates]
    rows.append(Row("throughput", cells))
    rows.append(Row("seeds", [", ".join(shown(run.seed) for run in group.runs) for group in groups]))
    note = (
        '<p class="soft">Mean over seeds; 95 %: interval of the mean by Student\'s t with n - 1 degrees of freedom '
        "(NIST/SEMATECH e-Handbook, 1.3.5.2); s.d.: standard deviation over seeds.</p>"
    )
    return f"<h2>Over seeds</h2>{table([dot(i) + text(group.name) for i, group in enumerate(groups)], rows)}{note}"


def with_interval(values: Sequence[float], show: Callable[[float], str]) -> str:
    """Return mean, 95 % interval, standard deviation and n as a cell of a table."""
    if not values:
        return "-"
    middle = mean(values)
    if middle.low is None or middle.high is None:
        return f"{show(middle.mean)} (n = 1)"
    interval = f"95 %: {show(middle.low)} to {show(middle.high)}"
    return f"{show(middle.mean)} ({interval}; s.d. {show(statistics.stdev(values))}, n = {middle.n})"


def configuration(groups: Sequence[Group]) -> str:
    """Return a table of all flags and facts as HTML."""
    runs, heads = columns(groups)
    names = dict.fromkeys(name for run in runs for name in run.config)
    rows = [Row(name, [run.config.get(name, "-") for run in runs]) for name in names]
    return f"<details><summary>Configuration</summary>{table(heads, rows)}</details>"


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
        f'{base64.b64encode(picture.png.read_bytes()).decode()}"></figure>'
        for picture in pictures
    )
    return f'<h2>{text(title)}</h2><div class="pair">{cards}</div><p class="soft">{text(more)}</p>'


def history(run: RecordedRun) -> str:
    """Return a table as HTML: starts, restarts, pauses, checkpoints, hosts, energy, automatic choices."""
    rows = []
    for place, attempt in enumerate(run.attempts):
        samples = "" if attempt.samples is None else f" ({attempt.samples:,.0f} samples)"
        since = f", after step {attempt.step:,.0f}{samples}" if attempt.step else ""
        ranks = f"{attempt.ranks} rank{'s'[: attempt.ranks > 1]}"
        rows.append(Row(f"{'restarted' if place else 'started'} {moment(attempt.began)}",
                        [f"{ranks}{since}; ran {duration(attempt.ran)}"]))  # fmt: skip
    pause = sum(max(0.0, after.began - before.ended) for before, after in pairwise(run.attempts))
    if pause:
        rows.append(Row("not running in between", [f"{duration(pause)}; not shown in any plot"]))
    if run.lost:
        rows.append(Row("recorded steps repeated", [f"{run.lost}, lost with an earlier attempt"]))
    if run.checkpoints:
        rows.append(Row("checkpoints", [f"{len(run.checkpoints)} written"]))
    rows.append(Row("hosts", [shown(run.hosts) or "?"]))
    if measured := said(run.start.get("energy")):
        rows.append(Row("energy", [measured]))
    automatic = run.start.get("automatic")
    if isinstance(automatic, list) and automatic:
        rows.append(Row("chosen automatically", ["; ".join(map(str, automatic))]))
    return table([text(run.name)], rows)
