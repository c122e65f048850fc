"""Count what must be read to understand one thing that hvdtrain.mnist does: whole files that hold a function it calls.

python -m tests.bench.paths [--functions NAME]     NAME: also print the functions of this path, by file

Two ranks train on the digits under the starter. On rank 0, sys.setprofile notes each function of hvdtrain that is called, on
every thread. A path is what was called in a run that did the thing, and not in one that did not:

step          between two updates of the optimizer that log nothing and save nothing
checkpoint    in a run with --checkpoint-steps; not in one without
resume        up to the first update of a run that continues from a checkpoint; not in one that begins
stop          in a run that SIGTERM ends; not in one with a checkpoint that ends by itself
evaluation    from run.evaluating() to the end of its block; not in a step

The eager import closure of a file is what an import of it loads of hvdtrain, without imports inside of functions.
"""

import argparse
import ast
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import hvdtrain

PACKAGE = Path(hvdtrain.__file__).parent
FLAGS = ["--dataset", "digits", "--train-samples", "640", "--epochs", "2", "--batch-size", "32", "--threads", "1"]
FLAGS += ["--no-progress", "--log-steps", "1000"]
STEPS = 10  # of an epoch
QUIET, STOP_AT = 5, 7  # updates of the optimizer: nothing is logged or saved after them


class Function(NamedTuple):
    """A function of hvdtrain. file: relative to the package."""

    file: str
    name: str
    thread: str = "main"


# ---------------------------------------------------------------------------------------------- on a rank


def trace(out: Path, *, stop: bool) -> None:
    """Run hvdtrain.mnist with the flags in sys.argv; write what was called after each update of the optimizer."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    called: list[set[Function]] = [set()]
    evaluation: set[Function] = set()
    evaluates = False
    prefix = f"{PACKAGE}/"

    def look(frame: FrameType, event: str, argument: object) -> None:
        nonlocal evaluates
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(prefix) and code.co_name != "<module>":
            thread = "main" if threading.get_ident() == threading.main_thread().ident else "other"
            function = Function(code.co_filename.removeprefix(prefix), code.co_qualname, thread)
            called[-1].add(function)
            if code.co_name in ("evaluating", "_epochs"):  # which goes on with its loop after the block
                evaluates = code.co_name == "evaluating"
            if evaluates:
                evaluation.add(function)

    def updated(*_: object) -> None:
        if not called[-1]:  # Horovod's optimizer and the one that it wraps both come here
            return
        called.append(set())
        if stop and len(called) == STOP_AT:
            os.kill(os.getpid(), signal.SIGTERM)

    register_optimizer_step_post_hook(updated)
    if os.environ.get("HOROVOD_RANK") == "0":
        threading.setprofile(look)
        sys.setprofile(look)
    try:
        runpy.run_module("hvdtrain.mnist", run_name="__main__", alter_sys=True)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        if os.environ.get("HOROVOD_RANK") == "0":
            out.write_text(json.dumps([sorted(functions) for functions in [*called, evaluation]]))


# ---------------------------------------------------------------------------------------------- the paths


def traced(scratch: Path, name: str, *flags: str, stop: bool = False) -> list[set[Function]]:
    """Return what rank 0 called before the first update, after it, after the second, and so on; last, in evaluations."""
    out = scratch / f"{name}.json"
    words = [
        sys.executable, "-m", "hvdtrain.starter", "--oversubscribe", "--local-ranks", "2", "-m", "tests.bench.paths",
    ]  # fmt: skip
    words += ["--trace", str(out), *(["--stop"] if stop else []), *FLAGS, *flags]
    done = subprocess.run(words, capture_output=True, text=True, timeout=240)
    if done.returncode != (75 if stop else 0):
        sys.exit(f"{' '.join(words)}\nexit code {done.returncode}\n{done.stdout}{done.stderr}")
    return [{Function(*one) for one in functions} for functions in json.loads(out.read_text())]


def paths(scratch: Path) -> dict[str, set[Function]]:
    plain = traced(scratch, "plain")
    saving = traced(scratch, "saving", "--checkpoint-steps", "3", "--output-dir", f"{scratch}/saving")
    stopped = traced(scratch, "stopped", "--checkpoint-steps", "3", "--output-dir", f"{scratch}/out", stop=True)
    begun = traced(scratch, "begun", "--checkpoint-steps", "0", "--output-dir", f"{scratch}/begun")  # none by the clock
    resumed = traced(scratch, "resumed", "--checkpoint-steps", "0", "--output-dir", f"{scratch}/out")
    step = {function for function in plain[QUIET] if function.thread == "main"}
    checkpoint = set().union(*saving[1:STEPS]) - set().union(*begun[1:STEPS])
    return {
        "step": step,
        "checkpoint": checkpoint,
        "resume": resumed[0] - begun[0],
        "stop": set().union(*stopped) - set().union(*saving),
        "evaluation": plain[-1] - set().union(*plain[1:STEPS]),
    }


# ---------------------------------------------------------------------------------------------- imports


def file_of(module: str) -> Path | None:
    """Return the file of a module of hvdtrain, None for another name."""
    path = PACKAGE.parent / Path(*module.split("."))
    return next((one for one in (path.with_suffix(".py"), path / "__init__.py") if one.is_file()), None)


def imports(path: Path) -> set[Path]:
    """Return the files of hvdtrain that an import of this one imports itself."""
    found: set[Path | None] = set()
    nodes: list[ast.stmt] = list(ast.parse(path.read_text()).body)
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            found |= {file_of(alias.name) for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {file_of(f"{node.module}.{alias.name}") for alias in node.names}
            found |= names - {None} or {file_of(node.module)}
        elif isinstance(node, ast.If | ast.Try | ast.With):
            nodes += [child for child in ast.walk(node) if isinstance(child, ast.Import | ast.ImportFrom)]
    return {one for one in found if one is not None and one.is_relative_to(PACKAGE)}


def closure(path: Path) -> set[Path]:
    found, waiting = {path}, [path]
    while waiting:
        new = imports(waiting.pop()) - found
        found |= new
        waiting += new
    return found


def circles() -> list[set[Path]]:
    """Return the groups of files that import each other, directly or not."""
    reached = {path: closure(path) for path in PACKAGE.rglob("*.py")}
    groups = {frozenset(other for other in reached[one] if one in reached[other]) for one in reached}
    return [set(group) for group in groups if len(group) > 1]


def lines(files: Iterable[Path]) -> int:
    return sum(len(path.read_text().splitlines()) for path in files)


def attributes(file: str, name: str) -> int:
    """Return the number of attributes that the constructor of a class sets."""
    tree = ast.parse((PACKAGE / file).read_text())
    cls = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    made = next(node for node in cls.body if isinstance(node, ast.FunctionDef) and node.name == "__init__")
    return len({n.attr for n in ast.walk(made) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)})


# ---------------------------------------------------------------------------------------------- the table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--functions", metavar="NAME", help="also print the functions of this path")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        found = paths(Path(scratch))
    print("| to understand | files | lines |\n|---|---:|---:|")
    for name, functions in found.items():
        files = {PACKAGE / function.file for function in functions}
        print(f"| {name} | {len(files)} | {lines(files):,} |")
    step = next(path for path in sorted((PACKAGE / "loop").glob("*.py")) if "\nclass Step" in path.read_text())
    for path in (step, PACKAGE / "training" / "__init__.py"):
        files = closure(path)
        print(f"| eager imports of {path.relative_to(PACKAGE)} | {len(files)} | {lines(files):,} |")
    print(f"| circles of imports | {len(circles())} | |")
    print(f"| attributes of Run | {attributes('loop/tools.py', 'RunTools')} | |")
    for function in sorted(found.get(flags.functions or "", ())):
        print(f"{function.file:36} {function.name}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--trace"]:
        _, _, target, *rest = sys.argv
        ends = rest[:1] == ["--stop"]
        sys.argv = ["hvdtrain.mnist", *rest[ends:]]
        trace(Path(target), stop=ends)
    else:
        main()
