"""The outcomes of a first day on GPUs, as a page of Markdown and as JSON: each claim, what it must show, what it showed."""

import json
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

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


class Line(NamedTuple):
    """What stands in the page about a row, whatever it showed."""

    name: str
    claim: str  # of which page, and in which words
    must: str
    predicted: str = ""


def cell(text: str) -> str:
    """Return `text` for a cell of a table."""
    return " ".join(text.replace("|", "\\|").split()) or " "


def markdown(lines: list[Line], outcomes: dict[str, Outcome], facts: dict[str, Any]) -> str:
    """Return the page. facts: what was measured on; the same for all rows."""
    counts = Counter(outcomes[line.name].verdict if line.name in outcomes else NOT_RUN for line in lines)
    text = ["# The first day on a GPU", ""]
    if facts["device"] == "cpu":
        text += [
            "**A rehearsal on the processor.** It shows that every command runs. It says nothing about GPUs.",
            "",
        ]
    text += [f"{', '.join(f'{counts[verdict]} {verdict}' for verdict in VERDICTS)}. On: {facts['on']}.", ""]
    text += ["| row | claim | must show | showed | predicted | |", "|---|---|---|---|---|---|"]
    for line in lines:
        outcome = outcomes.get(line.name, Outcome(NOT_RUN, "not come to"))
        verdict = outcome.verdict if outcome.verdict == OK else f"**{outcome.verdict}**"
        cells = (line.name, line.claim, line.must, outcome.showed, line.predicted, verdict)
        text.append(f"| {' | '.join(map(cell, cells))} |")
    text += ["", "*predicted*: estimated for one H100 before anything had run on a GPU. No row is judged by it.", ""]
    text += ["## Commands", ""]
    for line in lines:
        if (ran := outcomes.get(line.name)) is not None and ran.commands:
            text += [f"**{line.name}**, {ran.seconds:.0f} s", "", "```", *ran.commands, "```", ""]
    return "\n".join(text)


def write(directory: Path, lines: list[Line], outcomes: dict[str, Outcome], facts: dict[str, Any]) -> None:
    """Write the page and the record. Raises OSError."""
    rows = [line._asdict() | outcomes.get(line.name, Outcome(NOT_RUN, "not come to"))._asdict() for line in lines]
    with files.replacing(directory / RECORD) as file:
        file.write(json.dumps({**facts, "rows": rows}, indent=2, default=str) + "\n")
    with files.replacing(directory / PAGE) as file:
        file.write(markdown(lines, outcomes, facts))


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
