"""What the documentation shows can be typed, and stands in programs; what it links to is there. (tests/e2e/docs runs it.)"""

import ast
import difflib
import functools
import importlib.util
import os
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bench.rows import groups
from tests.peers import exact

ROOT = Path(__file__).resolve().parents[3]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINKING = [*PAGES, ROOT / "CHANGELOG.md", ROOT / "containers" / "README.md"]
LINKING += [ROOT / "docs" / "ladder.ipynb"]  # its JSON leaves links as they are
SCRIPTS = [path for path in sorted((ROOT / "hvdtrain").glob("*.py")) if "\ndef parse(" in path.read_text()]
PYTHON = [path for folder in ("hvdtrain", "tests") for path in (ROOT / folder).rglob("*.py")]
FLAGS = {flag for path in PYTHON for flag in re.findall(r'"(--[a-z][a-z-]*)"', path.read_text())}
COMMAND = re.compile(r"(?:python|torchrun[^#\n`|]*?) -m (hvdtrain(?:\.\w+)+)([^#\n`|]*)")


def commands(text: str) -> list[tuple[str, list[str]]]:
    """Return module and flags of every `python -m hvdtrain.NAME` in `text`; placeholders in capitals stand for a value."""
    found = []
    for module, tail in COMMAND.findall(text.replace("\\\n", " ")):
        flags = re.split(r"  +|[()…]|, | and | or |[;>&]", tail)[0]
        if "--help" not in flags:
            found.append((module, shlex.split(flags)))
    return found


@pytest.mark.parametrize("path", [*PAGES, *SCRIPTS], ids=lambda path: path.name)
def test_every_command_shown_can_be_parsed(path):
    for module, flags in commands(path.read_text()):
        importlib.import_module(module).parse(flags)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_commands_that_a_help_text_names_exist(path):
    """`hvdtrain.datasets.tar_shards` was named as what makes shards: it can be imported, and does nothing when run."""
    for name in re.findall(r"\bhvdtrain(?:\.\w+)+", ast.get_docstring(ast.parse(path.read_text()))):
        assert callable(importlib.import_module(name).main), name


def of_the_tests(text: str) -> list[tuple[str, list[str]]]:
    """Return module and flags of every `python -m tests.NAME`, and of `make bench` and `make chaos`, in `text`."""
    text = re.sub(r'make bench BENCH="([^"]*)"', r"python -m tests.bench \1", text.replace("\\\n", " "))
    text = re.sub(r'make chaos CHAOS="([^"]*)"', r"python -m tests.chaos.run \1", text)
    text = re.sub(r'--script\s+"[^"]*"', "--script X", text)  # what it measures
    found = re.findall(r"python -m (tests(?:\.\w+)+)([^#\n`|]*)", text)
    return [(module, re.findall(r"(?<!\S)--[a-z][a-z-]*(?:[ =][\w,.-]+)?", tail)) for module, tail in found]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_measurements_shown_can_be_made(page):
    """Their modules exist, and their flags do: in the module, in another of tests, or in the program that it starts."""
    rows = {group.name for group in groups()}
    for module, flags in of_the_tests(page.read_text()):
        assert importlib.util.find_spec(module) is not None, module
        for name, _, value in (flag.replace("=", " ").partition(" ") for flag in flags):
            assert name in FLAGS, f"{module} {name}"
            if name == "--rows":
                assert set(value.split(",")) <= rows | {"none"}, value


def test_commands_and_measurements_are_found_in_the_pages():
    assert len(commands((ROOT / "docs" / "run.md").read_text())) >= 6
    assert of_the_tests('make bench BENCH="--rows jpeg,dali --x 1"') == [("tests.bench", ["--rows jpeg,dali", "--x 1"])]


@pytest.mark.parametrize("page", LINKING, ids=lambda path: str(path.relative_to(ROOT)))
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


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_wrappers_and_make_take_what_is_shown(page, tmp_path):
    (tmp_path / "launch").symlink_to(ROOT / "launch")  # wrappers refuse some names of the directory that they start in
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for line in re.findall(r"^ *((?:launch/\w+\.sh|make) [^#\n]*)", page.read_text(), re.M):
        wrapper = line.startswith("launch/")
        command = shlex.split(line) if wrapper else ["make", "-n", *shlex.split(line)[1:]]
        environment = {**os.environ, "PATH": path, "DRY_RUN": "1"}
        done = subprocess.run(
            command, cwd=tmp_path if wrapper else ROOT, env=environment, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_tests_that_are_named_exist(page):
    text = page.read_text()
    for name in re.findall(
        r"(?<![\w/.*-])(?:launch|containers|tests|docs|hvdtrain)/[\w/-]+\.(?:py|sh|md|yaml|sbatch|pbs|flux|def|txt)\b",
        text,
    ):
        assert (ROOT / name).exists(), name
    known = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    for name in re.findall(r"`(test_\w+)`", text):
        assert f"def {name}(" in known, name


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_python_shown_runs(page):
    for code in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S):
        exec(compile(code, str(page), "exec"), {})


EVIDENCE = [page for page in (ROOT / "docs" / "evidence").glob("*.md") if page.stem not in ("index", "measuring")]


@pytest.mark.parametrize("page", EVIDENCE, ids=lambda path: path.name)
def test_a_page_of_evidence_says_first_what_was_measured_and_how(page):
    said = dict(
        re.findall(r"^\| ([^|]+?) \| (.+) \|$", page.read_text().partition("\n\n")[2].partition("\n\n")[0], re.M)
    )
    assert list(said)[-5:] == ["Claim", "Command", "Machine", "Runs, spread", "Date"]


def test_the_index_of_evidence_has_every_page():
    index = (ROOT / "docs" / "evidence" / "index.md").read_text()
    names = {page.name for page in (ROOT / "docs" / "evidence").glob("*.md")} - {"index.md"}
    assert {name for name in names if f"]({name})" not in index} == set()


@pytest.mark.parametrize(
    ("page", "row", "names"),
    [
        ("README.md", "killed, on two ranks", ["torch's recipe", "accelerate", "hvdtrain"]),
        ("docs/compared.md", "the bits of an uninterrupted run",
            ["torch's recipe", "accelerate", "Fabric", None, "hvdtrain"]),
        ("README.md", "the same, their loops with", ["torch's recipe, exact_loader", "accelerate, exact_loader", None]),
        ("docs/compared.md", "the same, with .`exact_loader`", ["torch's recipe, exact_loader", "accelerate, exact_loader",
            "Fabric, exact_loader", "Horovod, exact_loader", None]),
    ],
)  # fmt: skip
def test_comparisons_repeat_what_was_measured_of_peers(page, row, names):
    pages = [ROOT / "docs/evidence" / name for name in ("peers.md", "loader.md")]
    measured = "".join(page.read_text() for page in pages).replace("**", "")
    bits = dict(re.findall(r"^\| ([^|]+) \| [^|]+ \| 2 \|(?: [^|]+ \|){3} (\d of \d) \|", measured, re.M))
    (line,) = re.findall(rf"^\| {row}.*$", (ROOT / page).read_text().replace("**", ""), re.M)
    for cell, name in zip([cell.strip() for cell in line.split("|")[2:-1]], names, strict=True):
        assert name is None or cell.startswith(bits[name]), name
    for name, exact_in in re.findall(r"(ignite|Composer) (?:was exact )?in\s(\d of \d)", (ROOT / page).read_text()):
        assert exact_in == bits[name]


@pytest.mark.parametrize("name", exact.diffs())
def test_a_diff_of_the_loaders_page_is_short_and_fits_its_program(name):
    source = (exact.HERE / name).read_text()
    compile(exact.applied(source, exact.diffs()[name]), name, "exec")
    assert exact.added(name) <= 5
    with pytest.raises(ValueError, match="is not in list"):
        exact.applied(source.replace("import task\n", ""), [" import task"])


# ---- what pages show of docs/programs

PROGRAMS = ROOT / "docs" / "programs"
OWN_PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
EXCERPT = re.compile(r"^```py ((?:docs/programs|tests/foreign|tests/parallel)/\w+\.py)\n(.*?)^```$", re.M | re.S)
WHOLE = re.compile(r"^```python (\w+\.py)\n(.*?)^```$", re.M | re.S)
DIFF = re.compile(r"^```diff\n(.*?)^```", re.M | re.S)
SHOWN = [(page.name, name, code) for page in OWN_PAGES for name, code in EXCERPT.findall(page.read_text())]


@pytest.mark.parametrize(("page", "name", "code"), SHOWN, ids=[f"{page}-{Path(name).stem}" for page, name, _ in SHOWN])
def test_an_excerpt_stands_in_the_program(page, name, code):
    lines = (ROOT / name).read_text().splitlines()
    wanted = code.rstrip("\n").splitlines()
    windows = [lines[start : start + len(wanted)] for start in range(len(lines) - len(wanted) + 1)]
    assert any(textwrap.dedent("\n".join(window)) == "\n".join(wanted) for window in windows), code


def test_whole_programs_are_shown_as_they_are():
    found = [(name, code) for page in OWN_PAGES for name, code in WHOLE.findall(page.read_text())]
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


# ---- messages that pages quote

SOURCES = [*(ROOT / "hvdtrain").rglob("*.py"), *(ROOT / "launch").glob("*.py"), ROOT / "launch" / "setup"]
SHELL = [path for suffix in ("sh", "sbatch", "pbs", "flux") for path in (ROOT / "launch").glob(f"*.{suffix}")]
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
    said = [text.replace("`", "") for path in SOURCES for text in strings(path.read_text())]
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
