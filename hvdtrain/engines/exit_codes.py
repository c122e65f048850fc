"""How a program ends: one line on standard error and an exit code."""

import gc
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from hvdtrain.engines.errors import Failure, UserError
from hvdtrain.engines.launchers import announced
from hvdtrain.engines.lines import write_whole_lines

# 0: done.
FAILED = 1
WRONG_INPUT = 2  # one line says what to do
TARGET_MISSED = 3
STOPPED = (
    75  # on request, to be started again: EX_TEMPFAIL of sysexits.h; Slurm and Kubernetes can tell it from a failure
)
LINGER_SECONDS = 2.0


def run(main: Callable[[], int]) -> NoReturn:
    """Call `main` and exit with its code; a UserError or Failure becomes one line on standard error and its exit code."""
    write_whole_lines()
    # What was imported stays to the end: looked through once more there, it takes torch 0.6 s of a core (docs/network.md).
    gc.freeze()
    gc.enable()  # off since `import hvdtrain`
    try:
        code = main()
    except (UserError, Failure) as error:
        end_with(error)
    sys.exit(code)


def end_with(error: UserError | Failure) -> NoReturn:
    """Say what went wrong in one line, and exit with its code."""
    path = Path(sys.argv[0])
    say(error, f"hvdtrain.{path.stem}" if path.parent.name == "hvdtrain" else path.stem)
    sys.exit(error.exit_code)


def say(error: UserError | Failure, script: str) -> None:
    """Print `error` in one line, in the name of `script`.

    Rank 0 speaks at once. The others linger first, because mpirun ends a job at the first rank that fails: left at once, one
    of them could end rank 0 before it has said why. Then they say what rank 0 may not know.
    """
    try:
        rank = announced().rank
    except UserError:
        rank = 0
    if rank != 0:
        time.sleep(LINGER_SECONDS)
        script += f": rank {rank} on {socket.gethostname()}"
    if rank == 0 or not error.everywhere:
        line = " ".join(str(error).splitlines())  # one line, whatever the user typed into it
        print(f"{script}: error: {line}", file=sys.stderr, flush=True)
