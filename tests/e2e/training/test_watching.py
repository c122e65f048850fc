"""--profile, --tensorboard and the display under real launchers: what they write is read back."""

import gzip
import json
from itertools import pairwise
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.e2e.launchers import events, launch, summary, train

pytestmark = pytest.mark.slow  # tests/single/output has the formats


def profile(directory: Path) -> tuple[list[dict], dict]:
    merged = json.loads(gzip.decompress((directory / "profile.json.gz").read_bytes()))
    return merged["traceEvents"], merged["otherData"]


def rows(trace: list[dict]) -> dict[str, int]:
    """Return process numbers by name."""
    return {e["args"]["name"].split(" on ")[0]: e["pid"] for e in trace if e["name"] == "process_name"}


def steps(trace: list[dict]) -> list[list[str]]:
    """Return the names of each rank's steps, in their order."""
    of: dict[int, list[str]] = {}
    for event in trace:
        if event["name"].startswith("step "):
            of.setdefault(event["pid"], []).append(event["name"])
    return [of[pid] for pid in sorted(of)]


def scalars(directory: Path, name: str = "tensorboard") -> dict[str, list[tuple[int, float]]]:
    accumulator = EventAccumulator(str(directory / name), size_guidance={"scalars": 0})
    accumulator.Reload()
    return {tag: [(s.step, s.value) for s in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]}


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    directory = tmp_path_factory.mktemp("watched")
    done = train("mpirun", 2, f"--profile 4 --tensorboard --log-steps 5 --output-dir {directory}")
    assert done.code == 0, done
    assert done.stderr == "", done  # neither the profiler nor TensorBoard talks
    return directory, done


def test_profile_has_both_ranks_and_the_steps_in_order(watched):
    directory, done = watched
    trace, other = profile(directory)
    assert f"profile: steps 6 to 9 of 2 ranks, all on one clock: {directory}/profile.json.gz" in done.stdout
    assert (other["ranks"], other["first_step"]) == (2, 6)
    assert list(rows(trace)) == ["rank 0", "rank 1"]

    length_us = (other["ended_ns"] - other["began_ns"]) / 1000
    timed = [e for e in trace if e["ph"] == "X"]
    assert min(e["ts"] for e in timed) >= 0
    assert (
        max(e["ts"] + e["dur"] for e in timed) <= length_us + done.seconds * 1e6 / 10
    )  # another zero would be years away

    ends = {}
    for rank in (0, 1):
        mine = [e for e in timed if e["pid"] == rows(trace)[f"rank {rank}"]]
        steps = [e for e in mine if e["name"].startswith("step ")]
        assert [e["name"] for e in steps] == ["step 6", "step 7", "step 8", "step 9"]
        assert all(a["ts"] + a["dur"] <= b["ts"] for a, b in pairwise(steps))
        assert len([e for e in mine if "convolution_backward" in e["name"]]) >= 4
        phases = [e for e in mine if e.get("cat") == "phase"]
        assert {"loading", "compute", "communication"} <= {e["name"] for e in phases}
        assert all(a["ts"] + a["dur"] <= b["ts"] + 0.01 for a, b in pairwise(phases))
        ends[rank] = [e["ts"] + e["dur"] for e in phases if e["name"] == "communication"]
    assert len(ends[0]) == len(ends[1]) == 4

    # One clock for all: both ranks stop waiting for a step's sum at about the same time.
    assert all(abs(here - there) < 1e5 for here, there in zip(*ends.values(), strict=True))


def test_watching_changes_nothing_of_the_training(watched, tmp_path):
    directory, _ = watched
    assert train("mpirun", 2, f"--output-dir {tmp_path}").code == 0
    assert summary(tmp_path)["parameters_sha256"] == summary(directory)["parameters_sha256"]
    assert not (tmp_path / "tensorboard").exists()


def test_tensorboard_has_what_metrics_has(watched):
    directory, _ = watched
    found = scalars(directory)
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


@pytest.mark.parametrize("engine", ["serial", "ddp"])
def test_profile_without_horovod(engine, tmp_path):
    start = {"serial": "python", "ddp": "torchrun --standalone --nproc-per-node 2"}[engine]
    flags = f"--engine {engine} --dataset digits --epochs 1 --no-progress --profile 3 --output-dir {tmp_path}"
    flags += " --model convnet --threads 1"
    done = launch(f"{start} -m hvdtrain.mnist {flags}")
    assert done.code == 0, done
    trace, _ = profile(tmp_path)
    assert list(rows(trace)) == ["rank 0", "rank 1"][: 1 + (engine == "ddp")]


def test_a_run_that_is_too_short_says_so(tmp_path):
    done = train("mpirun", 2, f"--profile 50 --train-samples 900 --output-dir {tmp_path / 'some'}")  # 8 steps
    assert done.code == 0, done
    assert "profile: only 3 of 50 steps: the run is over (--profile 50 begins after 5 steps)" in done.stdout
    assert steps(profile(tmp_path / "some")[0]) == [["step 6", "step 7", "step 8"]] * 2
    done = train("mpirun", 2, f"--profile 2 --train-samples 256 --output-dir {tmp_path / 'none'}")
    assert done.code == 0, done
    assert "profile: nothing recorded, the run is over after 2 steps (--profile 2 begins after 5 steps)" in done.stdout
    assert not (tmp_path / "none" / "profile.json.gz").exists()
