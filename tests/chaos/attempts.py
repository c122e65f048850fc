"""Attempts to break a command from outside: each has a set-up, a command and an expectation. environments.py lists them.

An attempt *holds* if its command ends in time with one of the expected exit codes, prints the expected words and no
traceback, leaves no process or temporary file behind, says at most one line with exit code 2, and, where
that is expected, ends with the bits of an undisturbed run.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
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


@dataclass
class Result:
    attempt: Attempt
    problems: list[str] = field(default_factory=list)
    skipped: str = ""
    code: int | None = None
    seconds: float = 0.0
    output: str = ""

    @property
    def held(self) -> bool:
        return not self.problems and not self.skipped

    def __str__(self) -> str:
        state = "skip" if self.skipped else "held" if self.held else "FAIL"
        return f"{state} {self.seconds:5.1f} s  {self.attempt.name}  {self.skipped or '; '.join(self.problems)}"


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


def run(attempt: Attempt, scratch: Path, undisturbed: Callable[[str], str]) -> Result:
    """Make one attempt in a new directory of `scratch`. undisturbed(command): the bits that it ends with."""
    result = Result(attempt)
    if why := missing(attempt):
        result.skipped = why
        return result
    here = scratch / attempt.name
    for name in ("home", "tmp", "cache"):
        (here / name).mkdir(parents=True)
    expected = undisturbed(attempt.bits_of) if attempt.bits_of else ""
    own = environment(
        HOME=str(here / "home"), TMPDIR=str(here / "tmp"), XDG_CACHE_HOME=str(here / "cache"), PYTHONPATH=str(ROOT),
        ROOT=str(ROOT), PYTHONUNBUFFERED="",
    )  # fmt: skip
    changed = (attempt.prepare(here) if attempt.prepare else None) or {}
    unset = "".join(f"unset {name}; " for name, value in changed.items() if value is None)
    own |= {name: value for name, value in changed.items() if value is not None}
    began, said = time.monotonic(), here / "said"
    with (
        said.open("w") as out,
        running(["/bin/bash", "-c", unset + attempt.command], env=own, cwd=here, stdout=out, stderr=out) as (
            process,
            job,
        ),
    ):
        try:
            if attempt.during is not None:
                attempt.during(here, process)
            result.code = process.wait(max(1.0, attempt.limit - (time.monotonic() - began)))
        except subprocess.TimeoutExpired:
            result.problems.append(f"not over after {attempt.limit:.0f} s")
        except AssertionError as error:
            result.problems.append(f"could not be made: {error}")
        result.seconds = time.monotonic() - began
        until = time.monotonic() + (GRACE_SECONDS if result.code is not None else 0)
        while (left := members(job)) and time.monotonic() < until:
            time.sleep(0.1)
        if left and result.code is not None:
            result.problems.append(f"{len(left)} processes left")
    result.output = said.read_text(errors="replace") if said.exists() else ""
    result.problems += judge(attempt, result, here, expected)
    return result


def judge(attempt: Attempt, result: Result, here: Path, expected: str) -> list[str]:
    """Return what does not hold of an attempt that is over."""
    problems = []
    codes = (attempt.code,) if isinstance(attempt.code, int) else attempt.code
    if result.code is not None and result.code not in codes:
        problems.append(f"exit code {result.code} instead of {' or '.join(map(str, codes))}")
    if attempt.says and not re.search(attempt.says, result.output):
        problems.append(f"does not say {attempt.says!r}")
    if attempt.unsaid and (found := re.search(attempt.unsaid, result.output)):
        problems.append(f"says {found[0]!r}")
    errors = [line for line in result.output.splitlines() if re.search(r"\berror: ", line)]
    if result.code == 2 and len(errors) != 1:
        problems.append(f"{len(errors)} lines of error instead of one")
    if expected:
        summary = here / "out" / "summary.json"
        bits = json.loads(summary.read_text())["parameters_sha256"] if summary.exists() else "no summary.json"
        if bits != expected:
            problems.append(f"other bits: {bits[:16]}")
    with contextlib.suppress(OSError):
        left = sorted(path.name for path in (here / "tmp").iterdir() if not re.search(attempt.leaves, path.name))
        if left:
            problems.append(f"left in TMPDIR: {', '.join(left[:5])}")
    if attempt.check is not None and result.code is not None and (wrong := attempt.check(here, result.output)):
        problems.append(wrong)
    return problems


class Undisturbed:
    """The bits with which a command ends in an ordinary directory. Each command is run once."""

    def __init__(self, scratch: Path):
        self._scratch, self._known = scratch, {}  # type: Path, dict[str, str]

    def __call__(self, command: str) -> str:
        if command not in self._known:
            here = self._scratch / f"undisturbed-{len(self._known)}"
            attempt = Attempt(here.name, "undisturbed", "nothing is wrong", command)
            result = run(attempt, self._scratch, lambda _: "")
            assert result.held, f"{command}: {result}\n{result.output}"
            self._known[command] = json.loads((here / "out" / "summary.json").read_text())["parameters_sha256"]
        return self._known[command]


def table(results: Sequence[Result]) -> str:
    """Return a table of what held, by kind."""
    lines = ["| kind | attempts | held | skipped |", "|---|---:|---:|---:|"]
    kinds = list(dict.fromkeys(result.attempt.kind for result in results))
    for kind in [*kinds, "all"]:
        some = [result for result in results if kind in (result.attempt.kind, "all")]
        skipped = sum(bool(result.skipped) for result in some)
        lines.append(f"| {kind} | {len(some) - skipped} | {sum(result.held for result in some)} | {skipped} |")
    return "\n".join(lines)


def main(attempts: Sequence[Attempt], program: str, argv: Sequence[str] | None = None) -> int:
    """Make the attempts and print the table, and what did not hold. Return 1 if one did not."""
    parser = argparse.ArgumentParser(prog=program, description=__doc__)
    parser.add_argument("--only", metavar="NAMES", help="names, or beginnings of names or kinds, joined by commas")
    parser.add_argument("--jobs", type=int, default=1, help="attempts at a time (default: 1)")
    parser.add_argument("--list", action="store_true", help="print the attempts, and make none")
    parser.add_argument("-v", "--verbose", action="store_true", help="print the output of those that did not hold")
    flags = parser.parse_args(argv)
    wanted = tuple(flags.only.split(",")) if flags.only else ("",)
    chosen = [a for a in attempts if a.name.startswith(wanted) or a.kind.startswith(wanted)]
    if not chosen:
        parser.error(f"--only {flags.only}: no such attempt (--list)")
    if flags.list:
        for attempt in chosen:
            print(f"{attempt.kind:24} {attempt.name:32} {attempt.what}")
        return 0
    results = []
    # A short name: MPI's sockets lie below TMPDIR, and their paths may have a hundred bytes.
    with tempfile.TemporaryDirectory(prefix="at-", dir="/tmp", ignore_cleanup_errors=True) as name:
        undisturbed = Undisturbed(Path(name))
        for command in dict.fromkeys(a.bits_of for a in chosen if a.bits_of and not missing(a)):
            undisturbed(command)
        with ThreadPoolExecutor(flags.jobs) as pool:
            for result in pool.map(lambda attempt: run(attempt, Path(name), undisturbed), chosen):
                results.append(result)
                print(result, flush=True)
                if flags.verbose and result.problems:
                    said = result.output.splitlines()[-30:]
                    print("", result.attempt.command, *said, sep="\n    ", flush=True)
                shutil.rmtree(Path(name) / result.attempt.name, ignore_errors=True)
    print(table(results))
    failed = [result for result in results if result.problems]
    if failed:
        print(f"\ndid not hold: {len(failed)}", *failed, sep="\n    ")
    return int(bool(failed))


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
