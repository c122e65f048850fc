"""The numbers of runs as comma-separated values: a row per recorded step, evaluation and checkpoint, a column per name."""

import csv
import io
from collections.abc import Iterator, Sequence

from hvdtrain.analysis.reporting.runs import Run
from hvdtrain.training.records.named import number

FIRST = ("run", "event", "epoch", "step", "samples", "seconds", "prefix")
LEFT_OUT = {"time", "elapsed", "attempt"}


def comma_separated(runs: Sequence[Run]) -> tuple[str, int]:
    """Return the table with its head, and the number of rows below it."""
    found = [row for run in runs for row in rows(run)]
    names = dict.fromkeys((*FIRST, *(name for row in found for name in row)))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(map(printable, names))
    writer.writerows([row.get(name, "") for name in names] for row in found)
    return text.getvalue(), len(found)


def rows(run: Run) -> Iterator[dict[str, object]]:
    """Yield what was recorded in the order of time; steps that were lost and taken again, once."""
    for event in sorted(run.train + run.evaluations + run.checkpoints, key=lambda event: event["seconds"]):
        numbers = {name: value for name, value in event.items() if name not in LEFT_OUT and number(value) is not None}
        prefix = event.get("prefix")
        words = {"prefix": printable(prefix)} if isinstance(prefix, str) else {}
        numbers["seconds"] = round(event["seconds"], 6)
        yield {"run": printable(run.name), "event": event["event"]} | numbers | words


def printable(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text)
