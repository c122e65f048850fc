"""--profile, --tensorboard and the display under real launchers: what they write is read back."""

import gzip
import json
import os
from itertools import pairwise
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.e2e.launchers import events, launch, several, summary, train

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


def test_the_profile_is_formed_as_perfetto_reads_it(watched):
    trace, _ = profile(watched[0])
    assert all({"ph", "ts", "pid", "tid", "name"} <= event.keys() for event in trace)
    assert {event["ph"] for event in trace} <= set("MXsfi")
    assert all(isinstance(event[key], int) for event in trace for key in ("pid", "tid"))
    assert {event["pid"] for event in trace} == set(rows(trace).values())  # every process has a name
    timed = [event for event in trace if event["ph"] != "M"]
    assert all(a["ts"] <= b["ts"] for a, b in pairwise(timed))
    assert all(event["dur"] >= 0 for event in timed if event["ph"] == "X")

    # In a row, an event lies inside the one before it or after it: others are drawn wrong.
    inside: dict[tuple[int, int], list[dict]] = {}
    for event in (event for event in timed if event["ph"] == "X"):
        stack = inside.setdefault((event["pid"], event["tid"]), [])
        while stack and stack[-1]["ts"] + stack[-1]["dur"] <= event["ts"] + 0.001:  # microseconds: it reads nanoseconds
            stack.pop()
        assert not stack or event["ts"] + event["dur"] <= stack[-1]["ts"] + stack[-1]["dur"] + 0.01, (event, stack[-1])
        stack.append(event)

    arrows: dict[str, list[str]] = {}
    for event in timed:
        if event["ph"] in "sf":
            arrows.setdefault(event["id"], []).append(event["ph"])
    assert arrows
    assert all(ends == ["s", "f"] for ends in arrows.values())


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


def test_tensorboard_goes_on_where_the_run_does(tmp_path):
    out = tmp_path / "out"
    flags = (
        f"--dataset digits --no-progress --threads 1 --train-samples 640 --log-steps 1 --tensorboard --output-dir {out}"
    )
    assert several("alone", 1, tmp_path / "first", {"run": f"--epochs 2 {flags}"})["run"].code == 0
    checkpoints = sorted((out / "checkpoints").glob("*.safetensors"))
    checkpoints[-1].unlink()  # as if the second epoch had been lost: it is trained again
    runs = {"on": f"--epochs 2 {flags}", "anew": f"--epochs 1 --resume never {flags}"}
    done = several("alone", 1, tmp_path / "second", runs)
    assert done["on"].code == done["anew"].code == 0, done
    steps = [step for step, _ in scalars(out, "tensorboard.1")["train/loss"]]
    assert len(list((out / "tensorboard.1").glob("events*"))) == 2
    last = json.loads((out / "metrics.1.jsonl").read_text().splitlines()[-1])
    assert (last["event"], last["steps"]) == ("end", len(steps))
    assert steps == sorted(set(steps))
    assert len(scalars(out)["train/loss"]) == summary(out)["steps"]


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


@pytest.mark.parametrize("launcher", ["alone", "mpirun"])
def test_missing_tensorboard_is_one_line(launcher, tmp_path):
    (tmp_path / "tensorboard.py").write_text("raise ImportError('none here')\n")
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    done = train(launcher, 2, f"--tensorboard --output-dir {tmp_path / 'out'}", PYTHONPATH=path)
    assert done.code == 2, done
    assert "--tensorboard needs a package: pip install tensorboard (none here)" in done.stderr
    assert "Traceback" not in done.stderr


def test_images_can_be_watched_too(tmp_path):
    flags = "--dataset synthetic --model resnet18 --image-size 32 --classes 4 --train-samples 64 --batch-size 4"
    flags += f" --epochs 1 --no-progress --log-steps 4 --profile 2 --tensorboard --output-dir {tmp_path}"
    done = launch(f"mpirun --oversubscribe -np 2 python -m hvdtrain.imagenet {flags}")
    assert done.code == 0, done
    trace, _ = profile(tmp_path)
    assert steps(trace) == [["step 6", "step 7"]] * 2
    assert {"test/accuracy", "test/accuracy_top5", "train/loss"} <= set(scalars(tmp_path))
    lines = events(tmp_path, "train")
    assert [line["step"] for line in lines] == [1, 4, 8]
    assert all(0 <= line["accuracy"] <= 1 for line in lines)
