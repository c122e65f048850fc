"""Write docs/reference/errors.md, every message of hvdtrain and launch/ to a user: python docs/site/messages.py.

`make docs` calls it; the page is not tracked. A message is found by what it is given to: an exception for users, or a
function that prints a warning. Capitals stand for values.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reference" / "errors.md"
# What is raised with a message for users, and what says one without raising.
KINDS = {"UserError", "Failure", "ArgumentTypeError", "Refusal", "BuildFailure", "BadFile", "DownloadFailed", "Damaged"}
TABLE = "REFUSALS"  # messages by name
KINDS |= {"NotThere", "error", "_warn", "warn", "_end", "Diagnosis"}
SECTIONS = {
    "Commands and flags": ["hvdtrain/*.py", "hvdtrain/checks", "hvdtrain/analysis"],
    "Ranks and engines": ["hvdtrain/engines"],
    "Launching": ["hvdtrain/launching"],
    "Data": ["hvdtrain/datasets", "hvdtrain/inputs"],
    "Models and weights": ["hvdtrain/models"],
    "Training, checkpoints and resuming": ["hvdtrain/loop", "hvdtrain/checkpoint", "hvdtrain/features"],
    "Records and output": ["hvdtrain/output"],
    "Ranks that hang, die or leave": ["hvdtrain/guards"],
    "Setting up": ["launch/setup", "launch/*.py"],
    "The wrappers": ["launch/*.sh", "launch/*.sbatch", "launch/*.pbs", "launch/*.flux"],
}
HEAD = """# Errors and warnings

Made from the source by `make docs`. Capitals stand for values. The remedy follows the last colon.
[Troubleshooting](../troubleshooting.md) explains those that need more than a line.
[Exit codes](exit-codes.md) are 0, 1, 2, 3, 75 and 130.
"""


def placeholder(node: ast.expr) -> str:
    """Return how a value is shown: the name of what it is, in capitals."""
    while isinstance(node, ast.Subscript | ast.Call):
        node = node.value if isinstance(node, ast.Subscript) else node.func
    name = getattr(node, "attr", getattr(node, "id", ""))
    return name.strip("_").upper() or "VALUE"


class Source:
    """One module: the functions that it has, and what its names stand for in each."""

    def __init__(self, code: str):
        self.tree = ast.parse(code)
        self.functions = {node.name: node for node in ast.walk(self.tree) if isinstance(node, ast.FunctionDef)}

    def messages(self) -> Iterator[str]:
        for function in [*self.functions.values(), self.tree]:
            names: dict[str, list[ast.expr]] = {}
            for node in ast.walk(function):
                if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                    names.setdefault(node.targets[0].id, []).append(node.value)
            for node in ast.walk(function):
                if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == TABLE:
                    yield from ast.literal_eval(node.value).values()
                if not isinstance(node, ast.Call) or not node.args:
                    continue
                if getattr(node.func, "id", getattr(node.func, "attr", "")) in KINDS:
                    yield from self.texts(node.args[0], names)

    def texts(self, node: ast.expr, names: dict[str, list[ast.expr]]) -> Iterator[str]:
        """Yield what an expression may be, as text. A name in it that stands for text is replaced by each text."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            yield from self.joined(list(node.values), names)
        elif isinstance(node, ast.IfExp):
            yield from self.texts(node.body, names)
            yield from self.texts(node.orelse, names)
        elif isinstance(node, ast.BoolOp):
            for value in node.values:
                yield from self.texts(value, names)
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            for left in self.texts(node.left, names):
                for right in self.texts(node.right, names):
                    yield left + right
        elif isinstance(node, ast.Name) and (value := self.assigned(node, names)) is not None:
            texts = list(self.texts(value, names))
            worded = [text for text in texts if re.search("[a-z]{2}", text)]
            yield from worded or [placeholder(node)]
        else:
            yield placeholder(node)

    @staticmethod
    def assigned(node: ast.Name, names: dict[str, list[ast.expr]]) -> ast.expr | None:
        """Return what the name was given last before this line."""
        before = [value for value in names.get(node.id, []) if value.lineno < node.lineno]
        return max(before, key=lambda value: value.lineno, default=None)

    def joined(self, parts: list[ast.expr], names: dict[str, list[ast.expr]]) -> Iterator[str]:
        texts = [""]
        for part in parts:
            value = part.value if isinstance(part, ast.FormattedValue) else part
            more = list(dict.fromkeys(self.texts(value, names)))[:4]
            texts = [text + one for text in texts for one in more][:16]
        yield from texts


def of_shell(code: str) -> Iterator[str]:
    for said in re.findall(r'(?:refuse|say|echo) "((?:[^"\\]|\\.)*)"', code):
        yield re.sub(r"\$\(\(.*?\)\)|\$\{(\w*).*?\}+|\$(\w+)", lambda m: (m[1] or m[2] or "VALUE").upper(), said)


def messages(path: Path) -> Iterator[str]:
    code = path.read_text()
    found = Source(code).messages() if path.suffix == ".py" or path.name == "setup" else of_shell(code)
    for text in found:
        line = " ".join(text.split())
        if len(re.findall(r"[a-z]{3}", line)) > 2 and " " in line:  # not a value alone
            yield line


def files(patterns: list[str]) -> list[Path]:
    paths = [path for pattern in patterns for path in sorted(ROOT.glob(pattern))]
    return [file for path in paths for file in (sorted(path.rglob("*.py")) if path.is_dir() else [path])]


def literal(line: str) -> str:
    """Return a line as code in Markdown. One with backticks needs a space inside the marks."""
    return f"`` {line} ``" if "`" in line else f"``{line}``"


def page() -> str:
    parts = [HEAD]
    for title, patterns in SECTIONS.items():
        found = sorted({line for path in files(patterns) for line in messages(path)}, key=str.lower)
        parts += [f"## {title}\n", *(f"- {literal(line)}" for line in found), ""]
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
