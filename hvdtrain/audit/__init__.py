"""Does a training resume? Run any PyTorch program whole, then kill it at drawn places and start the same command again.

python -m hvdtrain.audit -- train.py --out {out}                  one process
python -m hvdtrain.audit -np 2 -- train.py --out {out}            two ranks, started by torchrun
python -m hvdtrain.audit --kills 12 -- -m package.train {out}     a module

It says which guarantee fails, at which step, and what the usual cause is. The program is not changed, and needs torch alone:
PYTHONPATH brings a recorder into it. {out} in the command stands for the folder that the program writes into. Exit codes:
0 all held, 1 one fails, 2 the audit could not be run.
"""

import argparse
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

SIGNALS = "one,all,term"


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def positive(text: str, kind: Callable[[str], float] = float, below: float = 1e9) -> float:
    """Raises ValueError or ArgumentTypeError, which argparse tells."""
    if not 0 < kind(text) < below:
        raise argparse.ArgumentTypeError(f"{text!r} is not above 0 and below {below:,.0f}")
    return kind(text)


def count(text: str) -> float:
    return positive(text, int, 10_000)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options, and the audited command as `command`. Bad input ends the process with 2 and one line."""
    usage = f"python -m {__package__} [OPTIONS] -- (FILE | -m MODULE | PROGRAM) ARGUMENTS..."
    raw = argparse.RawDescriptionHelpFormatter
    parser = Parser(__package__, usage, __doc__, formatter_class=raw, allow_abbrev=False)
    launched = "what starts the ranks; none: the command does (default: none for one rank, else torchrun)"
    signalled = "SIGKILL of one rank, of all; SIGTERM to the launcher (default: one,all,term)"
    timed = "of a run (default: an hour; then a minute and five times what a whole run took)"
    add = parser.add_argument
    add("-np", type=count, default=1, metavar="N", help="ranks")
    add("--launcher", choices=("none", "torchrun", "mpirun", "horovodrun"), help=launched)
    add("--kills", type=count, default=5, metavar="K", help="how many runs are killed and resumed")
    add("--seed", type=int, default=1, help="of the places and signals that are drawn")
    add("--only-kill", type=count, metavar="N", help="perform the kill of this number alone")
    add("--from-step", type=count, default=1, metavar="STEP", help="no kill before it, nor before a checkpoint")
    add("--signals", default=SIGNALS, metavar="LIST", help=signalled)
    add("--grace", type=positive, default=30.0, metavar="SECONDS", help="from SIGTERM to SIGKILL")
    add("--then-np", type=count, metavar="M", help="resume with so many ranks instead")
    add("--resume-command", metavar="LINE", help="resume with this command line instead of the same one")
    add("--timeout", type=positive, metavar="SECONDS", help=timed)
    add("--metric-regex", metavar="REGEX", help="its group is a metric, in what is printed, or under {out}")
    add("--output-dir", default="audit", metavar="DIR", help="for audit.json and what the runs said")
    add("--keep", action="store_true", help="keep what the program wrote in each run")
    add("--junit", metavar="FILE", help="write the verdicts as a JUnit file too")
    words = list(sys.argv[1:] if argv is None else argv)
    end = words.index("--") if "--" in words else len(words)
    options = parser.parse_args(words[:end])
    options.command = words[end + 1 :]
    options.launcher = options.launcher or ("none" if options.np == 1 else "torchrun")
    resuming = options.resume_command or "{out}"
    try:
        groups = re.compile(options.metric_regex or "()").groups
        options.resume_command = shlex.split(resuming) if options.resume_command else None
    except re.error as error:
        parser.error(f"--metric-regex: {error}")
    except ValueError as error:
        parser.error(f"--resume-command: {error}")
    place = "where the program is told its output folder"
    mistakes = [
        (not options.command, f"which program? python -m {__package__} [OPTIONS] -- train.py --out {{out}}"),
        ("{out}" not in " ".join(options.command), f"put {{out}} into the command, {place}: each run needs its own"),
        ("{out}" not in resuming, f"put {{out}} into --resume-command, {place}"),
        (set(options.signals.split(",")) - set(SIGNALS.split(",")), f"{options.signals!r}: some of {SIGNALS}, with commas"),
        (groups == 0, r"--metric-regex has no group: put what is to be compared into one, such as accuracy: (\S+)"),
        (options.then_np and options.launcher == "none" and not options.resume_command,
         "--launcher none starts what the command says: give --resume-command for --then-np, or a launcher"),
        (not Path(options.junit or ".").resolve().parent.is_dir(), f"--junit {options.junit}: there is no such folder"),
    ]  # fmt: skip
    for wrong, said in mistakes:
        if wrong:
            parser.error(said)
    return options
