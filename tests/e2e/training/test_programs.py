"""The programs in docs/programs: killed and resumed to the same bits, with any number of workers, under every engine."""

import shlex
import subprocess
import sys
from importlib.util import find_spec

import pytest

from tests import image_set
from tests.audited import audit
from tests.chaos.lineage import attacked, taken
from tests.chaos.programs import Program
from tests.e2e.launchers import PYTHON, ROOT, events, launch, summary

PROGRAMS = ROOT / "docs" / "programs"
FLAGS = "--epochs 2 --checkpoint-steps 7 --no-progress --threads 1"
MOST_LINES = 20  # that a program may have more than its plain version
NEAR_THE_MIDDLE = {  # of a program's training: it is killed after this optimizer step, or a later one
    "gan": 30, "augment": 30, "tokens": 15, "weighted": 60, "distill": 60, "folds": 40, "records": 20, "semi": 10,
    "buckets": 40, "contrast": 60, "reinforce": 30, "huggingface": 20, "early": 45, "xor": 60, "sam": 60,
}  # fmt: skip
NAMES = sorted(NEAR_THE_MIDDLE)
NEEDS = {"huggingface": "transformers"}  # beside what `make setup` installs
RUNNABLE = [
    pytest.param(
        name,
        marks=pytest.mark.skipif(
            name in NEEDS and find_spec(NEEDS[name]) is None,
            reason=f"{name}.py needs {NEEDS.get(name)}, which is not installed: pip install {NEEDS.get(name)}",
        ),
    )
    for name in NAMES
]


def run(name, directory, flags="", attack=None, program=None, ranks=2):
    """Train with at most one fault. program: default: NAME of docs/programs."""
    attacked_one = Program(name, 0, {}, FLAGS, program or PROGRAMS / f"{name}.py")
    return attacked(  # the starter's ranks: torch is imported once
        directory, ranks=ranks, launcher="starter", program=attacked_one, batch=None, flags=flags, attack=attack,
        timeout=240,
    )  # fmt: skip


def audited(folder, step, words):
    """Audit a training on two ranks, of which one is killed after a step: never before the first checkpoint."""
    options = f"-np 2 --launcher none --signals one --only-kill 1 --keep --from-step {step}"
    done = audit(folder, f"{options} -- -m hvdtrain.starter --local-ranks 2 -- {words} {FLAGS} --output-dir {{out}}")
    assert done.returncode == 0, done
    assert events(folder / "audit/out/kill-1", "resume")[0]["step"] > 0


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.leaves("sem.hvdtrain-", "hvdtrain-")  # of the workers of a killed rank; the next start removes them
@pytest.mark.parametrize("name", [case for case in RUNNABLE if case.values != ("folds",)])
def test_a_killed_program_ends_with_the_same_bits(name, tmp_path):
    audited(tmp_path, NEAR_THE_MIDDLE[name], PROGRAMS / f"{name}.py")


@pytest.mark.slow
def test_killed_folds_end_with_the_same_bits(tmp_path):
    """The audit takes several trainings in a process for one."""
    attack = dict(rank=1, point="update", count=NEAR_THE_MIDDLE["folds"], kind="kill")
    codes = [run("folds", tmp_path / name, attack=kill).code for name, kill in
             (("whole", None), ("killed", attack), ("killed", None))]  # fmt: skip
    assert (codes[0], codes[1] in (0, 2, 75), codes[2]) == (0, False, 0)
    assert events(tmp_path / "killed/fold-1", "resume")[0]["step"] > 0
    for fold in range(3):
        one, other = (summary(tmp_path / which / f"fold-{fold}") for which in ("whole", "killed"))
        assert one["parameters_sha256"] == other["parameters_sha256"]
        assert (one["steps"], one["samples"]) == (other["steps"], other["samples"])


@pytest.mark.slow
@pytest.mark.leaves("sem.hvdtrain-", "hvdtrain-")
@pytest.mark.parametrize("name", ["weighted", "buckets"])
def test_on_four_then_three_then_two_ranks_each_index_is_used_as_it_was_drawn(name, tmp_path):
    whole = run(name, tmp_path / "whole")
    assert whole.code == 0, whole
    for ranks in (4, 3):
        killed = run(name, tmp_path / "apart", attack=dict(rank=1, point="update", count=10, kind="kill"), ranks=ranks)
        assert killed.code not in (0, 2, 75), killed
    done = run(name, tmp_path / "apart")
    assert done.code == 0, done
    assert [line["world_size"] for line in events(tmp_path / "apart", "resume")] == [3, 2]
    expected = taken(tmp_path / "whole")
    assert len(expected) == 2
    assert expected[0] != expected[1] or name == "buckets"  # these draw every line once
    assert taken(tmp_path / "apart") == expected


@pytest.mark.slow
@pytest.mark.leaves("sem.hvdtrain-", "hvdtrain-")
def test_augmentation_gives_the_same_bits_with_any_number_of_workers(tmp_path):
    hashes = {}
    for workers in (0, 1, 3):
        done = run("augment", tmp_path / str(workers), f"--epochs 1 --workers {workers}")
        assert done.code == 0, done
        hashes[workers] = summary(tmp_path / str(workers))["parameters_sha256"]
    assert len(set(hashes.values())) == 1, hashes


@pytest.mark.parametrize("name", NAMES)
def test_a_program_has_few_lines_more_than_its_plain_version(name):
    diff = subprocess.run(
        ["diff", "-w", str(PROGRAMS / f"{name}_plain.py"), str(PROGRAMS / f"{name}.py")], text=True, capture_output=True
    )
    added = sum(line.startswith(">") for line in diff.stdout.splitlines())

    assert 0 < added <= MOST_LINES


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNNABLE)
def test_the_plain_versions_run(name):
    done = launch(f"{shlex.quote(sys.executable)} {PROGRAMS / name}_plain.py --epochs 1", timeout=240)
    assert done.code == 0, done
    assert "epoch 1 " in done.stdout


@pytest.mark.slow
@pytest.mark.leaves("sem.hvdtrain-", "hvdtrain-")
def test_a_killed_run_on_shards_goes_on_at_the_very_image_and_refuses_other_shards(tmp_path):
    folder = image_set.write(tmp_path / "folder", train=48, test=16)
    make = f"{PYTHON} -m hvdtrain.datasets.make_shards {folder} {tmp_path}/shards --samples-per-shard 12"
    done = launch(make, PYTHONPATH=str(ROOT))
    assert done.code == 0, done
    program = ROOT / "hvdtrain" / "imagenet.py"
    flags = f"--dataset shards --data-dir {tmp_path}/shards --model shufflenet_v2_x0_5 --image-size 32 --batch-size 4"
    flags += " --workers 1"
    audited(tmp_path, 8, f"{program} {flags}")

    shard = sorted((tmp_path / "shards" / "train").glob("*.tar"))[1]
    shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])
    refused = run("imagenet", tmp_path / "audit/out/kill-1", f"{flags} --epochs 3", program=program)
    assert refused.code == 2, refused
    assert shard.name in refused.stderr, refused
