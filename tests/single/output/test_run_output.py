"""metrics.jsonl and summary.json: as JSON, and on file systems that fail."""

import errno
import json
import math
import os
from io import FileIO

import torch

from hvdtrain.output import records
from hvdtrain.output.run_output import RunOutput


def test_a_file_system_that_fails_a_seek_costs_lines_not_the_run(engine, tmp_path, capfd):
    """As one that turned stale does."""
    with RunOutput(engine, tmp_path, progress=False) as output:
        output.open(continued=False)
        output.event("before")

        class Stale(FileIO):
            def seek(self, *where):
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

        sound = output._file
        output._file = Stale(tmp_path / "metrics.jsonl", "a")
        output.event("lost")
        output._file.close()
        output._file = sound
        output.event("after")
    assert "metrics.jsonl cannot be written for now (Stale file handle)" in capfd.readouterr().err
    written = [json.loads(line)["event"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert written == ["before", "error", "after"]


def test_a_record_that_is_removed_begins_anew_with_a_line(engine, tmp_path, capfd):
    """All events after it were lost without a word."""
    with RunOutput(engine, tmp_path, progress=False) as output:
        output.open(continued=False)
        output.event("before")
        (tmp_path / "metrics.jsonl").unlink()
        output.event("after")
        output.event("later")
    assert capfd.readouterr().err.count("metrics.jsonl was removed while this run writes it: it begins anew") == 1
    written = [json.loads(line)["event"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert written == ["after", "later"]


def test_a_board_that_fails_is_said_once_and_costs_no_event(engine, tmp_path, capfd, monkeypatch):
    class Failing:
        def __init__(self, *_):
            pass

        def event(self, name, fields):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("hvdtrain.output.tensorboard.Board", Failing)
    with RunOutput(engine, tmp_path, progress=False, tensorboard=True) as output:
        output.open(continued=False)
        output.event("first")
        output.event("second")
    assert capfd.readouterr().err.count("TensorBoard output stops here (No space left on device)") == 1
    written = [json.loads(line)["event"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert written == ["first", "second"]


def refuse(word):
    raise ValueError(f"{word} is not JSON")


def test_numbers_that_are_not_finite_are_strings_which_the_report_reads_as_numbers(engine, tmp_path):
    values = {
        "loss": math.nan, "high": math.inf, "low": -math.inf, "accuracy": 0.5, "vector": torch.tensor([math.nan, 1]),
    }  # fmt: skip
    with RunOutput(engine, tmp_path, progress=False) as output:
        output.open(continued=False)
        output.event("evaluate", **values)
        output.end(values)
    written = [*(tmp_path / "metrics.jsonl").read_text().splitlines(), (tmp_path / "summary.json").read_text()]
    assert len(written) == 3
    for each in written:
        strict = json.loads(each, parse_constant=refuse)
        assert [strict[name] for name in values] == ["NaN", "Infinity", "-Infinity", 0.5, ["NaN", 1.0]]
        read = records.parsed(each)
        assert math.isnan(read["loss"])
        assert [read[name] for name in ("high", "low", "accuracy")] == [math.inf, -math.inf, 0.5]


def test_a_directory_in_place_of_the_summary_is_put_aside(engine, tmp_path):
    (tmp_path / "summary.json").mkdir()
    with RunOutput(engine, tmp_path, progress=False) as output:
        output.open(continued=False)
        output.end({"steps": 3})
    assert json.loads((tmp_path / "summary.json").read_text()) == {"steps": 3}
    assert (tmp_path / "summary.1.json").is_dir()
