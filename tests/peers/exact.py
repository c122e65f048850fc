"""The programs with `exact_loader`: each is one of this folder, with the diff that docs/loader.md shows of it."""

import re
import shutil
from pathlib import Path

HERE = Path(__file__).resolve().parent
PAGE = HERE.parents[1] / "docs/loader.md"


def diffs() -> dict[str, list[str]]:
    """Return the lines of each diff of the page, by the program that it is of."""
    found = re.findall(r"^```diff (\w+\.py)\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    return {name: text.splitlines() for name, text in found}


def added(name: str) -> int:
    """Return how many lines the diff adds to the program `name`, beside imports."""
    return sum(line.startswith("+") and not line.startswith(("+from ", "+import ")) for line in diffs()[name])


def applied(source: str, diff: list[str]) -> str:
    """Return a program with a diff. A line of it that the program has is looked for after the one before; `...`: what is in
    between. Raises ValueError for one that is not there."""
    old, new, at = source.splitlines(), [], 0
    for line in diff:
        kind, text = line[:1], line[1:]
        if kind == "+":
            new.append(text)
        elif text != "...":
            found = old.index(text, at)
            new += old[at:found] + ([] if kind == "-" else [text])
            at = found + 1
    return "\n".join([*new, *old[at:], ""])


def written(name: str, folder: Path) -> Path:
    """Write the program `name` with its diff into `folder`, and what it imports."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(HERE / "task.py", folder)
    program = folder / name
    program.write_text(applied((HERE / name).read_text(), diffs()[name]))
    return program
