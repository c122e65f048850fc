"""Count the Python calls of one quiet step (one that logs nothing), and print their route through the files.

python -m tests.bench.calls [flags of hvdtrain.mnist]

Counted are calls of functions defined in hvdtrain, and each time one of its generators goes on. A step lasts from one
`for step in run.steps(...)` to the next.
"""

import json
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import hvdtrain

PACKAGE = f"{Path(hvdtrain.__file__).parent}/"
QUIET = 5  # the step to count: not the first, which is logged, and before the next that is
FLAGS = ["--dataset", "digits", "--train-samples", "640", "--epochs", "1", "--batch-size", "64", "--threads", "1"]
FLAGS += ["--no-progress", "--log-steps", "1000"]


class Call(NamedTuple):
    """A call of a function of hvdtrain."""

    file: str  # relative to the package
    function: str


def calls_of_step(run: Callable[[], object], number: int = QUIET) -> list[Call]:
    """Run a training script, and return the calls of its step `number`, in order."""
    steps = 0
    calls: list[Call] = []

    def look(frame: FrameType, event: str, argument: object) -> None:
        nonlocal steps
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(PACKAGE):
            return
        call = Call(code.co_filename.removeprefix(PACKAGE), code.co_qualname)
        steps += call.function == "Run._steps"
        if steps == number:
            calls.append(call)
        elif steps > number:
            sys.setprofile(None)

    sys.setprofile(look)
    try:
        run()
    finally:
        sys.setprofile(None)
    return calls


def quiet_step(flags: Sequence[str] = ()) -> list[Call]:
    """Train hvdtrain.mnist on the digits, and return the calls of a quiet step."""
    from hvdtrain import mnist

    sys.argv = ["hvdtrain.mnist", *FLAGS, *flags]
    return calls_of_step(mnist.main)


def main() -> None:
    if sys.argv[1:2] == ["--json"]:
        print(json.dumps(quiet_step(sys.argv[2:])))
        return
    calls = quiet_step(sys.argv[1:])
    for number, call in enumerate(calls, 1):
        print(f"{number:3} {call.file:34} {call.function}")
    files = list(dict.fromkeys(call.file for call in calls))
    changes = sum(one.file != other.file for one, other in pairwise(calls))
    print(f"{len(calls)} calls in {len(files)} files ({', '.join(files)}); the file changes {changes} times")


if __name__ == "__main__":
    main()
