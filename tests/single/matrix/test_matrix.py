"""tests/matrix: which cells there are, what is remembered, and the table. (Setting cells up is what the command is for.)"""

import itertools
import json
import sys

import pytest

from tests.matrix import __main__ as matrix


def test_each_pair_of_values_is_in_some_cell_and_there_are_few_cells():
    lists = matrix.PYTHONS, matrix.TORCHES, matrix.MPIS
    cells = matrix.every_pair(*lists)
    assert len(cells) == len(set(cells)) == len(matrix.TORCHES) * len(matrix.MPIS) < 60
    for one, other in itertools.combinations(range(3), 2):
        met = {(cell[one], cell[other]) for cell in cells}
        none = {("3.13", "2.3.1")}  # PyTorch has no such wheel
        assert met == set(itertools.product(lists[one], lists[other])) - none


def test_cells_that_have_a_result_count():
    lists = ["3.11", "3.12"], ["2.15.0"], ["none", "system"]
    known = ["3.12/2.15.0/system", "3.11/2.15.0/none", "3.11/2.6.0/none"]  # the last one is of other values
    cells = list(map(str, matrix.every_pair(*lists, known=known)))
    assert set(cells[:2]) == set(known[:2])
    assert set(cells[2:]) == {"3.11/2.15.0/system", "3.12/2.15.0/none"}


@pytest.fixture
def outcomes(monkeypatch, tmp_path):
    """No cell is set up: launch/setup and the examination end as told."""
    ends: list[tuple[int, str]] = []
    called: list[list[str]] = []

    def call(words, directory, seconds, first=""):
        called.append([str(word) for word in words] + [first.rpartition("/")[2]] * bool(first))
        return ends.pop(0)

    monkeypatch.setattr(matrix, "call", call)
    monkeypatch.setattr(matrix.subprocess, "run", lambda words, **_: type("Done", (), {"stdout": "abc\n"})())
    monkeypatch.setattr(matrix.shutil, "which", lambda name: f"/bin/{name}" if name != "python3.14" else None)
    return ends, called


def command(monkeypatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["matrix", *words])
    return matrix.main()


def test_what_has_a_result_is_not_run_again(monkeypatch, tmp_path, outcomes, capsys):
    ends, called = outcomes
    results = str(tmp_path / "results.jsonl")
    words = ["--pythons", "3.12", "--torches", "2.15.0", "--mpis", "none,system", "--results", results]
    checks = json.dumps({"checks": {"gloo": "ok", "tuned": "ok"}})
    ends += [(0, ""), (0, f"hello\n{checks}\n"), (2, "setup: error: no mpicxx on PATH\n")]
    assert command(monkeypatch, *words) == 0  # what is refused in one line is no failure
    assert [words[:2] for words in called][::2] == [["/bin/python3.12", "launch/setup"]] * 2
    assert called[0][2:] == ["--mpi", "none", "--cpu", "--torch", "2.15.0"]
    capsys.readouterr()
    assert command(monkeypatch, *words) == 0
    said = capsys.readouterr().out
    assert said.count("has a result") == 2
    assert "| 3.12 | 2.15.0 | none | all 2 checks |" in said
    assert "| 3.12 | 2.15.0 | system | refused: setup: error: no mpicxx on PATH |" in said


FAILURES = {
    "3.12/2.15.0/none": ([(0, ""), (0, json.dumps({"checks": {"gloo": "exit code 1", "tuned": "ok"}}))], 1, "failed: gloo"),
    "3.14/2.15.0/none": ([], 0, "skipped: no python3.14 on PATH"),
    "3.12/2.3.1/none": ([(1, "compiling ...\ncc1plus: error\nsetup: log: x\n")], 1, "failed: cc1plus: error"),
}  # fmt: skip


@pytest.mark.parametrize("cell", FAILURES)
def test_what_fails_or_is_missing_is_a_result(cell, monkeypatch, tmp_path, outcomes, capsys):
    ends, code, said = FAILURES[cell]
    outcomes[0].extend(ends)
    results = str(tmp_path / "results.jsonl")
    assert command(monkeypatch, "--only", cell, "--results", results, "--work", str(tmp_path)) == code
    assert f"| {cell.replace('/', ' | ')} | {said}" in capsys.readouterr().out
    log = tmp_path / f"matrix-{cell.replace('/', '-')}.log"
    assert log.exists() == ("cc1plus" in said)


def test_mpich_is_found_under_the_names_that_debian_gives_it(monkeypatch, tmp_path, outcomes):
    ends, called = outcomes
    ends += [(0, ""), (0, json.dumps({"checks": {"mpirun": "ok"}}))]
    results = str(tmp_path / "results.jsonl")
    assert command(monkeypatch, "--only", "3.12/2.15.0/mpich", "--results", results, "--work", str(tmp_path)) == 0
    assert called[0][2:] == ["--mpi", "system", "--cpu", "--torch", "2.15.0", "bin"]
    assert called[1][1:] == ["-m", "tests.matrix.examine", "--mpi", "mpich", "bin"]
    assert matrix.mpich(tmp_path / "bin") == str(tmp_path / "bin")
    assert (tmp_path / "bin" / "mpirun").readlink().name == "mpirun.mpich"
