"""Break the source in one place at a time, and look whether the tests that guard it fail: python -m tests.mutants

make mutants                                       all of tests/mutants/table.py; prints what survived, exit code 1 if any
make mutants MUTANTS="--only amp,lock"             some, by parts of their names
make mutants MUTANTS="--list"

Each mutation is made in a copy of the tree, whose tests run there with a time limit. Running into it counts as noticed.
Tests of tests/parallel are started on two ranks. First, all those tests must pass in the copy as it is.
"""

import argparse
import contextlib
import importlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from tests.mutants.table import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 240.0  # limit of the tests of one mutation: they take some seconds
PYTEST = ["-q", "-x", "-m", "", "-p", "no:cacheprovider", "--color=no", "--no-header", "--durations=0"]
RANKS = ["mpirun", "--oversubscribe", "-np", "2"]


def copied(target: Path) -> None:
    """Copy the files of the working tree that git knows, or would add."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def preload() -> None:
    """Import what takes longest, and nothing of this repository: each mutation's tests run in a fork of this process."""
    for name in ("torch", "torchvision", "torch.utils.flop_counter", "PIL.Image", "hypothesis", "pytest"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def run(tests: Sequence[str], tree: Path, seconds: float) -> tuple[int | None, str]:
    """Run tests in `tree`. Return pytest's exit code, None past the limit, and the end of its output."""
    with tempfile.TemporaryFile("w+") as log:
        sys.stdout.flush()
        process = os.fork()
        if process == 0:
            become_pytest(tests, tree, log.fileno())
        until, code = time.monotonic() + seconds, None
        while code is None and time.monotonic() < until:
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                code = os.waitstatus_to_exitcode(status)
            else:
                time.sleep(0.05)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)
        if code is None:
            os.waitpid(process, 0)
        log.seek(0)
        return code, log.read()[-3000:]


def become_pytest(tests: Sequence[str], tree: Path, log: int) -> NoReturn:
    """In the fork: run the tests of the copy, or start two ranks that do, and exit."""
    os.setsid()
    for handle in (1, 2):
        os.dup2(log, handle)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(tree)
    os.environ |= {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    if tests[0].startswith("tests/parallel"):
        os.execvp(RANKS[0], [*RANKS, sys.executable, "-m", "pytest", *PYTEST, *tests])
    sys.dont_write_bytecode = True
    for name in [name for name in sys.modules if name.partition(".")[0] in ("tests", "hvdtrain")]:
        del sys.modules[name]
    sys.path[:] = [str(tree), *(path for path in sys.path if path not in ("", str(ROOT)))]
    try:
        code = int(importlib.import_module("pytest").main([*PYTEST, *tests]))
        sys.stdout.flush()
    except BaseException:
        code = 1
    os._exit(code)


def by_launch(tests: Sequence[str]) -> list[list[str]]:
    """Split tests into those that one process runs, and those of tests/parallel."""
    parts = ([test for test in tests if test.startswith("tests/parallel") == parallel] for parallel in (False, True))
    return [part for part in parts if part]


def survives(mutant: Mutant, tree: Path) -> str:
    """Make the mutation, run its tests, undo it. Return "" if they noticed it, else what happened."""
    path = tree / mutant.file
    before = path.read_text()
    if before.count(mutant.old) != 1:
        return f"its text stands {before.count(mutant.old)} times in {mutant.file}"
    path.write_text(before.replace(mutant.old, mutant.new))
    try:
        said = "no test failed"
        for tests in by_launch(mutant.tests):
            code, output = run(tests, tree, SECONDS)
            if code in (None, 1) or (code or 0) < 0:
                return ""
            if code != 0:
                ranks = tests[0].startswith("tests/parallel")
                if ranks and " failed" in output:  # mpirun has its own codes
                    return ""
                said = f"the tests ended with {code}: {output[-500:]}"
        return said
    finally:
        path.write_text(before)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="tests.mutants", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="A,B", help="those whose name has one of these parts")
    parser.add_argument("--list", action="store_true", help="print the names")
    parser.add_argument("--trust", action="store_true", help="do not run the tests on the unchanged tree first")
    flags = parser.parse_args()
    chosen = [mutant for mutant in MUTANTS if any(part in mutant.name for part in flags.only.split(","))]
    if flags.list:
        print("\n".join(mutant.name for mutant in chosen))
        return 0
    if not chosen:
        parser.error(f"--only {flags.only}: no mutation has that in its name")
    preload()
    survivors = []
    with tempfile.TemporaryDirectory(prefix="hvdtrain-mutants-") as directory:
        tree = Path(directory)
        copied(tree)
        if not flags.trust:
            for tests in by_launch(list(dict.fromkeys(test for mutant in chosen for test in mutant.tests))):
                code, output = run(tests, tree, 20 * SECONDS)
                if code != 0:
                    print(f"{output}\nthe tests fail without any mutation (exit code {code}): mend them first")
                    return 1
        for number, mutant in enumerate(chosen, 1):
            began = time.monotonic()
            why = survives(mutant, tree)
            said = f"SURVIVES: {why}" if why else "noticed"
            print(f"{number}/{len(chosen)}  {mutant.name}: {said}  {time.monotonic() - began:.0f} s", flush=True)
            survivors += [mutant.name] * bool(why)
    print(f"{len(chosen)} mutations, {len(survivors)} survivors{': ' * bool(survivors)}{'; '.join(survivors)}")
    return int(bool(survivors))


if __name__ == "__main__":
    sys.exit(main())
