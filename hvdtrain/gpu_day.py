"""Check on GPUs what hvdtrain claims about them, in under an hour, and write one page of what it showed.

python -m hvdtrain.gpu_day                                    all rows, on this host's GPUs: runs/gpu-day/gpu-day.md
python -m hvdtrain.gpu_day --list                             what each row must show
python -m hvdtrain.gpu_day --only bits,cpu-loss               some rows, also those that have run before
python -m hvdtrain.gpu_day --device cpu --quick               a rehearsal: each command runs, on the processor

With one GPU, 2 to 8 ranks share it (NCCL_MULTI_RANK_GPU_ENABLE=1). A row that fails does not end the others. Started again,
it goes on with the rows that have not run. docs/gpus.md explains the page.

Exit codes: 0 every row that ran is ok, 1 some are not, 2 bad input, 130 after Ctrl-C, which keeps the rows so far.
"""

from hvdtrain.launching import startup

if __name__ == "__main__":
    startup.begin()

import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hvdtrain import cli
from hvdtrain.analysis import measuring
from hvdtrain.analysis.gpu_day import results
from hvdtrain.analysis.gpu_day.day import Day, Failed, NotRun
from hvdtrain.analysis.gpu_day.results import NOT_OK, NOT_RUN, OK, Outcome, Row
from hvdtrain.analysis.gpu_day.rows import ROWS
from hvdtrain.analysis.launching import INTERRUPTED, interrupt
from hvdtrain.engines.errors import UserError
from hvdtrain.engines.launchers import announced
from hvdtrain.launching.exit_codes import run


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
    program = "nccl-tests' all_reduce_perf (default: from PATH, if there)"
    add("--nccl-tests", type=Path, metavar="PROGRAM", help=program)
    default = Path("runs/gpu-day")
    add("--output-dir", type=Path, default=default, help="for the page and the logs (default: runs/gpu-day)")
    return parser.parse(argv)


def look(day: Day) -> dict[str, Any]:
    """Return what stands for the whole page, and set the number of GPUs. Raises UserError without a GPU."""
    day.begin("start")
    try:
        facts = day.probe("facts", "facts")
    except Failed as error:
        raise UserError(f"torch or Horovod cannot be imported ({error}): make setup SETUP=--gpu") from error
    gpus = [gpu["name"] for gpu in facts["gpus"]]
    if day.device == "cuda" and not gpus:
        how = "start it on a GPU node (in a container: --nv), or rehearse with --device cpu --quick"
        raise UserError(f"torch {facts['torch']} sees no GPU here: {how}")
    day.gpus = len(gpus) if day.device == "cuda" else 0
    on = ", ".join(f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus)) if day.gpus else "the processor"
    on += f"; torch {facts['torch']}, Horovod {facts['horovod']}, Python {facts['python']}"
    return {"device": day.device, "quick": day.quick, "on": on}


def outcome_of(row: Row, day: Day) -> Outcome:
    """Run one row, whatever becomes of it. Raises OSError if this command itself cannot write."""
    name = row.name
    day.begin(name)
    began = time.monotonic()
    if day.device == "cuda" and day.gpus < row.gpus:
        return Outcome(NOT_RUN, f"needs {row.gpus} GPUs")
    try:
        showed = row.run(day)
        verdict, text, figures = OK if showed.ok else NOT_OK, showed.text, showed.figures
    except NotRun as error:
        verdict, text, figures = NOT_RUN, str(error), {}
    except (Failed, UserError) as error:
        verdict, text, figures = NOT_OK, str(error), {}
    except (KeyError, TypeError, ValueError, IndexError) as error:  # a record without what the row looks for
        verdict, text, figures = NOT_OK, f"the row itself failed: {type(error).__name__}: {error}", {}
    return Outcome(verdict, text, time.monotonic() - began, tuple(day.commands), figures)


def run_rows(flags: cli.Flags, day: Day, facts: dict[str, Any], outcomes: dict[str, Outcome]) -> None:
    """Run the rows that were asked for, or have no outcome yet, and write the page after each."""
    for row in ROWS:
        name = row.name
        if name not in flags.only if flags.only else outcomes.get(name, Outcome(NOT_RUN, "")).verdict != NOT_RUN:
            continue
        outcome = outcomes[name] = outcome_of(row, day)
        print(f"{outcome.verdict:7}  {name}: {outcome.showed}  ({outcome.seconds:.0f} s)", flush=True)
        results.write(flags.output_dir, ROWS, outcomes, facts)


def main() -> int:
    flags = parse()
    if flags.list:
        print("\n".join(f"{row.name:17} {row.must} ({row.claim})" for row in ROWS))
        return 0
    if announced().size > 1:
        raise UserError("hvdtrain.gpu_day starts the launchers itself: start it without one")
    if flags.nccl_tests is not None and not os.access(flags.nccl_tests, os.X_OK):
        raise UserError(f"--nccl-tests {flags.nccl_tests} is no program: name nccl-tests' all_reduce_perf")
    flags.output_dir = flags.output_dir.absolute()
    measuring.make_directory(flags.output_dir)
    signal.signal(signal.SIGTERM, interrupt)  # batch systems end jobs with SIGTERM: treat it like Ctrl-C
    until = time.monotonic() + 60 * flags.minutes
    day = Day(flags.output_dir, flags.device, flags.quick, 0, until, flags.nccl_tests)
    code = 0
    outcomes: dict[str, Outcome] = {}
    try:
        facts = look(day)
        earlier, outcomes = results.read(flags.output_dir)
        if earlier and earlier != facts:
            how = "name another --output-dir"
            raise UserError(f"{flags.output_dir} has a page of something else ({earlier.get('on')}): {how}")
        run_rows(flags, day, facts, outcomes)
    except KeyboardInterrupt:
        code = INTERRUPTED
        print("interrupted: ended the running job, kept the rows so far", file=sys.stderr, flush=True)
    except (OSError, ValueError) as error:
        why = error.strerror or error if isinstance(error, OSError) else f"{results.RECORD} is damaged: {error}"
        how = "free some space, or name another directory; the rows so far are kept"
        raise UserError(f"--output-dir {flags.output_dir} cannot be used ({why}): {how}") from error
    print(flags.output_dir / results.PAGE, flush=True)
    return code or int(any(outcome.verdict == NOT_OK for outcome in outcomes.values()))


if __name__ == "__main__":
    run(main)
