"""--profile, --tensorboard and the display under real launchers: what they write is read back."""

import json
from pathlib import Path

import pytest

from tests.e2e.launchers import events, summary, train
from tests.single.output.test_run_output import scalars

pytestmark = pytest.mark.slow  # tests/single/output has the formats


def profile(directory: Path, rank: int) -> list[dict]:
    return json.loads((directory / "profile" / f"rank-{rank}.json").read_text())["traceEvents"]


def steps(trace: list[dict]) -> int:
    return len([e for e in trace if e["name"].startswith("ProfilerStep#") and e.get("cat") == "user_annotation"])


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    directory = tmp_path_factory.mktemp("watched")
    done = train("mpirun", 2, f"--profile 4 --tensorboard --log-steps 5 --output-dir {directory}")
    assert done.code == 0, done
    assert done.stderr == "", done  # neither the profiler nor TensorBoard talks
    return directory, done


def test_each_rank_has_a_profile_of_the_steps_that_were_asked_for(watched):
    directory, done = watched
    assert f"profile: steps 6 to 9, a file per rank: {directory}/profile (open one at ui.perfetto.dev)" in done.stdout
    for rank in (0, 1):
        trace = profile(directory, rank)
        assert steps(trace) == 4
        backward = [e for e in trace if e.get("ph") == "X" and "convolution_backward" in e["name"]]
        assert len(backward) >= 4


def test_watching_changes_nothing_of_the_training(watched, tmp_path):
    directory, _ = watched
    assert train("mpirun", 2, f"--output-dir {tmp_path}").code == 0
    assert summary(tmp_path)["parameters_sha256"] == summary(directory)["parameters_sha256"]
    assert not (tmp_path / "tensorboard").exists()


def test_tensorboard_has_what_metrics_has(watched):
    directory, _ = watched
    found = scalars(directory / "tensorboard")
    assert set(found) == {
        *("train/loss", "train/accuracy", "train/objective", "test/loss", "test/accuracy"),
        *("run/learning_rate", "run/samples_per_second"),
        *("share/loading", "share/compute", "share/communication"),
    }
    lines = events(directory, "train")
    assert [step for step, _ in found["train/loss"]] == [line["samples"] for line in lines]
    for tag, key in (("train/loss", "loss"), ("train/accuracy", "accuracy"), ("share/compute", "compute_share")):
        assert [value for _, value in found[tag]] == pytest.approx([line[key] for line in lines])
    tested = events(directory, "evaluate")[-1]
    assert found["test/accuracy"] == [(lines[-1]["samples"], pytest.approx(tested["accuracy"]))]


def test_times_of_every_rank_are_written_once_an_epoch(watched):
    directory, _ = watched
    (line,) = events(directory, "ranks")
    assert len(line["compute_seconds"]) == len(line["resident_bytes"]) == 2
    assert all(0 < seconds < line["elapsed_seconds"][0] for seconds in line["compute_seconds"])
    assert all(size > 5e7 for size in line["resident_bytes"])
