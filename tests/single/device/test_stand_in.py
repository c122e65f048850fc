"""On the stand-in accelerator, every script trains, and a quiet step makes the host wait no more often than the table says.

The numbers may only fall. stand_in.py says what is counted, and what this cannot show. A step with a gradient that is not
finite is left out as if that had been read at once, though it is read one step late.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from hvdtrain.datasets import make_shards
from tests import image_set

torch_has_it = pytest.importorskip("torch.utils.backend_registration")
if not hasattr(torch_has_it, "_setup_privateuseone_for_python_backend"):
    pytest.skip("the stand-in needs torch 2.9", allow_module_level=True)

ROOT = Path(__file__).resolve().parents[3]
RESUMED = "--output-dir OUT/again --resume OUT/mnist/checkpoints/step-00000008.safetensors --checkpoint-steps 10"
MNIST = "--dataset digits --train-samples 896 --epochs 1 --batch-size 64"
SHARDS = "--dataset shards --data-dir SHARDS --workers 0"
IMAGES = "--model squeezenet1_1 --image-size 33 --batch-size 8 --train-samples 48 --epochs 1"
AUGMENT = "--epochs 1 --workers 0"
LM = "--layers 1 --heads 2 --width 32 --context 16 --batch-size 4 --steps 12 --sample-tokens 2 --warmup-steps 2"

# name: script, flags, most of each kind in a quiet step
RUNS: dict[str, tuple[str, str, dict[str, int]]] = {
    "mnist": ("hvdtrain.mnist", f"{MNIST} --output-dir OUT/mnist --checkpoint-steps 8 --keep 9", {"late": 1, "out": 1}),
    "mnist, resumed": ("hvdtrain.mnist", f"{MNIST} {RESUMED}", {"late": 1, "out": 1}),
    "mnist, fp16": ("hvdtrain.mnist", f"{MNIST} --amp fp16", {"late": 1, "out": 1}),
    "synthetic images": ("hvdtrain.imagenet", f"{IMAGES} --dataset synthetic", {"late": 1, "out": 1}),
    "folder": ("hvdtrain.imagenet", f"{IMAGES} --data-dir IMAGES --workers 0", {"late": 1, "pinned": 2, "out": 1}),
    "shards": ("hvdtrain.imagenet", f"{IMAGES} {SHARDS}", {"late": 1, "pinned": 2, "out": 1}),
    "text": ("hvdtrain.lm", f"{LM} --accumulate 2 --text TEXT", {"late": 1, "pinned": 4, "out": 1}),
    "augment.py": ("docs/programs/augment.py", f"{AUGMENT} --batch-size 256", {"late": 1, "pinned": 2, "out": 1}),
    "gan.py": ("docs/programs/gan.py", "--epochs 1 --batch-size 512", {"late": 1, "pinned": 1, "out": 1}),
}  # fmt: skip


# Options of programs/bad_step.py
BAD_STEPS = {
    "adamw": "",
    "micro_batches": "--batch-size 8 --accumulate 2",
    "clipped": "--clip-norm 0.5",
    "adamw_fp16": "--amp fp16",
    "saved": "--checkpoint-steps 3",  # the bad one is the third
    "sgd": "--optimizer sgd",
    "sgd_fp16": "--optimizer sgd --amp fp16",
}
BAD_STEP, SEED = "tests/device/programs/bad_step.py", "--seed 3"
AT_ONCE = "--log-steps 1"  # a logged step is read at once


# What others have, too: the same copies, scaler or skipped step.
SLOW = {"mnist, fp16", "synthetic images", "folder", "augment.py", "micro_batches", "clipped", "adamw_fp16", "sgd"}


def rows_of(table: dict[str, Any]) -> list[Any]:
    return [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in table]


class Found(NamedTuple):
    """What `tests.device.trace` prints of a run."""

    code: int
    error: str
    steps: int
    quiet: int
    per_step: dict[str, int]
    lines: list[str]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, Any]:
    """The runs of the chosen tests, in one process, which imports torch once."""
    calls = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    chosen = {params["name"] for params in calls if "name" in params} | {"mnist", "adamw"}  # which others go on from
    directory = tmp_path_factory.mktemp("device")
    images = image_set.write(directory / "images", 64, 12)
    for split in ("train", "val"):
        make_shards.make_shards(images / split, directory / "shards" / split, per_shard=1000, seed=1)
    (directory / "text").write_text("All that glisters is not gold; often have you heard that told. " * 100)
    paths = {"OUT": directory, "IMAGES": images, "SHARDS": directory / "shards", "TEXT": directory / "text"}
    asked = {name: (script, flags) for name, (script, flags, _) in RUNS.items() if name in chosen}
    for name, flags in ((name, flags) for name, flags in BAD_STEPS.items() if name in chosen):
        for how, when in (("late", ""), ("at_once", AT_ONCE)):
            out = f"--output-dir OUT/{how}/{name}"
            asked[f"{how}/{name}"] = BAD_STEP, f"{flags} {SEED} --max-skipped 2 {when} {out}"
    asked["not one may be left out"] = BAD_STEP, SEED
    runs = []
    for script, flags in asked.values():
        for name, path in paths.items():
            flags = flags.replace(name, str(path))
        runs.append((script, flags.split()))
    command = [sys.executable, "-m", "tests.device.trace", "--all", json.dumps(runs)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    rows = [Found(*json.loads(line[6:])) for line in done.stdout.splitlines() if line.startswith("TRACE ")]
    if done.returncode:
        pytest.fail(f"{list(asked)[len(rows)]}\n{done.stdout[-1000:]}\n{done.stderr[-3000:]}", pytrace=False)
    return dict(zip(asked, rows, strict=True)) | {"directory": directory}


@pytest.mark.parametrize("name", rows_of(RUNS))
def test_a_quiet_step_keeps_to_its_budget(found: dict[str, Any], name: str):
    row = found[name]
    assert row.code == 0
    assert row.quiet >= 3
    assert row.per_step == RUNS[name][2], "\n".join(row.lines)


def outcome(directory: Path, how: str, name: str) -> tuple[str, float, list[dict[str, Any]]]:
    """Return the hash of the weights, the loss of the evaluation, and the errors that were recorded."""
    out = directory / how / name
    summary = json.loads((out / "summary.json").read_text())
    events = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    errors = [{k: event[k] for k in ("step", "message")} for event in events if event["event"] == "error"]
    return summary["parameters_sha256"], summary["loss"], errors


@pytest.mark.parametrize("name", rows_of(BAD_STEPS))
def test_a_bad_step_is_left_out_as_if_it_had_been_read_at_once(found: dict[str, Any], name: str):
    assert found[f"late/{name}"].code == found[f"at_once/{name}"].code == 0
    late, at_once = (outcome(found["directory"], how, name) for how in ("late", "at_once"))
    assert late == at_once
    assert late[1] < 1  # not NaN: batch norm's statistics have been restored
    if "fp16" in name:  # an overflow of the loss scaler is no error
        return
    (error,) = late[2]
    assert 1 < error["step"] < 16  # the first step and the last are read at once
    assert "rank 0 on " in error["message"]


def test_where_none_may_be_left_out_the_run_ends_one_step_later_and_names_the_step(found: dict[str, Any]):
    _, _, (error,) = outcome(found["directory"], "late", "adamw")
    row = found["not one may be left out"]
    assert row.code == 1
    assert row.steps == error["step"] + 1
    assert f"step {error['step']}: gradients are not finite: " in row.error
    assert ", the loss; " in row.error
