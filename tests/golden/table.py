"""The trainings whose results are hashed: each feature of the training loop is in one of them at least.

MPI's mpirun and torchrun start them, so that the code that starts ranks can be changed beside them.
"""

from typing import NamedTuple

MNIST = "hvdtrain.mnist --dataset digits --model convnet --train-samples 480 --epochs 2 --batch-size 32"
PROGRAM = "tests/golden/program.py"
PROGRAMS = "docs/programs"
IMAGES = (
    "hvdtrain.imagenet --dataset synthetic --train-samples 32 --model shufflenet_v2_x0_5 --image-size 32 --batch-size 8"
)
LM = "hvdtrain.lm --text LICENSE --steps 8 --recipe shakespeare-cpu --amp off"


class Attempt(NamedTuple):
    """One start of a training. kill_after: optimizer steps after which rank 1 is killed (0: it is not)."""

    ranks: int
    program: str  # a module or a file, with its flags
    launcher: str = (
        "mpirun"  # not what hvdtrain starts: a name of tests.e2e.launchers.LAUNCHERS, "torchrun", or "alone"
    )
    kill_after: int = 0


def killed(ranks: int, program: str, after: int, launcher: str = "mpirun", again: int = 0) -> list[Attempt]:
    """A training that is killed and started again, on `again` ranks (default: as many)."""
    program += " --checkpoint-steps 3"
    return [Attempt(ranks, program, launcher, after), Attempt(again or ranks, program, launcher)]


def one(ranks: int, program: str, launcher: str = "mpirun") -> list[Attempt]:
    return [Attempt(ranks, program, launcher)]


RUNS: dict[str, list[Attempt]] = {
    "serial": one(1, MNIST + " --engine serial", "alone"),
    "mpi-2": one(2, MNIST),
    "gloo-2": one(2, MNIST, "gloo"),
    "gloo-3": one(3, MNIST, "gloo"),
    "starter-3": one(3, MNIST, "starter"),
    "ddp-2": one(2, MNIST + " --engine ddp", "torchrun"),
    "default-model": one(2, "hvdtrain.mnist --dataset digits --train-samples 480 --batch-size 32"),
    "classic": one(2, MNIST + " --recipe classic"),
    "accumulate": one(2, MNIST + " --accumulate 2"),
    "uneven": one(3, MNIST.replace("480", "470")),
    "bf16": one(2, MNIST + " --amp bf16"),
    "fp16": one(2, MNIST + " --amp fp16"),
    "compression": one(2, MNIST + " --compression fp16"),
    "sum": one(2, MNIST + " --reduction sum"),
    "sync-rank": one(2, MNIST + " --sync-every 4 --outer-lr 0.7 --outer-momentum 0.9"),
    "sync-host": one(3, MNIST + " --sync-every 4 --sync-within host"),
    "plain": one(2, PROGRAM),
    "plain-ddp": one(2, PROGRAM + " --engine ddp", "torchrun"),
    "schedule": one(2, PROGRAM + " --case schedule"),
    "stream": one(2, PROGRAM + " --case stream"),
    "skipped": one(2, PROGRAM + " --case nan --max-skipped 3"),
    "tokens": one(2, f"{PROGRAMS}/tokens.py --epochs 1"),
    "gan": one(2, f"{PROGRAMS}/gan.py --epochs 1"),
    "several-data": one(2, f"{PROGRAMS}/semi.py --epochs 1"),
    "sampler": one(2, f"{PROGRAMS}/weighted.py --epochs 1"),
    "gather": one(2, f"{PROGRAMS}/contrast.py --epochs 1"),
    "workers": one(2, f"{PROGRAMS}/augment.py --epochs 1 --workers 1"),
    "lm": one(2, LM),
    "images": one(2, IMAGES),
    "killed": killed(2, MNIST, 11),
    "killed-3-2": killed(3, MNIST.replace("32", "20"), 6, again=2),
    "killed-ddp": killed(2, PROGRAM + " --engine ddp", 13, "torchrun"),
    "killed-schedule": killed(2, PROGRAM + " --case schedule", 13),
    "killed-stream": killed(2, PROGRAM + " --case stream", 13),
    "killed-sync": killed(2, MNIST + " --sync-every 4 --outer-momentum 0.9", 11),
    "virtual": one(1, MNIST + " --virtual-ranks 3 --engine serial", "alone"),
    "virtual-mpi-2": one(2, MNIST + " --virtual-ranks 3"),
    "virtual-ddp-3": one(3, MNIST + " --virtual-ranks 3", "torchrun"),
    "virtual-schedule": one(1, PROGRAM + " --case schedule --virtual-ranks 8 --batch-size 2", "alone"),
    "virtual-killed": [
        Attempt(8, PROGRAM + " --case schedule --virtual-ranks 8 --batch-size 2 --checkpoint-steps 3", kill_after=13),
        Attempt(3, PROGRAM + " --case schedule --virtual-ranks 8 --batch-size 2 --checkpoint-steps 3"),
    ],
    "evaluate": [Attempt(2, MNIST), Attempt(3, "hvdtrain.mnist --evaluate {out}")],
}  # fmt: skip
