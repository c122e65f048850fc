"""Break the source at random, in one place at a time, and look whether a test notices: python -m tests.mutants

make mutants                                       sixty: comparisons, and/or, not, arithmetic, calls left out; hours
make mutants MUTANTS="--count 5 --seed 7"          others, and fewer
make mutants MUTANTS="--only loop/step"            in files with this in their names

Each mutation is made in a copy of the tree. Its tests run there until one fails: first those of the folder of the same name
(of loop: training), then tests/single, then tests/parallel on two ranks. Running into the time limit is noticed, too. The
exit code is 1 if more than one in twenty survives. A survivor is a test that is missing, or code that is not needed; some
change nothing.
"""

import argparse
import ast
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 900.0  # limit of each part of the tests
PYTEST = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--color=no", "--no-header"]
RANKS = ["mpirun", "--oversubscribe", "-np", "2"]
OTHER = {ast.Lt: "<=", ast.Gt: ">=", ast.LtE: "<", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "=="}
OTHER |= {ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in"}
OTHER |= {ast.And: "or", ast.Or: "and", ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.FloorDiv: "*", ast.Mod: "*"}


class Mutation(NamedTuple):
    """The bytes from `start` to `end` of a file become `new`. line: of its start."""

    line: int
    start: int
    end: int
    new: str


def mutations(source: str) -> Iterator[Mutation]:
    """Yield every place of a source that can be broken, with what stands there then."""
    whole, starts = source.encode(), [0]
    for line in whole.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def place(node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset

    def text(node: ast.expr) -> str:
        start, end = place(node)
        return f"({whole[start:end].decode()})"

    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Compare(left, [operator], [right]) if type(operator) in OTHER:
                new = f"({text(left)} {OTHER[type(operator)]} {text(right)})"
            case ast.BoolOp(operator, values):
                new = f"({f' {OTHER[type(operator)]} '.join(map(text, values))})"
            case ast.UnaryOp(ast.Not(), operand):
                new = f"bool({text(operand)})"
            case ast.BinOp(left, operator, right) if (
                type(operator) in OTHER and not is_text(left) and not is_text(right)
            ):
                new = f"({text(left)} {OTHER[type(operator)]} {text(right)})"
            case ast.Expr(ast.Call()):
                new = "None"
            case _:
                continue
        yield Mutation(node.lineno, *place(node), new)


def is_text(node: ast.AST) -> bool:
    """Return whether `node` is a string, of which a difference would be a mistake that any test notices."""
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def broken(source: str, mutation: Mutation) -> str:
    whole = source.encode()
    return (whole[: mutation.start] + mutation.new.encode() + whole[mutation.end :]).decode()


def copied(target: Path) -> None:
    """Copy the files of the working tree that git knows, or would add."""
    words = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(words, cwd=ROOT, capture_output=True, check=True)
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def fails(command: list[str], tree: Path) -> bool:
    """Return whether tests fail in `tree`, or take too long."""
    environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    with subprocess.Popen(
        command, cwd=tree, env=environment, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    ) as process:  # fmt: skip
        try:
            return process.wait(SECONDS) not in (0, 5)  # 5: no test was found
        except subprocess.TimeoutExpired:
            return True
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def noticed(file: Path, tree: Path) -> str:
    """Return which part of the tests fails in `tree`, "" if none does. file: what is broken in it."""
    folder = f"tests/single/{file.parts[1].replace('loop', 'training')}"
    near = [folder] if (tree / folder).is_dir() else []
    parts = {path: [*PYTEST, path] for path in [*near, "tests/single"]}
    parts["tests/parallel"] = [*RANKS, *PYTEST, "tests/parallel"]
    return next((name for name, command in parts.items() if fails(command, tree)), "")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="tests.mutants", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=60, help="how many mutations (default: 60)")
    parser.add_argument("--seed", type=int, default=1, help="of which ones (default: 1)")
    parser.add_argument("--only", default="", metavar="PART", help="in files with this in their names")
    flags = parser.parse_args()
    paths = sorted((ROOT / "hvdtrain").glob("*/**/*.py"))
    places = [
        (path.relative_to(ROOT), each)
        for path in paths
        if flags.only in str(path)
        for each in mutations(path.read_text())
    ]
    chosen = random.Random(flags.seed).sample(places, min(flags.count, len(places)))
    survivors = 0
    with tempfile.TemporaryDirectory(prefix="hvdtrain-mutants-") as directory:
        tree = Path(directory)
        copied(tree)
        for number, (file, mutation) in enumerate(chosen, 1):
            source = (tree / file).read_text()
            began = time.monotonic()
            (tree / file).write_text(broken(source, mutation))
            try:
                where = noticed(file, tree)
            finally:
                (tree / file).write_text(source)
            survivors += not where
            said = f"noticed by {where}" if where else "SURVIVES"
            was = " ".join(source.encode()[mutation.start : mutation.end].decode().split())
            new = " ".join(mutation.new.split())
            seconds = time.monotonic() - began
            print(
                f"{number}/{len(chosen)}  {file}:{mutation.line}: {was} -> {new}: {said}  {seconds:.0f} s", flush=True
            )
    print(f"{len(chosen)} mutations, {survivors} survivors of {len(places)} places")
    return int(survivors > len(chosen) / 20)


if __name__ == "__main__":
    sys.exit(main())
