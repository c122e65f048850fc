"""Attacks that are collected in a file over several sittings: what is drawn, kept, made again, counted and said."""

import json
import random
import sys
from pathlib import Path

import pytest

from tests.chaos import run
from tests.chaos.outcomes import Outcome, Outcomes, table
from tests.chaos.programs import EPOCHS, MNIST
from tests.chaos.run import KINDS, TRANSPORTS, draw

ROOT = Path(__file__).resolve().parents[3]


def outcome(kind: str = "kill", launcher: str = "mpirun", ranks: int = 2, *, good: bool = True) -> Outcome:
    return Outcome(kind, "an attack", good, good, detected=1.5, program="mnist", launcher=launcher, ranks=ranks)


def attacked(monkeypatch, file, *made: Outcome) -> int:
    """Run `make chaos` with two attacks whose outcomes are these; return its exit code."""
    left = list(made)
    monkeypatch.setattr(run, "strike", lambda *_: left.pop(0))
    monkeypatch.setattr(
        sys, "argv", ["run", "--attacks", "2", "--seed", "7", "--kinds", "kill", "--results", str(file)]
    )
    code = run.main()
    assert left == []
    return code


def test_a_failed_outcome_is_said_stays_in_the_file_and_its_attack_is_made_again(tmp_path, monkeypatch, capsys):
    file = tmp_path / "results.jsonl"
    assert attacked(monkeypatch, file, outcome("kill"), outcome("stop", good=False)) == 1
    assert "failed: 1\n    Outcome(kind='stop'" in capsys.readouterr().out
    with file.open("a") as interrupted:
        interrupted.write('{"seed": 7, "number": 3, "outc')
    assert attacked(monkeypatch, file, outcome("stop")) == 0  # of the two, only the one that failed
    assert "2 of 2 passed; 1 are recorded as failed at first" in (said := capsys.readouterr().out)
    assert "failed at first, and made again: 1\n    Outcome(kind='stop'" in said
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(line["number"], line["outcome"]["survived"]) for line in lines] == [(1, True), (2, False), (2, True)]
    assert set(lines[0]) == {"seed", "number", "date", "commit", "outcome"}
    assert attacked(monkeypatch, file) == 0
    assert "| all | 2 | 2 | 2 |" in capsys.readouterr().out


def test_results_alone_are_only_shown_and_attacks_of_several_seeds_are_made_by_one_command(
    tmp_path, monkeypatch, capsys
):
    file = tmp_path / "results.jsonl"
    left = [outcome(), outcome(good=False), outcome(), outcome()]
    monkeypatch.setattr(run, "strike", lambda *_: left.pop(0))
    monkeypatch.setattr(
        sys, "argv", ["run", "--attacks", "2", "--seed", "1,2", "--kinds", "kill", "--results", str(file)]
    )
    assert run.main() == 1
    assert left == []
    made = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(line["seed"], line["number"]) for line in made] == [(1, 1), (1, 2), (2, 1), (2, 2)]
    monkeypatch.setattr(sys, "argv", ["run", "--results", str(file)])
    assert run.main() == 1
    assert "3 of 4 passed; 0 are recorded as failed at first" in capsys.readouterr().out


@pytest.mark.parametrize("line", ["{}", "[1]", '{"seed": 1, "number": 1, "outcome": {"kind": "kill"}}', "no JSON"])
def test_another_file_is_refused(line, tmp_path):
    (tmp_path / "other").write_text(f"{line}\n")
    with pytest.raises(ValueError, match="line 1: not the outcome of an attack"):
        Outcomes(tmp_path / "other")


def test_the_table_counts_by_kind_launcher_and_ranks():
    lines = table([outcome(), outcome("stop", "torchrun", good=False), outcome("stop", "torchrun", 3)]).splitlines()
    rows = {cells[1]: cells[2:5] for line in lines[2:] if (cells := [cell.strip() for cell in line.split("|")])}
    assert rows == {
        "kill": ["1", "1", "1"], "stop": ["2", "1", "1"], "2 ranks": ["2", "1", "1"], "3 ranks": ["1", "1", "1"],
        "under mpirun": ["1", "1", "1"], "under torchrun": ["2", "1", "1"], "all": ["3", "2", "2"],
    }  # fmt: skip


def test_every_kind_strikes_at_a_point_of_a_rank_that_exists():
    chance = random.Random(1)
    for kind in KINDS:
        for _ in range(50):
            attack = draw(chance, [kind], 3, MNIST, restarted=chance.random() < 0.5)
            assert attack["kind"] == kind
            assert 0 <= attack["rank"] < 3
            assert 1 <= attack["count"] <= 8 * EPOCHS
    assert set(TRANSPORTS.values()) == {"mpirun", "gloo", "torchrun"}


def test_the_page_has_the_table_of_the_results():
    made = Outcomes(ROOT / "docs" / "evidence" / "attacks.jsonl")
    assert table(list(made.last().values())) in (ROOT / "docs" / "evidence" / "faults.md").read_text()
