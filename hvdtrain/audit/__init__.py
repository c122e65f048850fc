"""Does a training resume? Run any PyTorch program whole, then kill it at drawn places and start the same command again.

python -m hvdtrain.audit -- train.py --out {out}                  one process
python -m hvdtrain.audit -np 2 -- train.py --out {out}            two ranks, started by torchrun
python -m hvdtrain.audit --kills 12 -- -m package.train {out}     a module

It says which guarantee fails, at which step, and what the usual cause is. The program is not changed, and needs torch alone:
PYTHONPATH brings a recorder into it. {out} in the command stands for the folder that the program writes into. Exit codes:
0 all held, 1 one fails, 2 the audit could not be run.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

SIGNALS = ("one", "all", "term")


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def positive(text: str) -> float:
    """Raises ValueError, which argparse tells."""
    value = float(text)
    if not 0 < value < 1e9:
        raise ValueError(text)
    return value


def count(text: str) -> int:
    if not 0 < int(text) < 10000:
        raise ValueError(text)
    return int(text)


def signals(text: str) -> list[str]:
    if not text or set(text.split(",")) - set(SIGNALS):
        raise argparse.ArgumentTypeError(f"{text!r}: some of {','.join(SIGNALS)}, with commas")
    return text.split(",")


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options, and the audited command as `command`. Bad input ends the process with 2 and one line."""
    usage = f"python -m {__package__} [OPTIONS] -- (FILE | -m MODULE | PROGRAM) ARGUMENTS..."
    raw = argparse.RawDescriptionHelpFormatter
    parser = Parser(__package__, usage, __doc__, formatter_class=raw, allow_abbrev=False)
    parser.add_argument("-np", type=count, default=1, metavar="N", help="ranks")
    parser.add_argument(
        "--launcher", choices=("none", "torchrun", "mpirun", "horovodrun"),
        help="what starts the ranks; none: the command does (default: none for one rank, else torchrun)",
    )  # fmt: skip
    parser.add_argument("--kills", type=count, default=4, metavar="K", help="how many runs are killed and resumed")
    parser.add_argument("--seed", type=int, default=1, help="of the places and signals that are drawn")
    parser.add_argument("--only-kill", type=count, metavar="N", help="perform the kill of this number alone")
    parser.add_argument(
        "--signals", type=signals, default=list(SIGNALS), metavar="LIST",
        help="SIGKILL of one rank, of all; SIGTERM to the launcher (default: one,all,term)",
    )  # fmt: skip
    parser.add_argument("--grace", type=positive, default=30.0, metavar="SECONDS", help="from SIGTERM to SIGKILL")
    parser.add_argument("--then-np", type=count, metavar="M", help="resume with so many ranks instead")
    parser.add_argument(
        "--resume-command", metavar="LINE", help="resume with this command line instead of the same one"
    )
    parser.add_argument(
        "--timeout", type=positive, metavar="SECONDS",
        help="of a run (default: an hour; then a minute and five times what a whole run took)",
    )  # fmt: skip
    parser.add_argument(
        "--metric-regex", metavar="REGEX", help="its group is a metric, in what is printed, or under {out}"
    )
    parser.add_argument("--output-dir", default="audit", metavar="DIR", help="for audit.json and what the runs said")
    parser.add_argument("--keep", action="store_true", help="keep what the program wrote in each run")
    parser.add_argument("--junit", metavar="FILE", help="write the verdicts as a JUnit file too")
    words = list(sys.argv[1:] if argv is None else argv)
    end = words.index("--") if "--" in words else len(words)
    options = parser.parse_args(words[:end])
    options.command = words[end + 1 :]
    if not options.command:
        parser.error(f"which program? python -m {__package__} [OPTIONS] -- train.py --out {{out}}")
    if not any("{out}" in word for word in options.command):
        parser.error("put {out} into the command, where the program is told its output folder: each run needs its own")
    if options.resume_command and "{out}" not in options.resume_command:
        parser.error("put {out} into --resume-command, where the program is told its output folder")
    options.launcher = options.launcher or ("none" if options.np == 1 else "torchrun")
    if options.then_np and options.launcher == "none" and not options.resume_command:
        parser.error("--launcher none starts what the command says: give --resume-command for --then-np, or a launcher")
    return options
