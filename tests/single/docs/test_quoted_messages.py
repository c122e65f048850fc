"""No page quotes a message that is gone.

A message is compared by its fixed words: where the source has a value in braces, the page has any placeholder.
"""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PYTHON = [
    *sorted((ROOT / "hvdtrain").rglob("*.py")), *sorted((ROOT / "launch").glob("*.py")), ROOT / "launch" / "setup",
]  # fmt: skip
SHELL = [path for suffix in ("sh", "sbatch", "pbs", "flux") for path in sorted((ROOT / "launch").glob(f"*.{suffix}"))]
VALUE = "…"


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


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
OPENING = re.compile(r"(hvdtrain[.\w]*|horovodrun|warning): |stopped by ")


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
    """Yield the messages at the beginning of items under "Messages explained", and lines that look like a message."""
    explained = False
    for line in page.splitlines():
        explained = line == "## Messages explained" or (explained and not line.startswith("## "))
        if explained and line.startswith("- `"):
            yield from re.split(r"`(?:, | or |, or )`", line[line.find("`") : line.rfind("`")])
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


def test_the_search_finds_what_it_is_for():
    found = {page.name: len(list(quotes(page.read_text()))) for page in PAGES}
    assert found["troubleshooting.md"] > 20
    assert found["tuned.md"] > 0
    code = 'raise UserError(f"{n} new words that nobody has written down: try again")'
    said = "new words that nobody has written down: try again"
    (quote,) = quotes(f"## Messages explained\n\n- `N {said}`\n  Why.\n")

    def left(code: str) -> list[str]:
        return stale(quote, [fixed_parts(text) for text in strings(code)])

    assert left(code) == []
    assert left(code.replace("nobody", "somebody")) != []
    assert left(f'"""{quote}"""') != []  # a docstring says nothing to a user
