"""The table of `make mutants` fits the source and the tests as they are."""

import ast
from pathlib import Path

import pytest

from tests.mutants.table import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_what_is_broken_stands_once_in_the_source_and_its_tests_exist(mutant: Mutant):
    text = (ROOT / mutant.file).read_text()
    assert text.count(mutant.old) == 1
    if mutant.file.endswith(".py"):
        ast.parse(text.replace(mutant.old, mutant.new))  # a syntax error would be noticed by any test
    assert mutant.old != mutant.new
    assert mutant.tests
    for test in mutant.tests:
        path, _, name = test.partition("::")
        assert f"def {name}(" in (ROOT / path).read_text() if name else (ROOT / path).is_file()


def test_names_are_unique():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
