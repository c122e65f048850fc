"""Attacks that are collected in a file over several sittings: what is drawn, kept, left out and counted."""

import json
import random
import subprocess
import sys

import pytest

from tests.chaos.collected import Results
from tests.chaos.outcome import Outcome, table
from tests.chaos.programs import EPOCHS, MNIST
from tests.chaos.run import KINDS, TRANSPORTS, draw
from tests.e2e.launchers import ROOT


def outcome(kind: str = "kill", launcher: str = "mpirun", ranks: int = 2, *, good: bool = True) -> Outcome:
    return Outcome(kind, "an attack", good, good, detected=1.5, program="mnist", launcher=launcher, ranks=ranks)


def test_a_second_sitting_has_the_outcomes_of_the_first(tmp_path):
    file = tmp_path / "results.jsonl"
    first = Results(file)
    first.add(7, 1, outcome())
    first.add(7, 2, outcome("stop", good=False))
    with file.open("a") as interrupted:
        interrupted.write('{"seed": 7, "number": 3, "outc')
    second = Results(file)
    assert second.outcomes == first.outcomes
    line = json.loads(file.read_text().splitlines()[0])
    assert set(line) == {"seed", "number", "date", "commit", "outcome"}
    second.add(7, 3, outcome("slow"))
    assert [kept.kind for kept in Results(file).outcomes.values()] == ["kill", "stop", "slow"]


@pytest.mark.parametrize("line", ["{}", "[1]", '{"seed": 1, "number": 1, "outcome": {"kind": "kill"}}', "no JSON"])
def test_another_file_is_refused(line, tmp_path):
    (tmp_path / "other").write_text(f"{line}\n")
    with pytest.raises(ValueError, match="line 1: not the outcome of an attack"):
        Results(tmp_path / "other")


def test_the_table_counts_by_kind_launcher_and_ranks():
    lines = table([outcome(), outcome("stop", "torchrun", good=False), outcome("stop", "torchrun", 3)]).splitlines()
    rows = {cells[1]: cells[2:5] for line in lines[2:] if (cells := [cell.strip() for cell in line.split("|")])}
    assert rows == {
        "kill": ["1", "1", "1"], "stop": ["2", "1", "1"], "(2 ranks)": ["2", "1", "1"], "(3 ranks)": ["1", "1", "1"],
        "(under mpirun)": ["1", "1", "1"], "(under torchrun)": ["2", "1", "1"], "all": ["3", "2", "2"],
    }  # fmt: skip


def test_no_attacks_print_the_table_of_the_file(tmp_path):
    file = tmp_path / "results.jsonl"
    Results(file).add(7, 1, outcome())
    words = [sys.executable, "-m", "tests.chaos.run", "--attacks", "0", "--results", str(file)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1].startswith("| all | 1 | 1 | 1 |")


def test_every_kind_strikes_at_a_point_of_a_rank_that_exists():
    chance = random.Random(1)
    for kind in KINDS:
        for _ in range(50):
            attack = draw(chance, [kind], 3, MNIST, restarted=chance.random() < 0.5)
            assert attack["kind"] == kind
            assert 0 <= attack["rank"] < 3
            assert 1 <= attack["count"] <= 8 * EPOCHS
    assert set(TRANSPORTS.values()) == {"mpirun", "gloo", "torchrun"}
