"""The table of docs/evidence/speed.md: what a part of the rows leaves of the others."""

import json
import sys

from tests.bench import __main__ as bench
from tests.bench.rows import Group, Row

ROWS = (Row("fast", "how fast", "at least 2", "1.5", "the wire"), Row("slow", "how slow", "at most 1", "", ""))
GROUPS = [
    Group("one", "python one.py", lambda setting: {}, ROWS[:1]),
    Group("other", "python other.py", lambda setting: {}, ROWS[1:]),
]


def results(directory, **values):
    directory.mkdir()
    for group in GROUPS:
        found = {row.key: values[row.key] for row in group.rows if row.key in values}
        if found:
            facts = dict(hardware=dict(processor="P", cores=2, load_average=0.5), versions=dict(torch="2"), date="D")
            (directory / f"{group.name}.json").write_text(json.dumps(dict(values=found, left="", **facts)))
    return directory


def written(measured, docs) -> str:
    bench.write(GROUPS, bench.collect(GROUPS, measured, docs / "speed.md"), measured, docs)
    return (docs / "speed.md").read_text()


def test_measuring_leaves_the_documentation_as_it_is(tmp_path, monkeypatch, capsys):
    measured = results(tmp_path / "measured", fast=[1.0, 3.0, 2.0])
    (tmp_path / "docs").mkdir()
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    monkeypatch.setattr(bench, "groups", lambda: GROUPS)
    monkeypatch.setattr(sys, "argv", ["bench", "--rows", "none", "--results", str(measured)])
    assert bench.main() == 0
    assert "| **2** (1 to 3) | 3 | 1.5 | the wire |" in capsys.readouterr().out
    assert list((tmp_path / "docs").iterdir()) == []
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--docs", str(tmp_path / "docs")])
    assert bench.main() == 0
    assert "| **2** (1 to 3) | 3 | 1.5 | the wire |" in (tmp_path / "docs" / "speed.md").read_text()


def test_rows_that_were_not_measured_now_stand_with_their_commands(tmp_path):
    first = written(results(tmp_path / "first", fast=[1.0, 3.0, 2.0], slow=[0.25]), tmp_path)
    assert "| **2** (1 to 3) | 3 | 1.5 | the wire |" in first
    assert "- one: `python one.py` (D; P, 2 cores, load 0.5" in first
    assert written(results(tmp_path / "none"), tmp_path) == first
    second = written(results(tmp_path / "second", slow=[0.5, 0.5]), tmp_path)
    assert second == first.replace("| **0.25** (0.25 to 0.25) | 1 |", "| **0.5** (0.5 to 0.5) | 2 |")


def test_a_row_that_never_was_measured_says_so(tmp_path):
    page = written(results(tmp_path / "one", slow=[0.25]), tmp_path)
    assert "| not measured yet | 0 | 1.5 | the wire |" in page
    assert "python one.py" not in page
