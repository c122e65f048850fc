"""Print how many lines each program of docs/programs changed, against its plain twin: `python -m tests.ports.count`.

Ported to hvdtrain, and three of them to accelerate and Lightning Fabric. The docstring at the head, blank lines and the
indentation do not count.
"""

import ast
from difflib import SequenceMatcher
from pathlib import Path

PORTS = Path(__file__).parent
PROGRAMS = PORTS.parents[1] / "docs" / "programs"


def lines(path: Path) -> list[str]:
    """Return what counts of a program."""
    text = path.read_text()
    docstring = ast.parse(text).body[0]
    return [line.strip() for line in text.splitlines()[docstring.end_lineno :] if line.strip()]


def changed(plain: Path, ported: Path) -> tuple[int, int]:
    """Return the number of lines added and of lines removed."""
    one, other = lines(plain), lines(ported)
    kept = sum(block.size for block in SequenceMatcher(None, one, other, autojunk=False).get_matching_blocks())
    return len(other) - kept, len(one) - kept


def table() -> str:
    """Return a table in Markdown: a program a row, lines added / removed in each library's column."""
    rows = ["| program | lines | hvdtrain | accelerate | Fabric |", "|---|---|---|---|---|"]
    for plain in sorted(PROGRAMS.glob("*_plain.py")):
        name = plain.stem.removesuffix("_plain")
        ports = [PROGRAMS / f"{name}.py", PORTS / f"{name}_accelerate.py", PORTS / f"{name}_fabric.py"]
        counts = ["{} / {}".format(*changed(plain, port)) if port.exists() else "" for port in ports]
        rows.append(f"| {' | '.join([name, str(len(lines(plain))), *counts])} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())
