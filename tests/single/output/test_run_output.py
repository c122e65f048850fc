"""metrics.jsonl, summary.json and TensorBoard's files: a script's own values, and on file systems that fail."""

import errno
import json
import math
import os
from io import FileIO

import pytest
import torch

from hvdtrain.engines.errors import UserError
from hvdtrain.output import records
from hvdtrain.output.run_output import RunOutput
from hvdtrain.output.tensorboard import Board


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


def test_a_record_of_another_run_is_left_alone(engine, tmp_path, capfd):
    """The directory was removed, and the run started again beside this one: their records were interleaved."""
    record = tmp_path / "metrics.jsonl"
    with RunOutput(engine, tmp_path, progress=False) as output:
        output.open(continued=False)
        output.event("before")
        written = record.read_text()
        record.unlink()
        record.write_text(written)  # as an editor does
        output.event("edited")
        assert len(record.read_text().splitlines()) == 2
        record.unlink()
        record.write_text("the first line of another run\n")
        output.event("after")
        output.event("later")
    assert capfd.readouterr().err.count("metrics.jsonl cannot be written for now (another run writes there now)") == 1
    assert record.read_text() == "the first line of another run\n"


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


@pytest.mark.parametrize("content", ['{"total": 3}', "", "[1]"])
def test_a_summary_of_another_tool_is_put_aside(content, engine, tmp_path):
    """It was overwritten."""
    (tmp_path / "summary.json").write_text(content)
    own = {"world_size": 1, "samples_per_second": 2.0}
    for _ in range(2):
        with RunOutput(engine, tmp_path, progress=False) as output:
            output.open(continued=True)
            assert not (tmp_path / "summary.json").exists()
            output.end(own)
    assert (tmp_path / "summary.1.json").read_text() == content
    assert sorted(path.name for path in tmp_path.glob("summary*")) == ["summary.1.json", "summary.json"]


# ---- TensorBoard

METRICS = {"loss": {"direction": "min", "percent": False}}


def event(name: str, **fields) -> tuple[str, dict]:
    return name, json.loads(json.dumps(fields))


def scalars(directory) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(directory), size_guidance={"scalars": 0})
    accumulator.Reload()
    return {tag: [(s.step, s.value) for s in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]}


@pytest.fixture
def shown(tmp_path):
    """Give a board events, and return the scalars that it wrote."""

    def write(*events, continued=False):
        board = Board(tmp_path / "board", continued)
        for name, fields in events:
            board.event(name, fields)
        board.close()
        return scalars(tmp_path / "board")

    return write


def test_a_classifier(shown):
    train = dict(epoch=1, step=1, samples=64, loss=0.5, accuracy=0.75, loss_rank0=0.5, learning_rate=0.125,
                 samples_per_second=100.0, loading_seconds=0.1, loading_share=0.25, compute_share=0.5,
                 communication_share=0.125)  # fmt: skip
    found = shown(event("start", metrics=METRICS), event("train", **train),
                  event("evaluate", epoch=1, prefix="test", loss=0.5, accuracy=0.875, count=500))  # fmt: skip
    assert found == {
        "train/loss": [(64, 0.5)], "train/accuracy": [(64, 0.75)], "test/loss": [(64, 0.5)], "test/accuracy": [(64, 0.875)],
        "run/learning_rate": [(64, 0.125)], "run/samples_per_second": [(64, 100.0)],
        "share/loading": [(64, 0.25)], "share/compute": [(64, 0.5)], "share/communication": [(64, 0.125)],
    }  # fmt: skip


def test_a_gan_without_a_loss_and_a_language_model(shown):
    found = shown(
        event("start", metrics={"perplexity": {"direction": "min"}}),
        event("train", step=1, samples=8, loss=None, critic_loss=-0.5, generator_loss=2),
        event("evaluate", prefix="validation", loss=1.0, count=10),
        event("evaluate", prefix="", perplexity=2.0, validation_loss=1.5),
        event("evaluate", perplexity=3.0),
    )
    assert found == {
        "train/critic_loss": [(8, -0.5)], "train/generator_loss": [(8, 2.0)], "validation/loss": [(8, 1.0), (8, 1.5)],
        "test/perplexity": [(8, 2.0), (8, 3.0)],
    }  # fmt: skip


def test_steps_stand_in_for_samples_that_nobody_counts(shown):
    assert shown(event("train", step=7, loss=1)) == {"train/loss": [(7, 1.0)]}


def test_what_is_no_number_is_left_out(shown):
    found = shown(event("train", step=1, a=10**400, b="1", c=True, d=[1], e=float("inf"), samples=10**400))
    assert found == {"train/e": [(1, float("inf"))]}


def test_what_was_written_beyond_the_point_of_return_is_hidden(shown):
    assert len(shown(*(event("train", step=n, samples=8 * n, loss=n) for n in (1, 2, 3)))["train/loss"]) == 3
    found = shown(event("resume", step=1, samples=8), event("train", step=2, samples=16, loss=5), continued=True)
    assert found["train/loss"] == [(8, 1.0), (16, 5.0)]
    # Without a checkpoint, from the beginning.
    found = shown(*(event("train", step=n, samples=8 * n, loss=-n) for n in (1, 2)), continued=True)
    assert found["train/loss"] == [(8, -1.0), (16, -2.0)]


def test_a_path_that_is_not_utf_8_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"--tensorboard cannot write to .*: the path is not UTF-8"):
        Board(tmp_path / os.fsdecode(b"\xff"), continued=False)


@pytest.mark.parametrize("continued", [True, False])
def test_a_file_in_place_of_tensorboards_directory_is_put_aside(continued, engine, tmp_path):
    (tmp_path / "tensorboard").write_text("a file")
    with RunOutput(engine, tmp_path, progress=False, tensorboard=True) as output:
        output.open(continued=continued)
        output.event("train", step=1, samples=8, loss=0.5)
    assert list((tmp_path / "tensorboard").iterdir())
    assert (tmp_path / "tensorboard.1").read_text() == "a file"


@pytest.mark.parametrize("when", ["at the start", "later"])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), RuntimeError("of its thread")])
def test_tensorboard_without_room_costs_one_warning_and_not_the_run(error, when, engine, tmp_path, monkeypatch, capfd):
    from torch.utils import tensorboard

    def fail(*arguments, **options):
        raise error

    if when == "at the start" and isinstance(error, OSError):
        monkeypatch.setattr("hvdtrain.output.tensorboard.Board.__init__", fail)
    else:
        monkeypatch.setattr(tensorboard.SummaryWriter, "add_scalar", fail)
    with RunOutput(engine, tmp_path, progress=False, tensorboard=True) as output:
        output.open(continued=False)
        for step in (1, 2):
            output.event("train", step=step, samples=8 * step, loss=0.5)
    assert capfd.readouterr().err.count("warning: ") == 1
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
