"""Attempts to break commands from outside: full and odd file systems, directories that change, clocks that jump, limits,
signals, odd files of data and records, careless programs.

python -m pytest tests/chaos                        all, one after the other; several at a time: -n 3
python -m pytest tests/chaos -k no-locks            names, or parts of names
python -m pytest tests/chaos --collect-only -q      a list

Attempts with file systems and host names of their own need root, those with calls that fail gcc; else they are skipped.
"""

import functools
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.attempts import Attempt, missing, parameters, problems
from tests.chaos.hostile_data import DATA
from tests.chaos.jobs import JOBS
from tests.chaos.own_programs import PROGRAMS
from tests.chaos.surroundings import SURROUNDINGS

ATTEMPTS = [*SURROUNDINGS, *JOBS, *DATA, *PROGRAMS]


@pytest.fixture
def here() -> Iterator[Path]:
    """A directory with a short name: MPI's sockets lie below TMPDIR, and their paths may have a hundred bytes."""
    with tempfile.TemporaryDirectory(prefix="at-", dir="/tmp", ignore_cleanup_errors=True) as name:
        yield Path(name) / "it"


@functools.cache
def undisturbed(command: str) -> str:
    """Return the bits with which a command ends in an ordinary directory."""
    with tempfile.TemporaryDirectory(prefix="at-", dir="/tmp") as name:
        assert problems(Attempt("undisturbed", "undisturbed", "nothing is wrong", command), Path(name) / "it") == []
        return parameters(Path(name) / "it")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("attempt", ATTEMPTS, ids=lambda attempt: f"{attempt.kind}: {attempt.name}".replace(" ", "_"))
def test_it_holds(attempt, here):
    if why := missing(attempt):
        pytest.skip(why)
    expected = undisturbed(attempt.bits_of) if attempt.bits_of else ""
    assert problems(attempt, here, expected) == [], attempt.what
    shutil.rmtree(here, ignore_errors=True)
