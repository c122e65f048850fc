"""Runs with faults in them, and the count of what they took: shared by tests/e2e and `make chaos`."""

import json
import shlex
import time
from collections import Counter, defaultdict
from pathlib import Path

import torch

from hvdtrain.checkpoint import checkpoint
from tests.chaos.programs import EPOCHS, MNIST, Program
from tests.e2e.launchers import LAUNCHERS, PYTHON, ROOT, TORCHRUN, Done, launch, summary

TOLERANCE = 1e-3  # relative, of the loss and of each weight, where the number of ranks changed
EXACT = ("samples", "steps", "epochs")
RESULTS = ("parameters_sha256", "test_loss", "test_accuracy", "accuracy", *EXACT)

OWN = ("ATTACK", "TAKEN", "STRUCK", "ATTEMPT", "PROGRAM")  # variables that attacked.py reads
HARMLESS = ("slow", "stranger")  # faults without any effect
WRAPPER = "mpirun.sh"  # it starts a job that has failed again
WRAPPED = f"bash {shlex.quote(str(ROOT / 'launch' / WRAPPER))} -np {{ranks}} --restarts 5"
STARTS = {launcher: f"{start} {PYTHON}" for launcher, start in LAUNCHERS.items()} | {
    "torchrun": TORCHRUN,
    WRAPPER: " ".join([WRAPPED, *(f"--pass {name}" for name in OWN), "--", PYTHON]),
}


def attacked(
    directory: Path, *, ranks: int = 2, batch: int | None = 32, flags: str = "", attack: dict | None = None,
    launcher: str = "mpirun", timeout: float = 150, program: Program = MNIST,
) -> Done:  # fmt: skip
    """Train on `ranks` ranks with at most one fault, and log each sample that is taken in `directory`/taken."""
    (directory / "taken").mkdir(parents=True, exist_ok=True)
    (directory / "struck").unlink(missing_ok=True)
    start = STARTS[launcher].format(ranks=ranks)
    engine = "--engine ddp" if launcher == "torchrun" else ""
    attacker = shlex.quote(str(ROOT / "tests" / "chaos" / "attacked.py"))
    size = "" if batch is None else f"--batch-size {batch}"  # None: the program's own
    command = f"{start} {attacker} {program.flags} {size} {engine} {flags}"
    extra = {
        "PYTHONPATH": str(ROOT),
        "ATTACK": json.dumps(attack or {}),
        "TAKEN": str(directory / "taken"),
        "STRUCK": str(directory / "struck"),
        "ATTEMPT": str(time.time_ns()),
        "PROGRAM": str(program.script or ""),
        "OMPI_MCA_rmaps_base_oversubscribe": "1",  # for the wrapper, which has no option for it
    }
    return launch(f"{command} --output-dir {directory}", timeout=timeout, **extra)


def results(directory: Path) -> dict:
    found = summary(directory)
    return {key: found[key] for key in RESULTS if key in found}


def taken(directory: Path) -> dict[int, Counter[int]]:
    """Return how often each sample was taken, by epoch.

    Steps that were lost with their process and taken again count once, with what the last attempt took.
    """
    last: dict[tuple[int, int], tuple[int, dict[str, list[int]]]] = {}
    for path in (directory / "taken").iterdir():
        attempt, _, rank = path.name.partition(".")
        for line in path.read_text().splitlines():
            epoch, step, indices = json.loads(line)
            newest, by_rank = last.get((epoch, step), (0, {}))
            if int(attempt) > newest:
                newest, by_rank = int(attempt), {}
            if int(attempt) == newest:
                by_rank[rank] = indices
            last[epoch, step] = newest, by_rank
    found: dict[int, Counter[int]] = defaultdict(Counter)
    for (epoch, _), (_, by_rank) in last.items():
        found[epoch].update(index for indices in by_rank.values() for index in indices)
    return found


def tally(directory: Path, epochs: int = EPOCHS, samples: int = MNIST.samples) -> tuple[int, int]:
    """Return how many samples the surviving run took not at all and how many more than once, over all epochs."""
    seen = [taken(directory)[epoch] for epoch in range(epochs)]
    lost = sum(each[index] == 0 for each in seen for index in range(samples))
    return lost, sum(count - 1 for each in seen for count in each.values() if count > 1)


def all_struck(directory: Path) -> list[float]:
    """Return when (seconds since the epoch) the faults of the last launch struck: a wrapper's attempts may have several."""
    path = directory / "struck"
    return [float(line.split()[0]) for line in path.read_text().splitlines()] if path.exists() else []


def assert_equal_up_to_rounding(apart: Path, together: Path) -> None:
    one, other = results(apart), results(together)
    assert [one[name] for name in EXACT] == [other[name] for name in EXACT]
    assert abs(one["test_loss"] - other["test_loss"]) <= TOLERANCE * other["test_loss"]
    # One sample on the border may fall to either side.
    assert abs(one["test_accuracy"] - other["test_accuracy"]) <= 1.5 / 382
    saved = [checkpoint.checkpoints_in(path / "checkpoints")[0] for path in (apart, together)]
    weights, expected = (
        {name: tensor for name, tensor in checkpoint.read_checkpoint(path)[1].items() if name.startswith("model.")}
        for path in saved
    )
    torch.testing.assert_close(weights, expected, rtol=TOLERANCE, atol=1e-5)
