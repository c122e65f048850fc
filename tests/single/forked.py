"""Short programs, each in a process forked from one that has imported what they need: importing torch takes seconds."""

import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

# Whoever is forked leaves the loop, and ends as a script does, after its own program.
PARENT = """
import gc, json, os, signal, sys
first, programs, folder = json.load(sys.stdin)
exec(first)
gc.freeze()  # else each looks at all of torch's objects when it ends
codes = {}
for name, program in programs.items():
    if (pid := os.fork()) == 0:
        signal.alarm(60)  # of a program that does not end; the others are run all the same
        for number in (1, 2):
            os.dup2(os.open(f"{folder}/{name}.{number}", os.O_CREAT | os.O_WRONLY), number)
        break
    codes[name] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
else:
    program = ""
    print(json.dumps(codes))
exec(program)
"""


class End(NamedTuple):
    code: int
    out: str
    err: str


def ends_of(first: str, programs: dict[str, str], folder: Path) -> dict[str, End]:
    """Run one after the other. Return how each has ended, by name. first: what they have in common, run once."""
    done = subprocess.run(
        [sys.executable, "-c", PARENT], input=json.dumps([first, programs, str(folder)]), text=True,
        stdout=subprocess.PIPE, timeout=240, check=True,
    )  # fmt: skip
    codes = json.loads(done.stdout)
    return {name: End(codes[name], *((folder / f"{name}.{n}").read_text() for n in (1, 2))) for name in programs}
