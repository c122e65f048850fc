"""Check on GPUs what hvdtrain claims about them, in under an hour, and write one page of what it showed.

python -m hvdtrain.gpu_day                                    all rows, on this host's GPUs: runs/gpu-day/gpu-day.md
python -m hvdtrain.gpu_day --list                             what each row must show
python -m hvdtrain.gpu_day --only deterministic,cpu-loss      some rows, also those that have run before
python -m hvdtrain.gpu_day --device cpu --quick               a rehearsal: each command runs, on the processor

With one GPU, 2 to 8 ranks share it (NCCL_MULTI_RANK_GPU_ENABLE=1). A row that fails does not end the others. Started again,
it goes on with the rows that have not run. docs/gpus.md explains the page.

Exit codes: 0 every row that ran is ok, 1 some are not, 2 bad input, 130 after Ctrl-C, which keeps the rows so far.
"""

from hvdtrain.launching import startup

if __name__ == "__main__":
    startup.begin()

import json
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hvdtrain import cli
from hvdtrain.analysis import measuring
from hvdtrain.analysis.gpu_rows import LEAST_SECONDS, ROWS, Day, Failed, NotRun, Row
from hvdtrain.analysis.launching import INTERRUPTED, interrupt
from hvdtrain.engines import files, lines
from hvdtrain.engines.errors import UserError
from hvdtrain.engines.launchers import announced
from hvdtrain.launching.exit_codes import run

OK, NOT_OK, NOT_RUN = VERDICTS = ("ok", "not ok", "not run")
PAGE, RECORD = "gpu-day.md", "gpu-day.json"
Outcome = dict[str, Any]  # verdict; showed, or why it was not run; seconds; commands
NOT_COME_TO: Outcome = dict(verdict=NOT_RUN, showed="not come to", seconds=0.0, commands=[])


def parse(argv: Sequence[str] | None = None) -> cli.Flags:
    """Return the parsed command line. Raises UserError on bad input."""
    parser = cli.Parser("hvdtrain.gpu_day", __doc__)
    add = parser.add_argument
    names = [row.name for row in ROWS]
    add("--only", type=cli.some_of(names), help="these rows, separated by commas (--list has all)")
    add("--list", action="store_true", help="print what each row must show, and run none")
    add("--minutes", type=cli.positive, default=55.0, help="begin no command after this time (default: 55)")
    devices = ("cuda", "cpu")
    add("--device", choices=devices, default="cuda", help="cpu: a rehearsal, which shows nothing about GPUs")
    add("--quick", action="store_true", help="each command as small as possible: nothing is measured")
    default = Path("runs/gpu-day")
    add("--output-dir", type=Path, default=default, help="for the page and the logs (default: runs/gpu-day)")
    return parser.parse(argv)


def look(day: Day) -> dict[str, Any]:
    """Return what stands for the whole page, and set the number of GPUs. Raises UserError without a GPU."""
    day.begin("start")
    try:
        facts = day.facts
    except NotRun as error:
        raise UserError(f"--minutes is less than one command may take ({LEAST_SECONDS:.0f} s): give more") from error
    except Failed as error:
        raise UserError(f"torch or Horovod cannot be imported ({error}): make setup SETUP=--gpu") from error
    gpus = [gpu["name"] for gpu in facts["gpus"]]
    if day.device == "cuda" and not gpus:
        how = "start it on a GPU node (in a container: --nv), or rehearse with --device cpu --quick"
        raise UserError(f"torch {facts['torch']} sees no GPU here: {how}")
    day.gpus = len(gpus) if day.device == "cuda" else 0
    on = ", ".join(f"{count} x {name}" for name, count in Counter(gpus).items()) if day.gpus else "the processor"
    on += f"; torch {facts['torch']}, Horovod {facts['horovod']}, Python {facts['python']}"
    return {"device": day.device, "quick": day.quick, "on": on}


def outcome_of(row: Row, day: Day) -> Outcome:
    """Run one row, whatever becomes of it. Raises OSError if this command itself cannot write."""
    day.begin(row.name)
    began = time.monotonic()
    verdict = NOT_OK
    if day.device == "cuda" and day.gpus < row.gpus:
        return NOT_COME_TO | dict(showed=f"needs {row.gpus} GPUs")
    try:
        ok, text = row.run(day)
        verdict = OK if ok else NOT_OK
    except NotRun as error:
        verdict, text = NOT_RUN, str(error)
    except (Failed, UserError) as error:
        text = str(error)
    except (KeyError, TypeError, ValueError, IndexError) as error:  # a record without what the row looks for
        text = f"the row itself failed: {type(error).__name__}: {error}"
    return dict(verdict=verdict, showed=text, seconds=time.monotonic() - began, commands=day.commands)


def run_rows(flags: cli.Flags, day: Day, facts: dict[str, Any], outcomes: dict[str, Outcome]) -> None:
    """Run the rows that were asked for, or have no outcome yet, and write the page after each. Raises OSError."""
    for row in ROWS:
        name = row.name
        if name not in flags.only if flags.only else outcomes.get(name, NOT_COME_TO)["verdict"] != NOT_RUN:
            continue
        outcome = outcomes[name] = outcome_of(row, day)
        lines.say(f"{outcome['verdict']:7}  {name}: {outcome['showed']}  ({outcome['seconds']:.0f} s)")
        write(flags.output_dir, ROWS, outcomes, facts)


# ---- the page


def earlier(directory: Path, facts: dict[str, Any]) -> dict[str, Outcome]:
    """Return the outcomes of an earlier start on the same machine, empty if there was none. Raises UserError."""
    try:
        content = json.loads((directory / RECORD).read_text())
        rows, about = content.pop("rows"), content
        outcomes = {row["name"]: {name: row[name] for name in NOT_COME_TO} for row in rows}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{directory / RECORD} is damaged ({error}): name another --output-dir") from error
    if about != facts:
        raise UserError(f"{directory} has a page of something else ({about.get('on')}): name another --output-dir")
    return outcomes


def cell(text: str) -> str:
    """Return `text` for a cell of a table."""
    return " ".join(text.replace("|", "\\|").split()) or " "


def markdown(rows: Sequence[Row], outcomes: dict[str, Outcome], facts: dict[str, Any]) -> str:
    """Return the page. facts: what was measured on; the same for all rows."""
    told = [(row, outcomes.get(row.name, NOT_COME_TO)) for row in rows]
    counts = Counter(outcome["verdict"] for _, outcome in told)
    text = ["# The first day on a GPU", ""]
    if facts["device"] == "cpu":
        text += ["**A rehearsal on the processor.** It shows that every command runs. It says nothing about GPUs.", ""]
    text += [f"{', '.join(f'{counts[verdict]} {verdict}' for verdict in VERDICTS)}. On: {facts['on']}.", ""]
    text += ["| row | claim | must show | showed | predicted | |", "|---|---|---|---|---|---|"]
    for row, outcome in told:
        verdict = outcome["verdict"] if outcome["verdict"] == OK else f"**{outcome['verdict']}**"
        cells = (row.name, row.claim, row.must, outcome["showed"], row.predicted, verdict)
        text.append(f"| {' | '.join(map(cell, cells))} |")
    text += ["", "*predicted*: estimated for one H100 before anything had run on a GPU. No row is judged by it.", ""]
    text += ["## Commands", ""]
    for row, outcome in told:
        if outcome["commands"]:
            text += [f"**{row.name}**, {outcome['seconds']:.0f} s", "", "```", *outcome["commands"], "```", ""]
    return "\n".join(text)


def write(directory: Path, rows: Sequence[Row], outcomes: dict[str, Outcome], facts: dict[str, Any]) -> None:
    """Write the page and the record. Raises OSError."""
    lines = [
        dict(name=row.name, claim=row.claim, must=row.must, predicted=row.predicted)
        | outcomes.get(row.name, NOT_COME_TO)
        for row in rows
    ]
    files.write(directory / RECORD, json.dumps({**facts, "rows": lines}, indent=2) + "\n", sync=False)
    files.write(directory / PAGE, markdown(rows, outcomes, facts), sync=False)


def main() -> int:
    flags = parse()
    if flags.list:
        lines.result("\n".join(f"{row.name:17} {row.must} ({row.claim})" for row in ROWS))
        return 0
    if announced().size > 1:
        raise UserError("hvdtrain.gpu_day starts the launchers itself: start it without one")
    flags.output_dir = flags.output_dir.absolute()
    measuring.make_directory(flags.output_dir)
    signal.signal(signal.SIGTERM, interrupt)  # batch systems end jobs with SIGTERM: treat it like Ctrl-C
    day = Day(flags.output_dir, flags.device, flags.quick, 0, time.monotonic() + 60 * flags.minutes)
    code = 0
    outcomes: dict[str, Outcome] = {}
    try:
        with files.output_to(flags.output_dir):
            facts = look(day)
            outcomes = earlier(flags.output_dir, facts)
            run_rows(flags, day, facts, outcomes)
    except KeyboardInterrupt:
        code = INTERRUPTED
        lines.put(sys.stderr, "interrupted: ended the running job, kept the rows so far\n")
    lines.say(str(flags.output_dir / PAGE))
    return code or int(any(outcome["verdict"] == NOT_OK for outcome in outcomes.values()))


if __name__ == "__main__":
    run(main)
