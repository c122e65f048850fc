"""docs/reference and the site: what is made from the source is up to date, and complete."""

import ast
import fnmatch
import importlib.util
import os
import re
import subprocess
import sys
import typing
from pathlib import Path

import pytest

from hvdtrain import training
from hvdtrain.launching import exit_codes
from hvdtrain.loop.step import Step
from tests.single.docs import program_of_the_site

ROOT = Path(__file__).resolve().parents[3]
PAGES = ROOT / "docs" / "reference"
reference = program_of_the_site("reference")


def test_the_page_of_flags_is_up_to_date():
    assert (PAGES / "flags.md").read_text() == reference.flags_page(), "python docs/site/reference.py writes it"


def test_the_page_of_the_api_is_up_to_date():
    assert (PAGES / "api.md").read_text() == program_of_the_site("api").page(), (
        "python docs/site/reference.py writes it"
    )


@pytest.mark.parametrize(("name", "kind"), [("run", "Run"), ("step", "Step")])
def test_what_pages_use_of_a_run_and_a_step_is_on_the_page_of_the_api(name, kind):
    pages = [*(ROOT / "docs").glob("*.md"), *(ROOT / "docs/programs").glob("*.py"), ROOT / "README.md"]
    used = {found for path in pages for found in re.findall(rf"(?<![\w./-]){name}\.([a-z]\w*)", path.read_text())}
    page = (PAGES / "api.md").read_text()
    attributes = page.partition(
        f'<a id="{"hvdtrain.training" if kind == "Run" else "hvdtrain.loop.step"}.{kind}"></a>'
    )[2]
    listed = set(re.findall(rf"\b{kind}\.(\w+)", page)) | set(re.findall(r"\w+", attributes.partition("<a id")[0]))
    assert len(used) > 5
    assert used - listed - {"md", "sh"} == set()


def test_every_command_is_listed():
    found = [path for path in (ROOT / "hvdtrain").rglob("*.py") if "\ndef parse(argv" in path.read_text()]
    names = {".".join(path.relative_to(ROOT / "hvdtrain").with_suffix("").parts) for path in found}
    names = {name.removesuffix(".__init__") for name in names}
    assert names == set(reference.COMMANDS)


@pytest.mark.parametrize("command", reference.COMMANDS)
def test_every_flag_has_a_help_text_of_at_most_twenty_words(command):
    lengths = {str(action.option_strings or action.dest): len((action.help or "").split())
               for action in reference.parser_of(command)._actions}  # fmt: skip
    assert {name: words for name, words in lengths.items() if not 1 <= words <= 20} == {}


@pytest.mark.parametrize("command", reference.COMMANDS)
def test_every_flag_has_more_of_a_help_text_than_its_default(command):
    flags = reference.flags_of(reference.parser_of(command))
    assert [name for name, (_, text) in flags.items() if not text] == []


def events() -> dict[str, set[str]]:
    """Return the names of events in the source, with the fields that their calls name."""
    found: dict[str, set[str]] = {}
    for path in (ROOT / "hvdtrain").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "event":
                name = node.args[0]
                if isinstance(name, ast.Constant):
                    found.setdefault(name.value, set()).update(filter(None, (word.arg for word in node.keywords)))
    return found


def test_every_event_and_field_of_the_source_is_listed():
    page = (PAGES / "metrics.md").read_text()
    sections = re.findall(r"^## ([\w ]+)\n((?:(?!## ).*\n)*)", page, re.M)
    listed = {name: set(re.findall(r"`([^`]+)`(?=(?:, `[^`]+`)*: \w)", section)) for name, section in sections}
    shared, found = listed.pop("Every event"), events()
    assert set(found) == set(listed)
    for name, fields in found.items():
        assert fields <= listed[name] | shared, name
    assert len(found) > 10


def test_every_exit_code_is_listed():
    page = (PAGES / "exit-codes.md").read_text()
    codes = [value for name, value in vars(exit_codes).items() if name.isupper() and isinstance(value, int)]
    assert len(codes) == 5
    for code in codes:
        assert f"\n| {code} |" in page


VARIABLE = re.compile(r"[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+")
READ = re.compile(r"environ(?:ment)?(?:\.get\(|\.pop\(|\.setdefault\(|\[)\s*[\"']([A-Z][A-Z0-9_]+)")
# Names of that form that are none: of sysconf, of MLflow's errors, endings, instructions of Python's bytecode.
NO_VARIABLES = {"SC_CLK_TCK", "SC_PAGE_SIZE", "SC_PHYS_PAGES", "RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"}
NO_VARIABLES |= {
    "CROSS_SIZE",
    "LOCAL_SIZE",
    "EXTENDED_ARG",
    "FOR_ITER",
    "JUMP_BACKWARD",
    "STORE_ATTR",
    "LOAD_ATTR",
    "LOAD_METHOD",
    "LOAD_CLOSURE",
    "LOAD_DEREF",
    "LOAD_FAST",
    "LOAD_GLOBAL",
}
NO_VARIABLES |= {"KW_NAMES", "LOAD_CONST", "POP_TOP"}
NO_VARIABLES |= {"STORE_SLICE", "STORE_SUBSCR", "CONTAINS_OP", "BINARY_OP", "BINARY_SUBSCR", "BINARY_SLICE"}


def variables_of_the_source() -> set[str]:
    """Return the names of environment variables: strings of their form, and what is read of the environment."""
    found = set()
    for path in (ROOT / "hvdtrain").rglob("*.py"):
        text = path.read_text()
        found |= set(READ.findall(text))
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and VARIABLE.fullmatch(node.value):
                found.add(node.value)
    for path in [*(ROOT / "launch").glob("*.py"), ROOT / "launch" / "setup"]:
        found |= set(READ.findall(path.read_text()))
    for path in [path for kind in ("*.sh", "*.sbatch", "job.*") for path in (ROOT / "launch").glob(kind)]:
        found |= set(
            re.findall(r"\$\{?((?:HVDTRAIN|SLURM|PBS|PE|PRTE|OMPI|HOROVOD)_[A-Z_]+|DRY_RUN|SCRATCH)", path.read_text())
        )
    return found - NO_VARIABLES


def test_every_environment_variable_of_the_source_is_listed():
    """On the page, `*` stands for any ending."""
    listed = re.findall(r"`([A-Z][A-Z0-9_]*\*?)`", (PAGES / "environment.md").read_text())
    found = variables_of_the_source()
    assert len(found) > 80
    assert {name for name in found if not any(fnmatch.fnmatchcase(name, one) for one in listed)} == set()


# ---- the site

SITE = ROOT / "docs" / "site"
API = ROOT / "docs" / "reference" / "api.md"
GENERATED = {"docs/reference/errors"}  # by `make docs`, not tracked
MISSING = [name for name in ("sphinx", "myst_parser", "furo", "nbconvert") if importlib.util.find_spec(name) is None]
built = pytest.mark.skipif(bool(MISSING), reason=f"no {', '.join(MISSING)}: launch/setup --with docs")


def navigation() -> list[str]:
    """Return the paths in conf.py's NAVIGATION, without importing Sphinx."""
    listed = re.search(r"^NAVIGATION = (\{.*?^\})", (SITE / "conf.py").read_text(), re.M | re.S)
    assert listed is not None
    return [page for pages in eval(listed.group(1)).values() for page in pages]


def build(source: Path, target: Path) -> subprocess.CompletedProcess[str]:
    flags = ["--quiet", "--fail-on-warning", "--keep-going", "-c", str(SITE), "-d", f"{target}-doctrees"]
    # No proxy answers there: the build must not need one.
    nowhere = {f"{kind}_proxy": "http://127.0.0.1:9" for kind in ("http", "https", "all")}
    command = [sys.executable, "-m", "sphinx", *flags, str(source), str(target)]
    return subprocess.run(command, env={**os.environ, **nowhere}, capture_output=True, text=True, timeout=250)


def test_the_navigation_lists_every_page_once():
    pages = navigation()
    assert len(pages) == len(set(pages))
    found = [path for kind in ("*.md", "reference/*.md", "*.ipynb") for path in (ROOT / "docs").glob(kind)]
    there = {str(path.relative_to(ROOT).with_suffix("")) for path in found}
    assert there <= set(pages)
    for page in pages:
        assert page in GENERATED or list(ROOT.glob(f"{page}.*")), page


def test_the_api_page_has_what_programs_import():
    named = set(re.findall(r"hvdtrain\.training\.(\w+)", API.read_text()))
    assert set(training.__all__) <= named


def test_the_api_page_has_the_batch_of_a_step():
    yielded = typing.get_type_hints(Step.batch.fget)["return"]
    assert f'<a id="{yielded.__module__}.{yielded.__qualname__}"></a>' in API.read_text()


@built
@pytest.mark.slow  # `make docs` builds it, too
def test_the_site_is_built_without_a_warning_and_asks_no_other_host(tmp_path):
    site = tmp_path / "site"
    subprocess.run([sys.executable, str(SITE / "messages.py")], check=True)  # as `make docs` does
    done = build(ROOT, site)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    for page in [*navigation(), "README", "search", "index"]:
        text = (site / f"{page}.html").read_text()
        fetched = re.findall(r"""<(?:script|img|link|iframe)\b[^>]*?\b(?:src|href)=["']([^"']+)""", text)
        assert [url for url in fetched if "//" in url] == [], page
        files = [url.split("#")[0].split("?")[0] for url in fetched if not url.startswith("data:")]
        assert [name for name in files if name and not (site / page).parent.joinpath(name).exists()] == [], page
    styles = "".join(path.read_text() for path in site.rglob("*.css"))
    assert not re.search(r"(?:url\(|@import)\s*['\"]?(?:https?:)?//", styles)
    assert "launcher" in (site / "searchindex.js").read_text()
    api = (site / "docs" / "reference" / "api.html").read_text()
    for name in ("hvdtrain.training.Run.steps", "hvdtrain.loop.step.Step.backward", "hvdtrain.training.positive"):
        assert f'id="{name}"' in api, name
    assert (site / "docs" / "ladder.html").read_text().count("data:image/svg+xml;base64,") >= 3
    assert "After the loop, the gradients are those of the global batch." in api
