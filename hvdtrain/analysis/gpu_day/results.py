"""The outcomes of a first day on GPUs, as a page of Markdown and as JSON: each claim, what it must show, what it showed."""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hvdtrain.analysis.gpu_day.day import Day
from hvdtrain.engines import files

OK, NOT_OK, NOT_RUN = VERDICTS = ("ok", "not ok", "not run")
PAGE, RECORD = "gpu-day.md", "gpu-day.json"


class Outcome(NamedTuple):
    """What became of one row."""

    verdict: str
    showed: str  # or why it was not run
    seconds: float = 0.0
    commands: tuple[str, ...] = ()
    figures: dict[str, Any] = {}  # noqa: RUF012 # never changed


class Showed(NamedTuple):
    """What a row saw."""

    ok: bool
    text: str
    figures: dict[str, Any] = {}  # noqa: RUF012 # never changed


class Row(NamedTuple):
    """What stands in the page about a row, whatever it showed, and how to run it. gpus: the fewest that it needs."""

    name: str
    run: Callable[[Day], Showed]
    claim: str  # of which page, and in which words
    must: str = "a rate"
    predicted: str = ""
    gpus: int = 1


def cell(text: str) -> str:
    """Return `text` for a cell of a table."""
    return " ".join(text.replace("|", "\\|").split()) or " "


def markdown(rows: Sequence[Row], outcomes: dict[str, Outcome], facts: dict[str, Any]) -> str:
    """Return the page. facts: what was measured on; the same for all rows."""
    counts = Counter(outcomes[row.name].verdict if row.name in outcomes else NOT_RUN for row in rows)
    text = ["# The first day on a GPU", ""]
    if facts["device"] == "cpu":
        text += ["**A rehearsal on the processor.** It shows that every command runs. It says nothing about GPUs.", ""]
    text += [f"{', '.join(f'{counts[verdict]} {verdict}' for verdict in VERDICTS)}. On: {facts['on']}.", ""]
    text += ["| row | claim | must show | showed | predicted | |", "|---|---|---|---|---|---|"]
    for row in rows:
        outcome = outcomes.get(row.name, Outcome(NOT_RUN, "not come to"))
        verdict = outcome.verdict if outcome.verdict == OK else f"**{outcome.verdict}**"
        cells = (row.name, row.claim, row.must, outcome.showed, row.predicted, verdict)
        text.append(f"| {' | '.join(map(cell, cells))} |")
    text += ["", "*predicted*: estimated for one H100 before anything had run on a GPU. No row is judged by it.", ""]
    text += ["## Commands", ""]
    for row in rows:
        if (ran := outcomes.get(row.name)) is not None and ran.commands:
            text += [f"**{row.name}**, {ran.seconds:.0f} s", "", "```", *ran.commands, "```", ""]
    return "\n".join(text)


def write(directory: Path, rows: Sequence[Row], outcomes: dict[str, Outcome], facts: dict[str, Any]) -> None:
    """Write the page and the record. Raises OSError."""
    lines = [{field: getattr(row, field) for field in ("name", "claim", "must", "predicted")} for row in rows]
    ran = [outcomes.get(row.name, Outcome(NOT_RUN, "not come to"))._asdict() for row in rows]
    record = {**facts, "rows": [line | outcome for line, outcome in zip(lines, ran, strict=True)]}
    files.write(directory / RECORD, json.dumps(record, indent=2, default=str) + "\n", sync=False)
    files.write(directory / PAGE, markdown(rows, outcomes, facts), sync=False)


def read(directory: Path) -> tuple[dict[str, Any], dict[str, Outcome]]:
    """Return the facts and the outcomes of an earlier start, empty if there was none. Raises OSError, ValueError."""
    try:
        content = json.loads((directory / RECORD).read_text())
    except FileNotFoundError:
        return {}, {}
    rows = content.pop("rows")
    return content, {
        row["name"]: Outcome(**{field: row[field] for field in Outcome._fields} | {"commands": tuple(row["commands"])})
        for row in rows
    }
