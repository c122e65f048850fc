"""Writes the numbers of runs as comma-separated values, one row per value (tidy data for pandas, R and others)."""

import csv
import io
from collections.abc import Iterator, Sequence

from hvdtrain.analysis.plotting import printable
from hvdtrain.analysis.reporting.groups import fold
from hvdtrain.analysis.reporting.runs import RecordedRun
from hvdtrain.output.metric_names import number

# Documented in docs/report.md. Users' scripts rely on these names.
COLUMNS = ("run", "group", "seed", "event", "epoch", "step", "samples", "seconds", "data", "metric", "value")
PLACES = ("epoch", "step", "samples")  # the position of a value, in separate columns
LEFT_OUT = {"time", "elapsed", "attempt", "seconds", *PLACES}


def comma_separated(runs: Sequence[RecordedRun]) -> tuple[str, int]:
    """Return the table with its header, and the number of rows without it."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    groups = {id(run): group.name for group in fold(runs) for run in group.runs}
    count = 0
    for run in runs:
        seed = "" if run.seed is None else printable(run.seed)
        for row in rows(run):
            writer.writerow([printable(run.name), printable(groups[id(run)]), seed, *row])
            count += 1
    return text.getvalue(), count


def rows(run: RecordedRun) -> Iterator[list[object]]:
    """Yield the columns from `event` on, ordered by time, without lost steps; then those of the summary."""
    for event in sorted(run.train + run.evaluations + run.checkpoints, key=lambda event: event["seconds"]):
        places = [whole(event.get(name)) for name in PLACES]
        prefix = event.get("prefix")
        where = [event["event"], *places, round(event["seconds"], 6), printable(prefix) if prefix else ""]
        values = {name: value for name, value in event.items() if name not in LEFT_OUT and number(value) is not None}
        for name, value in values.items():
            yield [*where, printable(name), value]
        if event["event"] == "checkpoint" and not values:
            yield [*where, "", ""]
    for name, value in run.summary.items():
        if name not in LEFT_OUT and number(value) is not None:
            yield ["end", "", "", "", round(run.seconds, 6), "", printable(name), value]


def whole(value: object) -> object:
    """Return 4.0 as 4, because steps and samples are integers; "" if `value` is not a number."""
    known = number(value)
    return "" if known is None else int(known) if known.is_integer() else known
