"""tests/bench/foreign.py: what it makes of its runs. (That it runs anything at all is seen when it is used.)"""

import json
import sys

import pytest

from tests.bench import foreign
from tests.bench.foreign import Run


def runs(*seconds: tuple[float | None, float | None], over: str = "MPI") -> list[Run]:
    return [
        Run("sparse", over, 2, number, side, took)
        for number, pair in enumerate(seconds, start=1)
        for side, took in zip(foreign.SIDES, pair, strict=True)
    ]


def test_table_has_medians_and_the_ratio_of_each_round():
    lines = foreign.table(runs((4.0, 2.0), (9.0, 3.0), (10.0, 2.5))).splitlines()
    assert lines[2:] == ["| sparse | MPI | 2 | 3 | 9 (4 to 10) | 2.5 (2 to 3) | 3 (2 to 4) |"]


def test_a_round_with_a_failed_run_does_not_count_and_is_said():
    assert "| 1 (2 failed) | 4 (4 to 4) | 2 (2 to 2) |" in foreign.table(runs((4.0, 2.0), (None, 2.0), (4.0, None)))
    assert "| 0 (1 failed) | - | - | - |" in foreign.table(runs((None, None)))


def test_it_goes_on_where_the_results_end_with_whole_rounds(monkeypatch, tmp_path, capsys):
    results, started = tmp_path / "results.jsonl", []
    half = runs((4.0, 2.0), (4.0, 2.0))[:3] + runs((8.0, 2.0), (8.0, 2.0), over="Gloo")
    results.write_text("".join(json.dumps(run._asdict()) + "\n" for run in half))

    def measure(words, over, ranks, side, limit):
        started.append((over, ranks, side))
        return 5.0

    monkeypatch.setattr(foreign, "measure", measure)
    monkeypatch.setattr(sys, "argv", ["foreign", "--scripts", "sparse", "--rounds", "2", "--results", str(results)])
    foreign.main()
    assert sorted(started) == [("MPI", 2, "as it comes"), ("MPI", 2, "tuned")]  # of round 2, both sides
    assert len(results.read_text().splitlines()) == 8
    assert "| sparse | Gloo | 2 | 2 | 8 (8 to 8) | 2 (2 to 2) | 4 (4 to 4) |" in capsys.readouterr().out


def test_an_unknown_script_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["foreign", "--scripts", "sparse,nonsense"])
    with pytest.raises(SystemExit) as ended:
        foreign.main()
    assert ended.value.code == 2
    assert "nothing is called 'nonsense'" in capsys.readouterr().err
