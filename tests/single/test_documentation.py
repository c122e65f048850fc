"""What the documentation shows can be typed, and what it links to is there. (The launchers themselves: tests/e2e.)"""

import importlib
import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SCRIPTS = [path for path in sorted((ROOT / "hvdtrain").glob("*.py")) if "\ndef parse(" in path.read_text()]
COMMAND = re.compile(r"(?:python|torchrun[^#\n`|]*?) -m (hvdtrain\.\w+)([^#\n`|]*)")


def commands(text: str) -> list[tuple[str, list[str]]]:
    """Return module and flags of every `python -m hvdtrain.NAME` in `text`; placeholders in capitals stand for a value."""
    found = []
    for module, tail in COMMAND.findall(text.replace("\\\n", " ")):
        flags = re.split(r"  +|[()…]|, | and | or |;|>", tail)[0]
        if "--help" not in flags:
            found.append((module, shlex.split(flags)))
    return found


@pytest.mark.parametrize("path", [*PAGES, *SCRIPTS], ids=lambda path: path.name)
def test_every_command_shown_can_be_parsed(path):
    for module, flags in commands(path.read_text()):
        script = importlib.import_module(module)
        if hasattr(script, "parse"):
            script.parse(flags)


def test_the_readme_shows_commands():
    assert len(commands((ROOT / "README.md").read_text())) >= 6


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(page):
    text = page.read_text()
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        linked = (page.parent / name).resolve() if name else page
        assert linked.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", linked.read_text(), re.M)
            anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in anchors, target
