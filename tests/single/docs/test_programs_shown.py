"""Code that a page shows from docs/programs is what stands there, and convert.md's steps are all of the difference."""

import difflib
import re
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PROGRAMS = ROOT / "docs" / "programs"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
EXCERPT = re.compile(r"^```py ((?:docs/programs|tests/foreign|tests/parallel)/\w+\.py)\n(.*?)^```$", re.M | re.S)
WHOLE = re.compile(r"^```python (\w+\.py)\n(.*?)^```$", re.M | re.S)
DIFF = re.compile(r"^```diff\n(.*?)^```", re.M | re.S)
SHOWN = [(page.name, name, code) for page in PAGES for name, code in EXCERPT.findall(page.read_text())]


@pytest.mark.parametrize(("page", "name", "code"), SHOWN, ids=[f"{page}-{Path(name).stem}" for page, name, _ in SHOWN])
def test_an_excerpt_stands_in_the_program(page, name, code):
    lines = (ROOT / name).read_text().splitlines()
    wanted = code.rstrip("\n").splitlines()
    windows = [lines[start : start + len(wanted)] for start in range(len(lines) - len(wanted) + 1)]
    assert any(textwrap.dedent("\n".join(window)) == "\n".join(wanted) for window in windows), code


def test_whole_programs_are_shown_as_they_are():
    found = [(name, code) for page in PAGES for name, code in WHOLE.findall(page.read_text())]
    shown = {name: code for name, code in found if (PROGRAMS / name).exists()}
    assert "xor.py" in shown
    for name, code in shown.items():
        assert code == (PROGRAMS / name).read_text(), name


def test_the_steps_of_the_conversion_are_the_whole_difference():
    """Apart from imports: what the steps leave out, a reader would have to find out."""
    plain, converted = ((PROGRAMS / f"augment{kind}.py").read_text() for kind in ("_plain", ""))
    one, other = ([line.strip() for line in text[text.index("def main") :].splitlines()] for text in (plain, converted))
    different = {line[0] + line[2:] for line in difflib.ndiff(one, other) if line[0] in "+-" and line[2:].strip()}
    page = (ROOT / "docs" / "convert.md").read_text()
    shown = {line[0] + line[1:].strip() for line in "".join(DIFF.findall(page)).splitlines() if line[0] in "+-"}
    assert different == shown


def test_the_difference_between_ddp_and_hvdtrain_is_shown_whole():
    one, other = ((PROGRAMS / name).read_text().splitlines() for name in ("xor_ddp.py", "xor.py"))
    lines = [line for line in difflib.unified_diff(one, other, n=1, lineterm="") if not line.startswith("@@")][2:]
    (shown,) = DIFF.findall((ROOT / "docs" / "migrate.md").read_text())
    assert shown.splitlines() == lines


def test_the_difference_that_readme_shows_is_short_and_stands_in_the_programs():
    (shown,) = DIFF.findall((ROOT / "README.md").read_text())
    assert len(shown.splitlines()) <= 8
    for sign, name in (("-", "xor_plain.py"), ("+", "xor.py")):
        program = [line.strip() for line in (PROGRAMS / name).read_text().splitlines()]
        assert {line[1:].strip() for line in shown.splitlines() if line[0] == sign} < {*program}, name
