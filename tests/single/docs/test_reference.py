"""docs/reference: what is made from the source is up to date, and complete."""

import ast
import importlib.util
import re
from pathlib import Path

import pytest

from hvdtrain.launching import exit_codes
from hvdtrain.output.events import EVENTS, EVERY_EVENT

ROOT = Path(__file__).resolve().parents[3]
PAGES = ROOT / "docs" / "reference"
spec = importlib.util.spec_from_file_location("reference", ROOT / "docs" / "site" / "reference.py")
assert spec is not None
assert spec.loader is not None
reference = importlib.util.module_from_spec(spec)
spec.loader.exec_module(reference)


@pytest.mark.parametrize("name", ["flags", "metrics"])
def test_pages_made_from_the_source_are_up_to_date(name):
    made = getattr(reference, f"{name}_page")()
    assert (PAGES / f"{name}.md").read_text() == made, "python docs/site/reference.py writes it"


def test_every_command_is_listed():
    found = [path for path in (ROOT / "hvdtrain").rglob("*.py") if "\ndef parse(" in path.read_text()]
    names = {".".join(path.relative_to(ROOT / "hvdtrain").with_suffix("").parts) for path in found}
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
    found = events()
    assert set(found) == set(EVENTS)
    for name, fields in found.items():
        assert fields <= EVENTS[name][1].keys(), name
    assert len(found) > 10


@pytest.mark.parametrize("fields", [EVERY_EVENT, *(fields for _, fields in EVENTS.values())])
def test_fields_are_explained_in_a_few_words(fields):
    assert all(1 <= len(text.split()) <= 25 for text in fields.values())


def test_every_exit_code_is_listed():
    page = (PAGES / "exit-codes.md").read_text()
    codes = [value for name, value in vars(exit_codes).items() if name.isupper() and isinstance(value, int)]
    assert len(codes) == 4
    for code in codes:
        assert f"\n| {code} |" in page


def test_every_variable_of_ours_is_listed():
    """Those that only our own processes set for each other begin the second table."""
    page = (PAGES / "environment.md").read_text()
    found = set()
    for path in [*(ROOT / "hvdtrain").rglob("*.py"), *(ROOT / "launch").glob("*.sh"), *(ROOT / "launch").glob("*.py")]:
        found |= set(re.findall(r"(?<!_)HVDTRAIN_[A-Z]\w*", path.read_text()))
    assert found
    assert {name for name in found if f"`{name}`" not in page} == set()
