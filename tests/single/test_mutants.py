"""What `make mutants` breaks: each kind, and nothing that is not Python any more."""

import ast
from pathlib import Path

import pytest

from tests.mutants import broken, mutations

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("x = a < b", ["x = ((a) <= (b))"]),
        ("x = a is None", ["x = ((a) is not (None))"]),
        ("x = a and b", ["x = ((a) or (b))"]),
        ("é = not a", ["é = bool((a))"]),
        ("x = a - b", ["x = ((a) + (b))"]),
        ("f(1)", ["None"]),
        ("x = f'{a}' + 'b'", []),
        ("x = f(1)", []),
    ],
)
def test_each_kind(source, expected):
    assert [broken(source, each) for each in mutations(source)] == expected


def test_all_of_a_file_can_be_run():
    source = (ROOT / "hvdtrain" / "loop" / "step.py").read_text()
    found = list(mutations(source))
    assert len(found) > 50
    for mutation in found:
        ast.parse(broken(source, mutation))
