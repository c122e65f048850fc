"""Writes the page: one self-contained HTML file without scripts. `text` escapes every text from a run."""

import base64
import time
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from itertools import pairwise
from math import isfinite, isnan
from typing import NamedTuple

from hvdtrain.analysis import plotting
from hvdtrain.analysis.reporting import cost
from hvdtrain.analysis.reporting.curves import MOST_VALUES, names_to_draw
from hvdtrain.analysis.reporting.pictures import Picture, png
from hvdtrain.analysis.reporting.runs import Result, Run, differing, results, shown
from hvdtrain.analysis.reporting.seeds import APART, Group, seed, summary
from hvdtrain.analysis.reporting.seeds import figures as figures_over_seeds
from hvdtrain.training.records.named import number
from hvdtrain.training.state import Metric

# The browser fetches and runs nothing, whatever the names in a run contain.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def text(value: object) -> str:
    """Return `value` escaped, for use as text or in a quoted attribute."""
    return escape("".join(c if c.isprintable() else "?" for c in str(value)))


def build(groups: Sequence[Group], pictures: Sequence[Picture]) -> str:
    """Return the page as HTML: the results, then the pictures, then the history and configuration of the runs."""
    runs = [run for group in groups for run in group.runs]
    by_name = {picture.name: picture for picture in pictures}
    learning = [picture for picture in pictures if picture.part == "learning"]
    timing = sorted((picture for picture in pictures if picture.part == "time"), key=lambda picture: picture.name)
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    head = (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{text(title)} · hvdtrain</title>\n'
        f'<link rel="icon" href="data:,">\n<style>\n{style()}</style>\n</head>\n<body>\n'
    )
    parts = [
        f"<header><h1>{text(title)}</h1>{subtitle(runs)}</header>\n<main>",
        over_seeds(groups) if len(groups) < len(runs) else "",
        facts(runs[0]) if len(runs) == 1 else f'<h2>Compared</h2><div class="card">{comparison(runs)}</div>',
        notes(runs),
        section("Learning", learning, key(groups)),
        section("Where the time goes", timing),
        *(mistakes(run, place, by_name, dot(run.place) * (len(runs) > 1)) for place, run in enumerate(runs, 1)),
        f'<h2>How it ran</h2><div class="stack">{"".join(history(run) for run in runs)}</div>',
        configuration(runs),
        f"</main>\n<footer><p>Made by hvdtrain.report, {moment(time.time())}.</p></footer>\n</body>\n</html>\n",
    ]
    return head + "\n".join(part for part in parts if part)


def style() -> str:
    """Return the style sheet."""
    return files("hvdtrain.analysis.reporting").joinpath("page.css").read_text()


def subtitle(runs: Sequence[Run]) -> str:
    """Return the data sets of the runs, as HTML."""
    data = dict.fromkeys(str(said) for run in runs if (said := run.start.get("reason") or run.start.get("dataset")))
    return f'<p class="soft">{text("; ".join(data))}</p>'


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


def figures(run: Run) -> dict[str, tuple[str, str]]:
    """Return the results by name, as a figure and a qualification; for a run that has not ended, the results so far."""
    found = {result.label: (written(result.value, result.metric), qualified(result)) for result in results(run)}
    if len(run.attempts) > 1:  # total_seconds is of the last attempt, train_seconds of all
        more = f"{duration(run.seconds)} with evaluation and checkpoints"
    else:
        whole = number(run.summary.get("total_seconds"))
        more = f"{duration(whole)} with start-up and evaluation" if whole else ""
    spent = number(run.summary.get("train_seconds"))
    if spent is None and run.counts_samples:
        found["training"] = ("-", more)
    elif spent is None:  # the record has only steps and times
        found["time"] = (duration(run.seconds), "")
    else:
        found["training"] = (duration(spent), more)
    found["throughput"] = throughput(run)
    taken = number(run.summary.get("samples")) or (run.train[-1]["samples"] if run.train else None)
    if run.counts_samples:
        found["samples"] = ("-" if taken is None else f"{taken:,.0f}", "")
    else:
        found["steps"] = (f"{run.train[-1]['step']:,.0f}", "")
    return found | cost.figures(run) | {"state": (run.state, restarts(run))}


def written(value: float, metric: Metric | None) -> str:
    """Return a value as the script prints it; very small and very large ones shorter."""
    if (metric is not None and metric.percent) or value == 0 or 1e-3 <= abs(value) < 1e5:
        return (metric or Metric("min")).show(value)
    return f"{value:.4g}"


def qualified(result: Result) -> str:
    """Return the number of samples of a result, and the best evaluation if it was not the last."""
    if result.training:
        return "at the last recorded step"
    parts = [f"of {result.samples:,.0f} samples"] if result.samples and isfinite(result.samples) else []
    if outdone(result):
        epoch = "" if result.best_epoch is None else f" in epoch {result.best_epoch:.0f}"
        parts.append(f"best {written(result.best or 0.0, result.metric)}{epoch}")
    return "; ".join(parts)


def outdone(result: Result | None) -> bool:
    """Tell whether an earlier evaluation was better than the last."""
    if result is None or result.metric is None or result.best is None:
        return False
    return result.metric.better(result.best, result.value) or isnan(result.value)


def throughput(run: Run) -> tuple[str, str]:
    """Return samples per second if they are counted, else steps per second between the recorded steps."""
    rate = number(run.summary.get("samples_per_second"))
    if rate is None and run.train:
        rate = number(run.train[-1].get("samples_per_second"))
    if rate is not None:
        tokens = number(run.summary.get("tokens_per_second"))
        return f"{rate:,.0f}/s", "samples, over all ranks" + (f"; {tokens:,.0f} tokens/s" if tokens else "")
    between = [(b["step"] - a["step"], b["seconds"] - a["seconds"])
               for a, b in pairwise(run.train) if a["attempt"] == b["attempt"]]  # fmt: skip
    seconds = sum(seconds for _, seconds in between)
    return (f"{sum(steps for steps, _ in between) / seconds:.3g} steps/s", "") if seconds > 0 else ("-", "")


def restarts(run: Run) -> str:
    """Return the number of restarts as text; "" if there were none."""
    again = len(run.attempts) - 1
    return "" if not again else f"{again} restart{'s'[: again > 1]}"


def facts(run: Run) -> str:
    """Return the results of one run side by side, as HTML."""
    hosts = f"{len(run.hosts)} host{'s'[: len(run.hosts) > 1]}" if run.hosts else ""
    engine = "" if run.engine == "?" else run.engine
    shape = {"ranks": (str(run.ranks), ", ".join(filter(None, (engine, hosts))))}
    cells = [
        f"<div><dt>{text(name)}</dt><dd>{text(figure)}<small>{text(more)}</small></dd></div>"
        for name, (figure, more) in (figures(run) | shape).items()
        if name != "samples"
    ]
    return f'<dl class="facts">{"".join(cells)}</dl>'


def dot(place: int) -> str:
    """Return a dot in the colour of the group at `place`, as HTML."""
    return f'<span class="dot" style="background: var(--c{place % len(plotting.COLOURS)})"></span>'


class Row(NamedTuple):
    """One row of a table with a column per run."""

    name: str
    cells: Sequence[str]
    kind: str = ""
    best: Sequence[bool] = ()


def table(runs: Sequence[Run], rows: Sequence[Row]) -> str:
    """Return a table as HTML, with a column per run, marked by the colour of its group."""
    return columns([f"{dot(run.place)}{text(run.name)}" for run in runs], rows)


def columns(names: Sequence[str], rows: Sequence[Row]) -> str:
    """Return a table as HTML. names: column heads, as HTML."""
    heads = "".join(f"<th>{name}</th>" for name in names)
    body = ""
    for row in rows:
        best = row.best or [False] * len(row.cells)
        cells = "".join(
            f'<td class="best">{text(cell)}</td>' if first else f"<td>{text(cell)}</td>"
            for cell, first in zip(row.cells, best, strict=True)
        )
        body += f'<tr class="{row.kind}"><th>{text(row.name.replace("_", "-"))}</th>{cells}</tr>'
    head = f"<thead><tr><th></th>{heads}</tr></thead>"
    return f'<div class="scroll"><table class="runs">{head}<tbody>{body}</tbody></table></div>'


def over_seeds(groups: Sequence[Group]) -> str:
    """Return a table as HTML, with the means over seeds in a column per configuration, and the differences first."""
    names = [f"{dot(place)}{text(group.name)}" for place, group in enumerate(groups)]
    firsts = [group.runs[0] for group in groups]
    rows = [Row(name, [run.config.get(name, "-") for run in firsts], "differs")
            for name in differing(firsts) if name not in APART | {"hosts"}]  # fmt: skip
    begin = len(rows)
    found = [
        {each.label: each for each in figures_over_seeds(group, lambda value, result: written(value, result.metric))}
        for group in groups
    ]
    for label in dict.fromkeys(label for each in found for label in each):
        cells = [summary(each[label]) if label in each else "-" for each in found]
        metric = next((f.result.metric for each in found if (f := each.get(label)) is not None and f.result), None)
        best = first_of([each[label].mean.mean if label in each else None for each in found], metric)
        rows.append(Row(label, cells, "", best))
    rows.append(Row("seeds", [", ".join(shown(seed(run)) for run in group.runs) for group in groups]))
    if begin:
        rows[begin] = rows[begin]._replace(kind="first")
    note = (
        '<p class="soft">Mean over seeds; 95 %: interval of the mean by Student\'s t with n - 1 degrees of freedom '
        "(NIST/SEMATECH e-Handbook, 1.3.5.2); s.d.: standard deviation over seeds.</p>"
    )
    return f'<h2>Over seeds</h2><div class="card">{columns(names, rows)}{note}</div>'


def comparison(runs: Sequence[Run]) -> str:
    """Return a table as HTML: the differences between the runs, then the results, with the best ones marked."""
    rows = [Row(name, [run.config.get(name, "-") for run in runs], "differs") for name in differing(runs)]
    found = [{result.label: result for result in results(run)} for run in runs]
    told = [figures(run) for run in runs]
    labels = dict.fromkeys(label for each in found for label in each)
    begin = len(rows)
    for label in labels:
        values = [each.get(label) for each in found]
        metric = next((value.metric for value in values if value is not None and value.metric is not None), None)
        cells = [each.get(label, ("-",))[0] for each in told]
        rows.append(Row(label, cells, "", first_of([None if v is None else v.value for v in values], metric)))
        if any(map(outdone, values)):
            best = [None if v is None else v.best for v in values]
            cells = ["-" if value is None else written(value, metric) for value in best]
            rows.append(Row(f"best {label}", cells, "", first_of(best, metric)))
    others = dict.fromkeys(name for each in told for name in each if name not in labels)
    rows += [Row(name, [each.get(name, ("-",))[0] for each in told]) for name in others]
    if begin:
        rows[begin] = rows[begin]._replace(kind="first")
    return table(runs, rows)


def first_of(values: Sequence[float | None], metric: Metric | None) -> list[bool]:
    """Return for each value whether it is the best; none is if the metric has no direction or all values are equal."""
    known = [value for value in values if value is not None]
    if metric is None:
        return [False] * len(values)
    best = [v is not None and not isnan(v) and not any(metric.better(other, v) for other in known) for v in values]
    return best if sum(best) < len(known) else [False] * len(values)


def configuration(runs: Sequence[Run]) -> str:
    """Return a table of all flags and facts as HTML, differences first."""
    unlike = differing(runs)
    names = [*unlike, *(name for name in dict.fromkeys(n for run in runs for n in run.config) if name not in unlike)]
    rows = [
        Row(name, [run.config.get(name, "-") for run in runs], "differs" if name in unlike else "") for name in names
    ]
    first = ": differences first" if unlike else ""
    return f'<details class="card"><summary>Configuration{first}</summary>{table(runs, rows)}</details>'


def notes(runs: Sequence[Run]) -> str:
    """Return the notes on damaged or incomplete records, as HTML."""
    lines = []
    for run in runs:
        whose = f"<b>{text(run.name)}</b>: " if len(runs) > 1 else ""
        lines += [f"<p>{whose}{text(note)}</p>" for note in run.notes]
    return f'<div class="notes">{"".join(lines)}</div>' if lines else ""


def key(groups: Sequence[Group]) -> str:
    """Return text that explains the marks in the plots and names the values that are not drawn."""
    marked = [run for group in groups if not group.folded for run in group.runs]
    said = ["ticks on the axis: checkpoints"] if any(run.checkpoints for run in marked) else []
    said += ["dashed vertical line: restart"] if any(len(run.attempts) > 1 for run in marked) else []
    if undrawn := names_to_draw([run for group in groups for run in group.runs])[1]:
        said.append(f"not drawn, as the record has more than {MOST_VALUES} values: {', '.join(undrawn)}")
    return "; ".join(said)


def section(title: str, pictures: Sequence[Picture], more: str = "") -> str:
    """Return a heading with pictures as HTML; "" without pictures."""
    if not pictures:
        return ""
    cards = "".join(card(picture) for picture in pictures)
    note = f'<p class="soft">{text(more[0].upper() + more[1:])}.</p>' if more else ""
    return f'<h2>{text(title)}</h2><div class="pair">{cards}</div>{note}'


def card(picture: Picture) -> str:
    """Return one picture with title and caption as HTML."""
    return (
        f'<figure class="card"><h3>{text(picture.title)}</h3><figcaption>{text(picture.see)}</figcaption>'
        f"{picture.svg}</figure>"
    )


def mistakes(run: Run, place: int, pictures: dict[str, Picture], mark: str) -> str:
    """Return the confusion matrix and the images of the worst mistakes, as HTML."""
    if run.record is None:
        return ""
    cards = [card(pictures[name]) for name in (f"confusion-{place}",) if name in pictures]
    shown_mistakes = "".join(
        f'<figure><img alt="{m["label"]} taken for {m["predicted"]}" '
        f'src="data:image/png;base64,{base64.b64encode(png(run.record, m)).decode()}">'
        f"<figcaption><b>{m['label']} → {m['predicted']}</b><br>{m['loss']:.2f}</figcaption></figure>"
        for m in run.record.mistakes
    )
    wrong = sum(n for i, row in enumerate(run.record.confusion) for j, n in enumerate(row) if i != j)
    total = sum(map(sum, run.record.confusion))
    cards.append(
        f'<div class="card"><h3>Worst mistakes</h3><p class="soft">{wrong:,} of {total:,} are wrong; '
        f"label → prediction, and the loss</p><div class='mistakes'>{shown_mistakes}</div></div>"
    )
    whose = f"{mark}{text(run.name)}: what it gets wrong" if mark else "What it gets wrong"
    return f'<h2>{whose}</h2><div class="pair">{"".join(cards)}</div>'


def history(run: Run) -> str:
    """Return a table as HTML: starts, restarts, pauses, checkpoints, hosts, energy, automatic choices."""
    rows = []
    for place, attempt in enumerate(run.attempts):
        ranks = f"{attempt.ranks} rank{'s'[: attempt.ranks > 1]}"
        samples = "" if attempt.samples is None else f" ({attempt.samples:,.0f} samples)"
        since = "" if not attempt.step else f", after step {attempt.step:,.0f}{samples}"
        rows.append((f"{'restarted' if place else 'started'} {moment(attempt.began)}",
                     f"{ranks}{since}; ran {duration(attempt.ran)}"))  # fmt: skip
    pause = sum(max(0.0, after.began - before.ended) for before, after in pairwise(run.attempts))
    if pause:
        rows.append(("not running in between", f"{duration(pause)}; not shown in any plot"))
    if run.lost:
        rows.append(("recorded steps repeated", f"{len(run.lost)}, lost with an earlier attempt"))
    if run.kept:
        rows.append(("checkpoints", shown(run.kept)))
    rows.append(("hosts", shown(run.hosts) or "?"))
    if measured := cost.source(run):
        rows.append(("energy", measured))
    automatic = run.start.get("automatic")
    if isinstance(automatic, list) and automatic:
        rows.append(("chosen automatically", "; ".join(map(str, automatic))))
    body = "".join(f"<tr><th>{text(name)}</th><td>{text(said)}</td></tr>" for name, said in rows)
    return f'<div class="card"><h3>{text(run.name)}</h3><table class="story">{body}</table></div>'
