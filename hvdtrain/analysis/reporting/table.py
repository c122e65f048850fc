"""Writes the numbers of runs as comma-separated values, one row per value (tidy data for pandas, R and others)."""

import csv
import io
from collections.abc import Iterator, Sequence

from hvdtrain.analysis.reporting.runs import Run
from hvdtrain.analysis.reporting.seeds import fold, seed
from hvdtrain.training.records.named import number

# Documented in docs/report.md. Users' scripts rely on these names.
COLUMNS = ("run", "group", "seed", "event", "epoch", "step", "samples", "seconds", "data", "metric", "value")
PLACES = ("epoch", "step", "samples")  # the position of a value, in separate columns
LEFT_OUT = {"time", "elapsed", "attempt", "seconds", *PLACES}


def comma_separated(runs: Sequence[Run]) -> tuple[str, int]:
    """Return the table with its header, and the number of rows without it."""
    groups = {id(run): group.name for group in fold(runs) for run in group.runs}
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    count = 0
    for run in runs:
        known = seed(run)
        about = [printable(run.name), printable(groups[id(run)]), "" if known is None else printable(str(known))]
        for row in rows(run):
            writer.writerow([*about, *row])
            count += 1
    return text.getvalue(), count


def rows(run: Run) -> Iterator[list[object]]:
    """Yield the columns from `event` on, ordered by time, without lost steps; then those of the summary."""
    for event in sorted(run.train + run.evaluations + run.checkpoints, key=lambda event: event["seconds"]):
        places = [known if (known := number(event.get(name))) is not None else "" for name in PLACES]
        where = [event["event"], *map(whole, places), round(event["seconds"], 6)]
        prefix = event.get("prefix")
        data = printable(prefix) if isinstance(prefix, str) else ""
        values = {name: value for name, value in event.items() if name not in LEFT_OUT and number(value) is not None}
        for name, value in values.items():
            yield [*where, data, printable(name), value]
        if event["event"] == "checkpoint" and not values:
            yield [*where, data, "", ""]
    for name, value in run.summary.items():
        if name not in LEFT_OUT and number(value) is not None:
            yield ["end", "", "", "", round(run.seconds, 6), "", printable(name), value]


def whole(value: object) -> object:
    """Return 4.0 as 4: steps and samples are integers."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def printable(text: str) -> str:
    """Return `text` with question marks for control characters."""
    return "".join(c if c.isprintable() else "?" for c in text)
