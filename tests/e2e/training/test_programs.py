"""The programs of docs/script.md: killed and resumed to the same bits, with any number of workers, under every engine."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests import image_set
from tests.chaos.lineage import attacked, struck_at
from tests.chaos.programs import Program
from tests.e2e.launchers import PYTHON, ROOT, events, launch, summary

PROGRAMS = ROOT / "docs" / "programs"
FLAGS = "--epochs 2 --checkpoint-steps 7 --no-progress --threads 1"
MOST_LINES = 15  # that a program may have more than its plain version


def run(name: str, directory: Path, flags: str = "", attack: dict | None = None, program: Path | None = None):
    """Train on two ranks with at most one fault. program: default: NAME of docs/programs."""
    attacked_one = Program(name, 0, {}, FLAGS, program or PROGRAMS / f"{name}.py")
    # The starter's ranks: torch is imported once.
    return attacked(
        directory, launcher="starter", program=attacked_one, batch=None, flags=flags, attack=attack, timeout=240
    )


@pytest.mark.slow
@pytest.mark.leaves("sem.hvdtrain-", "hvdtrain-")  # of the workers of a killed rank; the next start removes them
@pytest.mark.parametrize(
    ("name", "step"), [("gan", 30), ("augment", 30), ("tokens", 15)]
)  # tokens: 11 steps in an epoch
def test_a_killed_program_ends_with_the_same_bits(name, step, tmp_path):
    whole = run(name, tmp_path / "whole")
    assert whole.code == 0, whole
    killed = run(name, tmp_path / "killed", attack=dict(rank=1, point="update", count=step, kind="kill"))
    assert killed.code not in (0, 2, 75), killed
    assert struck_at(tmp_path / "killed"), killed
    done = run(name, tmp_path / "killed")
    assert done.code == 0, done
    (resumed,) = events(tmp_path / "killed", "resume")
    assert resumed["step"] > 0
    one, other = (summary(tmp_path / which) for which in ("whole", "killed"))
    assert one["parameters_sha256"] == other["parameters_sha256"]
    assert (one["steps"], one["samples"]) == (other["steps"], other["samples"])


@pytest.mark.slow
@pytest.mark.leaves("sem.hvdtrain-", "hvdtrain-")
def test_augmentation_gives_the_same_bits_with_any_number_of_workers(tmp_path):
    hashes = {}
    for workers in (0, 1, 3):
        done = run("augment", tmp_path / str(workers), f"--epochs 1 --workers {workers}")
        assert done.code == 0, done
        hashes[workers] = summary(tmp_path / str(workers))["parameters_sha256"]
    assert len(set(hashes.values())) == 1, hashes


@pytest.mark.parametrize("name", ["augment", "gan", "tokens"])
def test_a_program_has_few_lines_more_than_its_plain_version(name):
    diff = subprocess.run(
        ["diff", "-w", str(PROGRAMS / f"{name}_plain.py"), str(PROGRAMS / f"{name}.py")], text=True, capture_output=True
    )
    added = sum(line.startswith(">") for line in diff.stdout.splitlines())
    removed = sum(line.startswith("<") for line in diff.stdout.splitlines())
    assert 0 < added <= MOST_LINES
    row = next(line for line in (ROOT / "docs" / "script.md").read_text().splitlines() if f"programs/{name}.py" in line)
    assert [int(cell) for cell in row.split("|")[3:5]] == [added, removed]  # as docs/script.md says


@pytest.mark.slow
@pytest.mark.parametrize("name", ["augment", "gan", "tokens"])
def test_the_plain_versions_run(name):
    done = launch(f"{shlex.quote(sys.executable)} {PROGRAMS / name}_plain.py --epochs 1", timeout=240)
    assert done.code == 0, done
    assert "epoch 1 " in done.stdout


@pytest.mark.slow
@pytest.mark.leaves("sem.hvdtrain-", "hvdtrain-")
def test_a_killed_run_on_shards_goes_on_at_the_very_image_and_refuses_other_shards(tmp_path):
    folder = image_set.write(tmp_path / "folder", train=48, test=16)
    make = f"{PYTHON} -m hvdtrain.data.make_shards {folder} {tmp_path}/shards --samples-per-shard 12"
    done = launch(make, PYTHONPATH=str(ROOT))
    assert done.code == 0, done
    program = ROOT / "hvdtrain" / "imagenet.py"
    flags = f"--dataset shards --data-dir {tmp_path}/shards --model shufflenet_v2_x0_5 --image-size 32 --batch-size 4"
    flags += " --workers 1 --checkpoint-steps 2"
    whole = run("imagenet", tmp_path / "whole", flags, program=program)
    assert whole.code == 0, whole
    killed = run("imagenet", tmp_path / "killed", flags, dict(rank=1, point="update", count=4, kind="kill"), program)
    assert killed.code not in (0, 2, 75), killed
    done = run("imagenet", tmp_path / "killed", flags, program=program)
    assert done.code == 0, done
    one, other = (summary(tmp_path / which) for which in ("whole", "killed"))
    assert events(tmp_path / "killed", "resume")[0]["step"] > 0
    assert one["parameters_sha256"] == other["parameters_sha256"]

    shard = sorted((tmp_path / "shards" / "train").glob("*.tar"))[1]
    shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])
    refused = run("imagenet", tmp_path / "killed", f"{flags} --epochs 3", program=program)
    assert refused.code == 2, refused
    assert shard.name in refused.stderr, refused
