"""The programs that are attacked: hvdtrain.mnist, hvdtrain.imagenet on shards with DataLoader workers, and a user's own.

Each takes about eight steps an epoch, two epochs, and a checkpoint every third step, however many ranks share a step.
"""

import shlex
from dataclasses import dataclass, field
from pathlib import Path

from hvdtrain.datasets import make_shards
from tests import image_set
from tests.e2e.launchers import ROOT

EPOCHS = 2
PROGRAMS = ("mnist", "imagenet", "augment", "gan")
EVERY = f"--epochs {EPOCHS} --checkpoint-steps 3 --no-progress"


@dataclass(frozen=True)
class Program:
    name: str
    samples: int  # an epoch takes
    batch: dict[int, int]  # by ranks: samples per rank and step
    flags: str
    script: Path | None = None  # None: hvdtrain.mnist, as tests/chaos/attacked.py has it
    # Times a whole run comes to a place, by which faults are drawn, where they differ from those of hvdtrain.mnist.
    visits: dict[str, int] = field(default_factory=dict)


# Eight steps of 64 an epoch, the last with 52 samples; checkpoints at 3, 6, 9, 12, 15 and after each epoch (8, 16).
MNIST = Program("mnist", 500, {2: 32, 3: 20, 4: 16, 6: 10, 8: 8}, f"--dataset digits --train-samples 500 {EVERY}")


def programs(scratch: Path) -> dict[str, Program]:
    """Return all of them, by name; `scratch` is given the image set. Raises ImportError where an extra is missing."""
    folder = image_set.write(scratch / "images" / "folder", train=120, test=24)
    shards = scratch / "images" / "shards"
    for split in ("train", "val"):
        make_shards.make_shards(folder / split, shards / split, per_shard=17, seed=1)
    imagenet = "--model shufflenet_v2_x0_5 --image-size 32 --workers 1 --dataset shards"
    batch = {2: 8, 3: 5, 4: 4, 6: 3, 8: 2}
    return {
        "mnist": MNIST,
        "imagenet": Program(
            "imagenet", 120, batch, f"{imagenet} --data-dir {shlex.quote(str(shards))} {EVERY}",
            ROOT / "hvdtrain" / "imagenet.py",
        ),
        "augment": Program(  # a DataLoader with workers and random augmentation, dropout
            "augment", 2_000, {2: 125, 3: 84, 4: 63, 6: 42, 8: 32}, f"--workers 1 {EVERY}",
            ROOT / "docs" / "programs" / "augment.py",
        ),
        "gan": Program(  # two models, two optimizers, two updates a step
            "gan", 4_000, {2: 256, 3: 171, 4: 128, 6: 86, 8: 64}, EVERY, ROOT / "docs" / "programs" / "gan.py",
            {"backward": 32, "update": 32, "allreduce": 32, "evaluate": 0},
        ),
    }  # fmt: skip
