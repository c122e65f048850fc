"""On the stand-in accelerator, every script trains, and a quiet step makes the host wait no more often than the table says.

The numbers may only fall. stand_in.py says what is counted, and what this cannot show.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests import image_set

torch_has_it = pytest.importorskip("torch.utils.backend_registration")
if not hasattr(torch_has_it, "_setup_privateuseone_for_python_backend"):
    pytest.skip("the stand-in needs torch 2.9", allow_module_level=True)

ROOT = Path(__file__).resolve().parents[3]
RESUMED = "--output-dir OUT/again --resume OUT/mnist/checkpoints/step-00000008.safetensors --checkpoint-steps 10"
MNIST = "--dataset digits --train-samples 1280 --epochs 1 --batch-size 64"
IMAGES = "--model resnet18 --image-size 32 --batch-size 8 --train-samples 64 --epochs 1"
LM = "--layers 1 --heads 2 --width 32 --context 16 --batch-size 4 --steps 12 --sample-tokens 2 --warmup-steps 2"

# name: script, flags, most of each kind in a quiet step
RUNS: dict[str, tuple[str, str, dict[str, int]]] = {
    "mnist": ("hvdtrain.mnist", f"{MNIST} --output-dir OUT/mnist --checkpoint-steps 8 --keep 9", {"read": 1}),
    "mnist, resumed": ("hvdtrain.mnist", f"{MNIST} {RESUMED}", {"read": 1}),
    "mnist, fp16": ("hvdtrain.mnist", f"{MNIST} --amp fp16", {"read": 1}),
    "synthetic images": ("hvdtrain.imagenet", f"{IMAGES} --dataset synthetic", {"read": 1}),
    "folder": ("hvdtrain.imagenet", f"{IMAGES} --data-dir IMAGES --workers 0", {"read": 2, "pageable": 2}),
    "shards": ("hvdtrain.imagenet", f"{IMAGES} --data-dir SHARDS --dataset shards --workers 0", {"read": 2, "pageable": 2}),
    "text": ("hvdtrain.lm", f"{LM} --accumulate 2 --text TEXT", {"read": 3, "pageable": 4}),
    "augment.py": ("docs/programs/augment.py", "--epochs 1 --workers 0", {"read": 2, "pageable": 2}),
    "gan.py": ("docs/programs/gan.py", "--epochs 1", {"read": 3, "pageable": 1}),
    "tokens.py": ("docs/programs/tokens.py", "--epochs 1", {"read": 3, "pageable": 1}),
}  # fmt: skip


class Found(NamedTuple):
    """What `tests.device.trace` prints of a run."""

    code: int
    steps: int
    quiet: int
    per_step: dict[str, int]
    lines: list[str]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Found]:
    """All runs, in one process, which imports torch once."""
    directory = tmp_path_factory.mktemp("device")
    images = image_set.write(directory / "images", 64, 12)
    make = [sys.executable, "-m", "hvdtrain.data.make_shards", str(images), str(directory / "shards")]
    subprocess.run(make, cwd=ROOT, check=True, timeout=300, capture_output=True)
    (directory / "text").write_text("All that glisters is not gold; often have you heard that told. " * 100)
    paths = {"OUT": directory, "IMAGES": images, "SHARDS": directory / "shards", "TEXT": directory / "text"}
    runs = []
    for script, flags, _ in RUNS.values():
        for name, path in paths.items():
            flags = flags.replace(name, str(path))
        runs.append((script, flags.split()))
    command = [sys.executable, "-m", "tests.device.trace", "--all", json.dumps(runs)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    rows = [Found(*json.loads(line[6:])) for line in done.stdout.splitlines() if line.startswith("TRACE ")]
    if done.returncode:
        pytest.fail(f"{list(RUNS)[len(rows)]}\n{done.stdout[-1000:]}\n{done.stderr[-3000:]}", pytrace=False)
    return dict(zip(RUNS, rows, strict=True))


@pytest.mark.parametrize("name", RUNS)
def test_a_quiet_step_keeps_to_its_budget(found: dict[str, Found], name: str):
    row = found[name]
    assert row.code == 0
    assert row.quiet >= 3
    assert row.per_step == RUNS[name][2], "\n".join(row.lines)
