"""Runs with faults in them, and the count of what they took: shared by tests/e2e and `make chaos`."""

import json
import shlex
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from hvdtrain.checkpoint import checkpoint
from tests.chaos.programs import EPOCHS, MNIST, Program
from tests.e2e.launchers import LAUNCHERS, PYTHON, ROOT, TORCHRUN, Done, launch, summary

TOLERANCE = 1e-3  # relative, of the loss and of each weight, where the number of ranks changed
RESULTS = ("parameters_sha256", "test_loss", "test_accuracy", "accuracy", "samples", "steps", "epochs")

OWN = ("ATTACK", "TAKEN", "STRUCK", "ATTEMPT", "PROGRAM")  # variables that attacked.py reads
HARMLESS = ("slow", "stranger")  # faults without any effect
SURVIVED = (*HARMLESS, "full", "refill")  # faults after which training goes on
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


def tally(directory: Path, epochs: int = EPOCHS, samples: int = MNIST.samples) -> tuple[int, int]:
    """Return how many samples the surviving run took not at all and how many more than once, over all epochs.

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
    lost = repeated = 0
    for epoch in range(epochs):
        seen = Counter(i for (e, _), (_, ranks) in last.items() if e == epoch for some in ranks.values() for i in some)
        lost += sum(seen[i] == 0 for i in range(samples))
        repeated += sum(count - 1 for count in seen.values() if count > 1)
    return lost, repeated


class Fault(NamedTuple):
    """When (seconds since the epoch) and how a rank was attacked."""

    time: float
    kind: str


def struck_at(directory: Path) -> float | None:
    """Return when the fault of the last attempt struck; None if it never came to its point."""
    return next((fault.time for fault in all_struck(directory)), None)


def all_struck(directory: Path) -> list[Fault]:
    """Return all faults of the last launch, in order: a wrapper's attempts may have several."""
    path = directory / "struck"
    words = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    return [Fault(float(time), kind) for time, kind, *_ in words]


def seconds_lost(directory: Path, faults: Sequence[Fault]) -> float:
    """Return how many seconds of training were done again, over all attempts that ended by one of these faults.

    For each: from the checkpoint that the next attempt continued from, or from the attempt's own start if that came later,
    to the fault. Nothing after a stop signal, whose checkpoint is saved after the fault, and nothing for a fault that
    training survives. A checkpoint that is not on record was completed when the fault struck.
    """
    paths = directory.glob("metrics*.jsonl")  # an attempt that found no checkpoint begins a new one
    lines = sorted(
        (json.loads(line) for path in paths for line in path.read_text().splitlines()), key=lambda e: e["time"]
    )
    starts = [e["time"] for e in lines if e["event"] == "start"]
    lost = 0.0
    for began, again, until in zip(starts, starts[1:], [*starts[2:], float("inf")], strict=False):
        struck = [fault for fault in faults if began < fault.time < again]
        if not struck:
            continue
        # If training survives all of them, the last one was a full disk at the last checkpoint of all.
        fault = next((fault for fault in struck if fault.kind not in SURVIVED), struck[-1]).time
        step = next((e["step"] for e in lines if e["event"] == "resume" and again <= e["time"] < until), None)
        times = [e["time"] for e in lines if e["event"] == "checkpoint" and e["step"] == step and e["time"] < again]
        saved = began if step is None else max(times, default=fault)
        lost += max(0.0, fault - max(began, saved))
    return lost


def differences(apart: Path, together: Path) -> list[str]:
    """Return in what two runs differ beyond float tolerance."""
    one, other = results(apart), results(together)
    unlike = [
        f"{name}: {one[name]}, {other[name]}" for name in ("samples", "steps", "epochs") if one[name] != other[name]
    ]
    if abs(one["test_loss"] - other["test_loss"]) > TOLERANCE * other["test_loss"]:
        unlike.append(f"test_loss: {one['test_loss']}, {other['test_loss']}")
    if (
        abs(one["test_accuracy"] - other["test_accuracy"]) > 1.5 / 382
    ):  # one sample on the border may fall to either side
        unlike.append(f"test_accuracy: {one['test_accuracy']}, {other['test_accuracy']}")
    weights = [
        checkpoint.read_checkpoint(checkpoint.checkpoints_in(path / "checkpoints")[0])[1] for path in (apart, together)
    ]
    unlike += [
        f"{name}: up to {(weights[0][name] - weights[1][name]).abs().max():.1e} apart"
        for name in weights[1]
        if name.startswith("model.")
        and not torch.allclose(weights[0][name], weights[1][name], rtol=TOLERANCE, atol=1e-5)
    ]
    return unlike
