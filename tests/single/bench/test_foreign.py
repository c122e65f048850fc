"""tests/bench/foreign.py: what it makes of its runs. (That it runs anything at all is seen when it is used.)"""

import sys

import pytest

from tests.bench import foreign
from tests.bench.foreign import Kind


def runs(*seconds: tuple[float | None, float | None]) -> dict[Kind, list[foreign.Seconds]]:
    return {Kind("sparse", "MPI", 2): [dict(zip(foreign.SIDES, pair, strict=True)) for pair in seconds]}


def test_table_has_medians_and_the_ratio_of_each_round():
    lines = foreign.table(runs((4.0, 2.0), (9.0, 3.0), (10.0, 2.5))).splitlines()
    assert lines[2:] == ["| sparse | MPI | 2 | 3 | 9 (4 to 10) | 2.5 (2 to 3) | 3 (2 to 4) |"]


def test_a_round_with_a_failed_run_does_not_count_and_is_said():
    assert "| 1 (2 failed) | 4 (4 to 4) | 2 (2 to 2) |" in foreign.table(runs((4.0, 2.0), (None, 2.0), (4.0, None)))
    assert "| 0 (1 failed) | - | - | - |" in foreign.table(runs((None, None)))


def test_every_side_of_every_comparison_is_measured_in_every_round(monkeypatch, capsys):
    started = []
    monkeypatch.setattr(foreign, "measure", lambda words, *what: started.append(what[:3]) or 5.0)
    monkeypatch.setattr(sys, "argv", ["foreign", "--scripts", "sparse", "--rounds", "2"])
    foreign.main()
    each = [(over, 2, side) for over in ("MPI", "Gloo") for side in foreign.SIDES]
    assert sorted(started) == sorted(2 * each)
    assert "| sparse | Gloo | 2 | 2 | 5 (5 to 5) | 5 (5 to 5) | 1 (1 to 1) |" in capsys.readouterr().out


def test_an_unknown_script_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["foreign", "--scripts", "sparse,nonsense"])
    with pytest.raises(SystemExit) as ended:
        foreign.main()
    assert ended.value.code == 2
    assert "nothing is called 'nonsense'" in capsys.readouterr().err
