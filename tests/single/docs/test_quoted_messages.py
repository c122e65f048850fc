"""No page quotes a message that is gone: the words between two values of a quote stand so in a string of the source."""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PYTHON = [*(ROOT / "hvdtrain").rglob("*.py"), *(ROOT / "launch").glob("*.py"), ROOT / "launch" / "setup"]
SHELL = [path for suffix in ("sh", "sbatch", "pbs", "flux") for path in (ROOT / "launch").glob(f"*.{suffix}")]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
OPENING = re.compile(r"(hvdtrain[.\w]*|horovodrun|warning): |stopped by ")
VALUE = re.compile(r"\S*[A-Z\d_./=]\S*|\b[b-z]\b")  # in a quote: a placeholder, a number, a file, a name of one letter

JOINED = {"it is at", "epochs over all ranks", "cores here", "threads on"}  # of two strings of the source


def strings(code: str) -> Iterator[str]:
    """Yield each string of `code` that is no docstring, with "|" for the values in it."""
    tree = ast.parse(code)
    inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "|" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside | docstrings:
            yield node.value


@functools.cache
def everything_said() -> str:
    said = [text.replace("`", "") for path in PYTHON for text in strings(path.read_text())]
    return "|".join([*said, *(path.read_text() for path in SHELL)])


def quotes(page: str) -> Iterator[str]:
    """Yield the messages at the beginning of items under "Messages explained", and lines that look like a message."""
    explained = False
    for line in page.splitlines():
        explained = line == "## Messages explained" or (explained and not line.startswith("## "))
        if explained and line.startswith("- `"):
            yield from re.split(r"`(?:, | or |, or )`", line[line.find("`") : line.rfind("`")])
        elif OPENING.match(line.strip(" `|")):
            yield line.strip(" `|")


def stale(quote: str, said: str) -> list[str]:
    """Return the words between two values of a quote that do not stand together in a string of the source."""
    parts = re.split(r"[^a-z' -]+", VALUE.sub("|", quote.replace("`", "")))
    pieces = [" ".join(part.split()) for part in parts if part.strip(" -'")]
    return [piece for piece in pieces if piece not in JOINED and not re.search(rf"(?<![a-z]){piece}(?![a-z])", said)]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_message_that_a_page_quotes_is_in_the_source(page):
    gone = {quote: found for quote in quotes(page.read_text()) if (found := stale(quote, everything_said()))}
    assert gone == {}


def test_the_search_finds_what_it_is_for():
    found = {page.name: len(list(quotes(page.read_text()))) for page in PAGES}
    assert found["troubleshooting.md"] > 20
    assert found["tuned.md"] > 0
    (quote,) = quotes("## Messages explained\n\n- `N new words that nobody has written down: try again`\n  Why.\n")
    code = 'raise UserError(f"{n} new words that nobody has written down: try again")'
    for changed, is_stale in ((code, False), (code.replace("nobody", "somebody"), True), (f'"""{quote}"""', True)):
        assert bool(stale(quote, "|".join(strings(changed)))) == is_stale
