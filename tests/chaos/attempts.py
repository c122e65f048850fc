"""Attempts to break a command from outside: a set-up, a command and an expectation. test_environments.py has them.

An attempt *holds* if its command ends in time with one of the expected exit codes, prints the expected words and no
traceback, leaves no process or temporary file behind, says at most one line with exit code 2, and, where
that is expected, ends with the bits of an undisturbed run.
"""

import contextlib
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.launchers import ROOT, environment, members, running

GRACE_SECONDS = 30.0  # for processes and files that are about to go
Job = subprocess.Popen[str]


@dataclass(frozen=True)
class Attempt:
    """One attempt. Its command is a line of bash, in an empty directory with a HOME and a TMPDIR of its own."""

    name: str
    kind: str  # its row in the table
    what: str  # one sentence
    command: str
    code: int | tuple[int, ...] = 0
    says: str = ""  # a regular expression that the output matches
    unsaid: str = r"Traceback \(most recent call last\)"  # one that it does not
    prepare: Callable[[Path], Mapping[str, str | None] | None] | None = None  # returns variables; None: unset
    during: Callable[[Path, Job], None] | None = None  # called once the command runs
    check: Callable[[Path, str], str] | None = None  # (directory, output) -> what is wrong, or ""
    bits_of: str = ""  # a command whose undisturbed run ends with the same parameters_sha256
    needs: tuple[str, ...] = ()  # "root", or programs
    limit: float = 240.0  # seconds, far above the usual time
    leaves: str = "^torchinductor_"  # a regular expression of the names that may stay in TMPDIR: torch's own


def missing(attempt: Attempt) -> str:
    """Return why `attempt` cannot be made here, or ""."""
    for need in attempt.needs:
        if need == "root":
            if os.geteuid() != 0:
                return "needs root"
            tried = subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True)
            if tried.returncode != 0:
                return "needs to mount file systems"
        elif shutil.which(need, path=environment()["PATH"]) is None:
            return f"needs {need}"
    return ""


def problems(attempt: Attempt, here: Path, expected: str = "") -> list[str]:
    """Make an attempt in a new directory `here`, and return what does not hold. expected: the bits that it ends with."""
    found: list[str] = []
    for name in ("home", "tmp", "cache"):
        (here / name).mkdir(parents=True)
    own = environment(
        HOME=str(here / "home"), TMPDIR=str(here / "tmp"), XDG_CACHE_HOME=str(here / "cache"), PYTHONPATH=str(ROOT),
        ROOT=str(ROOT), PYTHONUNBUFFERED="",
    )  # fmt: skip
    changed = (attempt.prepare(here) if attempt.prepare else None) or {}
    unset = "".join(f"unset {name}; " for name, value in changed.items() if value is None)
    own |= {name: value for name, value in changed.items() if value is not None}
    command, began, code = ["/bin/bash", "-c", unset + attempt.command], time.monotonic(), None
    with (
        (here / "said").open("w") as out,
        running(command, env=own, cwd=here, stdout=out, stderr=out) as (process, job),
    ):
        try:
            if attempt.during is not None:
                attempt.during(here, process)
            code = process.wait(max(1.0, attempt.limit - (time.monotonic() - began)))
        except subprocess.TimeoutExpired:
            found.append(f"not over after {attempt.limit:.0f} s")
        except AssertionError as error:
            found.append(f"could not be made: {error}")
        until = time.monotonic() + (GRACE_SECONDS if code is not None else 0)
        while (left := members(job)) and time.monotonic() < until:
            time.sleep(0.1)
        if left and code is not None:
            found.append(f"{len(left)} processes left")
    said = (here / "said").read_text(errors="replace") if (here / "said").exists() else ""
    print(said)  # pytest shows it if something does not hold
    return found + judged(attempt, code, said, here, expected)


def judged(attempt: Attempt, code: int | None, said: str, here: Path, expected: str) -> list[str]:
    """Return what does not hold of an attempt that is over."""
    found = []
    codes = (attempt.code,) if isinstance(attempt.code, int) else attempt.code
    if code is not None and code not in codes:
        found.append(f"exit code {code} instead of {' or '.join(map(str, codes))}")
    if attempt.says and not re.search(attempt.says, said):
        found.append(f"does not say {attempt.says!r}")
    if attempt.unsaid and (match := re.search(attempt.unsaid, said)):
        found.append(f"says {match[0]!r}")
    errors = [line for line in said.splitlines() if re.search(r"\berror: ", line)]
    if code == 2 and len(errors) != 1:
        found.append(f"{len(errors)} lines of error instead of one")
    if expected and (bits := parameters(here)) != expected:
        found.append(f"other bits: {bits[:16]}")
    with contextlib.suppress(OSError):
        left = sorted(path.name for path in (here / "tmp").iterdir() if not re.search(attempt.leaves, path.name))
        if left:
            found.append(f"left in TMPDIR: {', '.join(left[:5])}")
    if attempt.check is not None and code is not None and (wrong := attempt.check(here, said)):
        found.append(wrong)
    return found


def parameters(here: Path) -> str:
    summary = here / "out" / "summary.json"
    return json.loads(summary.read_text())["parameters_sha256"] if summary.exists() else "no summary.json"


def wait_for(path: Path, job: Job, pattern: str = "", seconds: float = 180.0) -> None:
    """Wait until `path` exists, and its text matches `pattern`. Raises AssertionError if the job ends before."""
    until = time.monotonic() + seconds
    while True:
        with contextlib.suppress(OSError):
            if (not pattern and path.exists()) or (pattern and re.search(pattern, path.read_text(errors="replace"))):
                return
        assert job.poll() is None, f"the job ended with {job.poll()} before {path.name} was there"
        assert time.monotonic() < until, f"{path.name} was not there after {seconds:.0f} s"
        time.sleep(0.05)
