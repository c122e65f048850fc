"""`hvdtrain.imagenet` under real launchers: it learns from folders and shards; each image counts once; corrupt ones."""

import os
import shlex
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

pytest.importorskip("torchvision")
pytest.importorskip("webdataset")

from tests import image_set
from tests.e2e.launchers import (
    LAUNCHERS,
    MARK,
    PYTHON,
    ROOT,
    TORCHRUN,
    Done,
    environment,
    events,
    kill,
    launch,
    members,
    new_job,
    several,
    summary,
    wait_for_training,
)

SLOW = pytest.mark.slow
SCRIPT = "hvdtrain.imagenet --no-progress --model shufflenet_v2_x0_5 --image-size 32 --batch-size 8"
SCRIPT += " --optimizer adam --lr 0.01 --lr-scaling none --warmup-epochs 0"
MPIRUN = f"{LAUNCHERS['mpirun']} {PYTHON} -m {SCRIPT}"
ALONE = f"{PYTHON} -m {SCRIPT} --engine serial"


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("data")
    image_set.write(root / "folder")
    done = launch(f"{PYTHON} -m hvdtrain.data.make_shards {root}/folder {root}/shards --samples-per-shard 60")
    assert done.code == 0, done
    assert done.stdout.splitlines() == [f"{root}/shards/train: 4 shards", f"{root}/shards/val: 2 shards"]
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


BROKEN = [("folder", 40, 0), ("shards", 2, 2), ("folder", 2, 2), ("shards", 40, 0)]  # data, --max-corrupt, exit code
SYNTHETIC = {
    "accumulate": "--accumulate 2 --compression fp16 --amp bf16 --memory-format contiguous",
    "recipe": "--recipe goyal --optimizer sgd --reduction sum --label-smoothing 0.1",
}


@pytest.fixture(scope="module")
def two(data, tmp_path_factory) -> tuple[Path, dict[str, Done], dict[str, list[Path]]]:
    """Two ranks under mpirun, one run after the other: where, what became of them, and which files are broken."""
    root = tmp_path_factory.mktemp("two")
    runs = {}
    broken = {kind: damage(kind, data, root / f"broken-{kind}") for kind in ("folder", "shards")}
    for kind, limit, _ in BROKEN:
        flags = f"--dataset {kind} --data-dir {root}/broken-{kind} --epochs 2 --max-corrupt {limit} --log-steps 1"
        runs[f"{kind} {limit}"] = f"{flags} --output-dir {root / kind}-{limit}"
    for name, flags in SYNTHETIC.items():
        flags += " --dataset synthetic --classes 4 --train-samples 44 --epochs 2 --log-steps 1"
        runs[name] = f"{flags} --output-dir {root / name}"
    (root / "empty").mkdir()
    runs["refused"] = f"--data-dir {root}/empty"
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
    ("kind", "ranks"),
    [
        ("shards", 2),
        *(pytest.param(*c, marks=SLOW) for c in (("folder", 1), ("folder", 3), ("shards", 1), ("shards", 3))),
    ],
)
def test_each_test_image_counts_once(kind, ranks, data, tmp_path):
    """At 3 ranks of 2 workers there are more readers than shards."""
    start = f"{LAUNCHERS['starter'].format(ranks=ranks)} -m {SCRIPT}" if ranks > 1 else ALONE
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
        assert "samples cannot be read, such as " in ours[0]
        assert "--max-corrupt allows 2: fix the data, or raise it" in ours[0]
        assert "Traceback" not in done.stderr, done
        return
    out = root / f"{kind}-{limit}"
    result = summary(out)
    told = {line["file"]: line["samples"] for line in events(out, "corrupt")}
    assert {str(path) for path in broken} <= set(told)
    assert all(f"skipped: {path}: " in done.stdout for path in broken)
    assert result["corrupt"] == sum(told.values()) == (len(broken) if kind == "folder" else result["corrupt"])
    in_train, in_test = (
        sum(count for file, count in told.items() if f"{root}/broken-{kind}/{split}/" in file)
        for split in ("train", "val")
    )
    assert result["test_count"] + in_test == image_set.TEST
    # An epoch of shards has what their index has; a folder's images are found corrupt only when they are read.
    epoch = image_set.TRAIN - (in_train if kind == "shards" else 0)
    assert (result["samples"], result["steps"]) == (2 * epoch, 2 * -(-epoch // 16))


@pytest.mark.slow
def test_shards_from_commands(data, tmp_path):
    train, val = (f"pipe:cat {data['shards']}/{split}/00000{{0..1}}.tar" for split in ("train", "val"))
    flags = f"--dataset shards --train-shards '{train}' --test-shards '{val}' --classes 6 --train-samples 64 --epochs 1"
    done = launch(f"{MPIRUN.format(ranks=2)} {flags} --output-dir {tmp_path}")
    assert done.code == 0, done
    assert summary(tmp_path)["test_count"] == image_set.TEST


@pytest.mark.slow
@pytest.mark.parametrize("name", SYNTHETIC)
def test_synthetic_images_with_the_mathematics(name, two):
    root, done = two[0], two[1][name]
    assert done.code == 0, done
    result = summary(root / name)
    assert (result["samples"], result["test_count"]) == (88, 5)
    assert all(line["compute_seconds"] > 0 for line in events(root / name, "train"))


@pytest.mark.slow
def test_compiled_and_not_reached(tmp_path):
    flags = (
        "--dataset synthetic --classes 4 --train-samples 16 --epochs 1 --target-accuracy 1 --compile --model alexnet"
    )
    done = launch(f"{ALONE} {flags} --image-size 64", timeout=200)
    assert done.code in (0, 3), done
    assert (done.code == 3) == ("target accuracy 100.00% not reached" in done.stdout), done


@pytest.mark.slow
def test_refused_once_on_two_ranks(two):
    root, done = two[0], two[1]["refused"]
    assert done.code == 2, done
    ours = [line for line in done.stderr.splitlines() if line.startswith("hvdtrain.imagenet: error: ")]
    why = f"--data-dir: {root}/empty/train does not exist: name the directory that has train/ and val/"
    assert ours == [f"hvdtrain.imagenet: error: {why}"]


@pytest.mark.slow
def test_a_rank_that_raises_ends_the_job_though_workers_run(data):
    body = "import hvdtrain.imagenet as m; "
    body += "from hvdtrain.engines import launchers; from hvdtrain.launching import exit_codes; "
    body += "rank = launchers.announced().rank; real = m.training.Run.evaluating; "
    body += "m.training.Run.evaluating = lambda *a, **k: real(*a, **k) if rank != 1 else 1 / 0; exit_codes.run(m.main)"
    start = f"{LAUNCHERS['mpirun'].format(ranks=2)} {PYTHON} -c '{body}' {SCRIPT.partition(' ')[2]}"
    done = launch(f"{start} --data-dir {data['folder']} --epochs 3 --workers 2 --train-samples 32", timeout=120)
    assert done.code not in (0, 2), done
    assert "ZeroDivisionError" in done.stderr, done


@pytest.mark.slow
@pytest.mark.leaves("sem.hvdtrain-", "hvdtrain-")  # of those that mpirun kills; the next start removes them
def test_a_killed_rank_leaves_no_worker_behind(data, tmp_path):
    job = new_job()
    command = f"{MPIRUN.format(ranks=2)} --data-dir {data['folder']} --epochs 10000 --log-steps 1 --workers 2"
    process = subprocess.Popen(
        [*shlex.split(command), "--output-dir", str(tmp_path)], cwd=ROOT, env=environment(**{MARK: job}),
        start_new_session=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        wait_for_training(tmp_path)
        assert len(members(job)) >= 1 + 2 * (1 + 1 + 2)  # mpirun; per rank itself, its fork server, two workers
        os.kill(events(tmp_path, "start")[0]["ranks"][1]["pid"], signal.SIGKILL)
        killed = time.monotonic()
        assert process.wait(timeout=100) != 0
        while members(job):
            assert time.monotonic() - killed < 100, f"left behind: {members(job)}"
            time.sleep(0.1)
    finally:
        kill(job)
