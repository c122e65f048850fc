"""`hvdtrain.imagenet` under real launchers: it learns from folders and shards; each image counts once; corrupt ones."""

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from hvdtrain.datasets import make_shards
from tests import image_set
from tests.e2e.launchers import (
    LAUNCHERS,
    PYTHON,
    TORCHRUN,
    Done,
    events,
    launch,
    members,
    remaining,
    running,
    several,
    summary,
    wait_for_training,
)  # fmt: skip

pytestmark = image_set.needs_torchvision
SLOW = pytest.mark.slow
SCRIPT = "hvdtrain.imagenet --no-progress --model shufflenet_v2_x0_5 --image-size 32 --batch-size 8"
SCRIPT += " --optimizer adam --lr 0.01 --lr-scaling none --warmup-epochs 0"


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("data")
    image_set.write(root / "folder")
    for split in ("train", "val"):
        make_shards.make_shards(root / "folder" / split, root / "shards" / split, per_shard=60, seed=1)
    return {kind: root / kind for kind in ("folder", "shards")}


def learn(kind: str, data: dict[str, Path], directory: Path) -> str:
    return f"--dataset {kind} --data-dir {data[kind]} --epochs 4 --output-dir {directory}"


def damage(kind: str, data: dict[str, Path], directory: Path) -> list[Path]:
    """Make a copy of which some files are cut short; return them."""
    root = Path(shutil.copytree(data[kind], directory))
    if kind == "folder":
        broken = [*sorted((root / "train" / "red").iterdir())[:3], sorted((root / "val" / "cyan").iterdir())[0]]
    else:
        broken = [root / "train" / "000002.tar", root / "val" / "000001.tar"]
    for path in broken:
        path.write_bytes(path.read_bytes()[: path.stat().st_size * 3 // 4])
    return broken


BROKEN = [("folder", 40, 0), ("shards", 40, 0), ("shards", 2, 2)]  # data, --max-corrupt, exit code


@pytest.fixture(scope="module")
def two(data, tmp_path_factory) -> tuple[Path, dict[str, Done], dict[str, list[Path]]]:
    """Two ranks under mpirun, one run after the other: where, what became of them, and which files are broken."""
    root = tmp_path_factory.mktemp("two")
    runs = {}
    broken = {kind: damage(kind, data, root / f"broken-{kind}") for kind in ("folder", "shards")}
    for kind, limit, _ in BROKEN:
        flags = f"--dataset {kind} --data-dir {root}/broken-{kind} --epochs 2 --max-corrupt {limit} --log-steps 1"
        runs[f"{kind} {limit}"] = f"{flags} --output-dir {root / kind}-{limit}"
    return root, on_two(root, runs), broken


def on_two(root: Path, runs: dict[str, str]) -> dict[str, Done]:
    common = SCRIPT.partition(" ")[2]
    return several("mpirun", 2, root, {name: f"{common} {flags}" for name, flags in runs.items()}, "hvdtrain.imagenet")


def accuracy(engine: str, kind: str, directory: Path) -> float:
    result = summary(directory)
    assert (result["engine"], result["world_size"], result["dataset"]) == (engine, 2, kind)
    assert (result["steps"], result["samples"]) == (4 * 15, 4 * image_set.TRAIN)
    assert (result["test_count"], result["corrupt"]) == (image_set.TEST, 0)
    assert result["test_accuracy"] <= result["test_accuracy_top5"] <= 1
    return result["test_accuracy"]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["horovod", "ddp"])
def test_two_ranks_learn_the_same_from_a_folder_and_from_shards(engine, data, tmp_path):
    runs = {kind: learn(kind, data, tmp_path / kind) for kind in ("folder", "shards")}
    done = on_two(tmp_path, runs) if engine == "horovod" else {}
    found = []
    for kind in ("folder", "shards"):
        if engine == "ddp":
            done[kind] = launch(f"{TORCHRUN.format(ranks=2)} -m {SCRIPT} --engine ddp {runs[kind]}")
        assert done[kind].code == 0, done[kind]
        found.append(accuracy(engine, kind, tmp_path / kind))
    assert min(found) > 0.45  # chance is 0.17
    assert abs(found[0] - found[1]) < 0.25  # of 101 images one seed's spread is about 0.07


@pytest.mark.parametrize(
    ("kind", "ranks"), [("shards", 2), *(pytest.param(kind, 3, marks=SLOW) for kind in ("folder", "shards"))]
)
def test_each_test_image_counts_once(kind, ranks, data, tmp_path):
    """At 3 ranks of 2 workers there are more readers than shards."""
    start = f"{LAUNCHERS['starter'].format(ranks=ranks)} -m {SCRIPT}"
    workers = 2 if ranks == 3 else 0
    flags = f"--dataset {kind} --data-dir {data[kind]} --epochs 1 --train-samples 50 --workers {workers}"
    done = launch(f"{start} {flags} --output-dir {tmp_path}")
    assert done.code == 0, done
    result = summary(tmp_path)
    assert (result["test_count"], result["samples"], result["corrupt"]) == (image_set.TEST, 50, 0)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "limit", "code"), BROKEN)
def test_broken_data_is_named_and_counted_up_to_the_limit(kind, limit, code, two):
    root, done, broken = two[0], two[1][f"{kind} {limit}"], two[2][kind]
    assert done.code == code, done
    if code == 2:
        ours = [line for line in done.stderr.splitlines() if line.startswith("hvdtrain.imagenet: error: ")]
        assert len(ours) == 1, done
        assert "samples cannot be read: --max-corrupt allows 2: fix the data, or raise it" in ours[0]
        assert "Traceback" not in done.stderr, done
        return
    out = root / f"{kind}-{limit}"
    result = summary(out)
    assert all(f"skipped: {path}: " in done.stdout + done.stderr for path in broken), done
    if kind == "folder":  # three of them in train/
        assert result["corrupt"] == len(broken)
        assert (result["samples"], result["test_count"]) == (2 * image_set.TRAIN, image_set.TEST - 1)
    else:  # an epoch of shards has what their indexes have
        lost = 2 * image_set.TRAIN - result["samples"]
        assert result["corrupt"] == lost // 2 + image_set.TEST - result["test_count"] > 2
    assert result["steps"] == 2 * -(-result["samples"] // 2 // 16)


@pytest.mark.slow
@pytest.mark.leaves("sem.hvdtrain-", "hvdtrain-")  # of those that mpirun kills; the next start removes them
def test_a_killed_rank_leaves_no_worker_behind(data, tmp_path):
    flags = f"--data-dir {data['folder']} --epochs 10000 --log-steps 1 --workers 2 --output-dir {tmp_path}"
    command = f"{LAUNCHERS['mpirun'].format(ranks=2)} {PYTHON} -m {SCRIPT} {flags}"
    with running(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as (process, job):
        wait_for_training(tmp_path)
        assert len(members(job)) >= 1 + 2 * (1 + 1 + 2)  # mpirun; per rank itself, its fork server, two workers
        os.kill(events(tmp_path, "start")[0]["ranks"][1]["pid"], signal.SIGKILL)
        assert process.wait(timeout=100) != 0
        assert remaining(job) == []
