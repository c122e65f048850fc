"""Writes the page: one self-contained HTML file without scripts. `text` escapes every text from a run."""

import base64
import time
from collections.abc import Mapping, Sequence
from html import escape
from math import isfinite, isnan

from hvdtrain.analysis import plotting
from hvdtrain.analysis.reporting.pictures import MOST_VALUES, Picture, names_to_draw
from hvdtrain.analysis.reporting.runs import RecordedRun, Result, differing, results
from hvdtrain.output.metric_names import Metric, number

# The browser fetches and runs nothing, whatever the names in a run contain.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
STYLE = """
:root { color-scheme: light dark; }
body { max-width: 68rem; margin: auto; padding: 2rem 1rem; font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h3 { margin: 0; font-size: 0.95rem; }
.soft, figcaption, footer { opacity: 0.7; font-size: 0.85rem; }
.pair { display: grid; gap: 1.5rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 25rem), 1fr)); }
figure { margin: 0; }
img { display: block; width: 100%; background: #ffffff; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 0.9rem; font-variant-numeric: tabular-nums; }
th, td { padding: 0.4rem 0.9rem 0.4rem 0; text-align: left; vertical-align: top; border-bottom: 1px solid #80808055; }
.notes { padding: 0.7rem 1rem; background: #ffcc0033; }
"""


def text(value: object) -> str:
    """Return `value` escaped, for use as text or in a quoted attribute."""
    return escape(plotting.printable(value))


def build(runs: Sequence[RecordedRun], pictures: Sequence[Picture]) -> str:
    """Return the page as HTML: the results, then the pictures, then the configuration of the runs."""
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    data = dict.fromkeys(str(run.start.get("reason") or run.start.get("dataset") or "?") for run in runs)
    head = (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{text(title)} · hvdtrain</title>\n'
        f'<link rel="icon" href="data:,">\n<style>\n{STYLE}</style>\n</head>\n<body>\n'
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
    if len(run.attempts) == 1:  # the summary's has the start of the process
        whole = number(run.summary.get("total_seconds")) or whole
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
    if len(run.train) < 2 or run.train[-1]["seconds"] <= run.train[0]["seconds"]:
        return "-"
    first, last = run.train[0], run.train[-1]
    return f"{(last['step'] - first['step']) / (last['seconds'] - first['seconds']):.3g} steps/s"


# ---- tables


def table(runs: Sequence[RecordedRun], rows: Mapping[str, Sequence[str]]) -> str:
    """Return a table as HTML: a column for each run. rows: cells by name."""
    head = "".join(f"<th>{text(run.name)}</th>" for run in runs)
    body = "".join(
        f"<tr><th>{text(name.replace('_', '-'))}</th>{''.join(f'<td>{text(cell)}</td>' for cell in cells)}</tr>"
        for name, cells in rows.items()
    )
    return f'<div class="scroll"><table><thead><tr><th></th>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def comparison(runs: Sequence[RecordedRun]) -> str:
    """Return a table as HTML: the differences between the runs (of a single one, its ranks and engine), then the results."""
    named = differing(runs) if len(runs) > 1 else ["ranks", "engine"]
    told = [figures(run) for run in runs]
    rows = {name: [run.config.get(name, "-") for run in runs] for name in named}
    labels = dict.fromkeys(label for each in told for label in each)
    return table(runs, rows | {label: [each.get(label, "-") for each in told] for label in labels})


def configuration(runs: Sequence[RecordedRun]) -> str:
    """Return a table of all flags and facts as HTML."""
    names = dict.fromkeys(name for run in runs for name in run.config)
    rows = {name: [run.config.get(name, "-") for run in runs] for name in names}
    return f"<details><summary>Configuration</summary>{table(runs, rows)}</details>"


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
