"""docs/reference/errors.md has every message of hvdtrain and launch/ to a user, and no page quotes one that is gone.

A message is compared by its fixed words: where the source has a value in braces, the page has any placeholder.
"""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "reference" / "errors.md").read_text().replace("`", "").replace("\\|", "|")
LINES = PAGE.splitlines()
# What is raised with a message for users, and what says one without raising.
KINDS = {"UserError", "Failure", "ArgumentTypeError", "Refusal", "BuildFailure", "BadFile", "DownloadFailed", "Damaged"}
KINDS |= {"NotThere", "error", "_warn", "warn", "_end", "Diagnosis"}
OPENINGS = ("warning: ", "hvdtrain: error: ")
PYTHON = [
    *sorted((ROOT / "hvdtrain").rglob("*.py")),
    *sorted((ROOT / "launch").glob("*.py")),
    ROOT / "launch" / "setup",
]
SHELL = [path for suffix in ("sh", "sbatch", "pbs", "flux") for path in sorted((ROOT / "launch").glob(f"*.{suffix}"))]
VALUE = "…"


class Source:
    """One module: the functions that it has, and what its names stand for in each."""

    def __init__(self, path: Path):
        self.tree = ast.parse(path.read_text())
        self.functions = {node.name: node for node in ast.walk(self.tree) if isinstance(node, ast.FunctionDef)}

    def messages(self) -> Iterator[tuple[int, str]]:
        """Yield line and text of each message, and of each sentence that a name in it stands for."""
        for function in [*self.functions.values(), self.tree]:
            names: dict[str, list[ast.expr]] = {}
            for node in ast.walk(function):
                if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                    names.setdefault(node.targets[0].id, []).append(node.value)
                if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
                    names.setdefault(node.target.id, []).append(node.value)
            for node in ast.walk(function):
                if isinstance(node, ast.Call) and node.args:
                    name = getattr(node.func, "id", getattr(node.func, "attr", ""))
                    if name in KINDS or opening(node.args[0]).startswith(OPENINGS):
                        yield from self.sentences(node.args[0], names, set())

    def sentences(self, node: ast.expr, names: dict, seen: set[str]) -> Iterator[tuple[int, str]]:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
        elif isinstance(node, ast.JoinedStr):
            fixed = [str(part.value) if isinstance(part, ast.Constant) else VALUE for part in node.values]
            yield node.lineno, "".join(fixed)
            for part in node.values:
                if isinstance(part, ast.FormattedValue):
                    yield from self.sentences(part.value, names, seen)
        elif isinstance(node, ast.IfExp | ast.BoolOp | ast.BinOp):
            for inner in ast.iter_child_nodes(node):
                if isinstance(inner, ast.expr) and inner is not getattr(node, "test", None):
                    yield from self.sentences(inner, names, seen)
        elif isinstance(node, ast.Name) and node.id not in seen:
            for value in names.get(node.id, []):
                yield from self.sentences(value, names, seen | {node.id})
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id not in seen:
            function = self.functions.get(node.func.id)
            for inner in ast.walk(function) if function else ():
                if isinstance(inner, ast.Return) and inner.value is not None:
                    yield from self.sentences(inner.value, {}, seen | {node.func.id})


def opening(node: ast.expr) -> str:
    first = node.values[0] if isinstance(node, ast.JoinedStr) else node
    return first.value if isinstance(first, ast.Constant) and isinstance(first.value, str) else ""


def shell_messages(path: Path) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(path.read_text().splitlines(), 1):
        for said in re.findall(r'(?:refuse|say|echo) "((?:[^"\\]|\\.)*)"', line):
            yield number, re.sub(r"\$\(\(.*?\)\)|\$\{.*?\}+|\$\w+", VALUE, said)


def spans(parts: list[str], line: str) -> list[slice]:
    """Return where the parts stand in the line, one after the other, up to the first that does not."""
    found, end = [], 0
    for part in parts:
        start = line.find(part, end)
        if start < 0:
            break
        end = start + len(part)
        found.append(slice(start, end))
    return found


def undocumented(messages: Iterator[tuple[int, str]]) -> list[str]:
    """Return the messages of two words or more that no line of the page has, each with its line in the source."""
    missing = []
    for line, said in sorted(set(messages)):
        parts = [part for part in re.split(f"{VALUE}|\n", said.replace("`", "").strip()) if part]
        known = any(len(spans(parts, shown)) == len(parts) for shown in LINES)
        if not known and " " in said.strip() and len(re.findall(r"[a-z]{3}", said)) > 1:
            missing.append(f"line {line}: {said}")
    return missing


@pytest.mark.parametrize("path", PYTHON, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_message_of_the_source_is_in_the_docs(path):
    assert undocumented(Source(path).messages()) == []


@pytest.mark.parametrize("path", SHELL, ids=lambda path: path.name)
def test_every_message_of_the_wrappers_is_in_the_docs(path):
    assert undocumented(shell_messages(path)) == []


# ------------------------------------------------------------------------------ and each quoted message is in the source

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
OPENING = re.compile(r"(hvdtrain[.\w]*|horovodrun|warning|hint): |stopped by ")


def strings(code: str) -> Iterator[str]:
    """Yield each string of `code` that is no docstring, with VALUE for the values in it."""
    tree = ast.parse(code)
    inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else VALUE for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside | docstrings:
            yield node.value


def plain(text: str) -> str:
    return re.sub(r"\s+", " ", text.replace("`", ""))


def fixed_parts(said: str) -> list[str]:
    return [plain(part) for part in re.split(f"{VALUE}|\n", said) if part.strip()]


@functools.cache
def everything_said() -> list[list[str]]:
    said = [text for path in PYTHON for text in strings(path.read_text())]
    said += [text for path in SHELL for _, text in shell_messages(path)]
    return [parts for text in dict.fromkeys(said) if len(re.findall(r"\w+", " ".join(parts := fixed_parts(text)))) > 1]


def quotes(page: str) -> Iterator[str]:
    """Yield what stands in code marks in the first column of tables headed "it says", and lines that look like a message."""
    in_table = False
    for line in page.splitlines():
        heading = line.lower().startswith("| it says ")
        in_table = line.startswith("|") and (in_table or heading)
        if in_table and not heading:
            cell = re.split(r"(?<!\\) \|", line)[0].replace("\\|", "|")
            yield from re.split(
                r"`(?:, | or | \(and |, the same of | in place of )`", cell[cell.find("`") : cell.rfind("`")]
            )
        elif OPENING.match(line.strip(" `|")):
            yield line.strip(" `|")


def stale(quote: str, said: list[list[str]] | None = None) -> list[str]:
    """Return runs of words of `quote` that no message has, if they are too many for values.

    A string of the source fits if all its fixed parts stand in the quote, in their order. Where the source has a value, the
    quote may have other words: two in a row, and no more than half. Capitals, numbers and file names are values.
    """
    said = everything_said() if said is None else said
    line = plain(quote).strip()
    known = [False] * len(line)
    if "..." in line:  # a message in part: each piece of it is somewhere
        everything = "\0".join(VALUE.join(parts) for parts in said)
        for piece in re.finditer(r"[^A-Z\d.]{8,}", line):
            known[slice(*piece.span())] = [piece.group().strip(" :,;") in everything] * len(piece.group())
    for parts in said:
        for span in spans(parts, line) if all(part in line for part in parts) else ():
            known[span] = [True] * (span.stop - span.start)
    words = [
        (match.group(), all(known[slice(*match.span())]))
        for match in re.finditer(r"(?<![\w.])[a-z][a-z-]+(?!\.?\w)", line)
    ]
    runs, run = [], []
    for word, is_known in [*words, ("", True)]:
        if not is_known:
            run.append(word)
        elif run:
            runs.append(run)
            run = []
    unknown = sum(map(len, runs))
    return [" ".join(run) for run in runs if len(run) > 2 or unknown > len(words) / 2]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_message_that_a_page_quotes_is_in_the_source(page):
    gone = {quote: found for quote in quotes(page.read_text()) if (found := stale(quote))}
    assert gone == {}


def test_both_searches_find_what_they_are_for(tmp_path):
    assert len({said for path in PYTHON for _, said in Source(path).messages()}) > 150
    found = {page.name: len(list(quotes(page.read_text()))) for page in PAGES}
    assert found["errors.md"] > 300
    assert min(found["tuned.md"], found["watching.md"]) > 0
    code = 'raise UserError(f"{n} new words that nobody has written down: try again")'
    (tmp_path / "new.py").write_text(code)
    said = "new words that nobody has written down: try again"
    assert undocumented(Source(tmp_path / "new.py").messages()) == [f"line 1: {VALUE} {said}"]
    (quote,) = quotes(f"| it says | meaning |\n| `N {said}` | |\n")

    def left(code: str) -> list[str]:
        return stale(quote, [fixed_parts(text) for text in strings(code)])

    assert left(code) == []
    assert left(code.replace("nobody", "somebody")) != []
    assert left(f'"""{quote}"""') != []  # a docstring says nothing to a user
