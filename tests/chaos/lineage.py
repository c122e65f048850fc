"""Runs with faults in them, and the count of what they took: shared by tests/e2e and `make chaos`."""

import json
import shlex
import time
from collections import Counter
from pathlib import Path

from tests.chaos.programs import EPOCHS, MNIST, Program
from tests.e2e.launchers import LAUNCHERS, PYTHON, ROOT, TORCHRUN, Done, launch, summary

RESULTS = ("parameters_sha256", "test_loss", "test_accuracy", "accuracy", "samples", "steps", "epochs")

OWN = ("ATTACK", "TAKEN", "STRUCK", "ATTEMPT", "PROGRAM")  # variables that attacked.py reads
WRAPPER = "mpirun.sh"  # it starts a job that has failed again
WRAPPED = f"bash {shlex.quote(str(ROOT / 'launch' / WRAPPER))} -np {{ranks}} --restarts 5"
STARTS = {launcher: f"{start} {PYTHON}" for launcher, start in LAUNCHERS.items()} | {
    "torchrun": TORCHRUN,
    WRAPPER: " ".join([WRAPPED, *(f"--pass {name}" for name in OWN), "--", PYTHON]),
}


def attacked(
    directory: Path, *, ranks: int = 2, batch: int = 32, flags: str = "", attack: dict | None = None,
    launcher: str = "mpirun", timeout: float = 150, program: Program = MNIST,
) -> Done:  # fmt: skip
    """Train on `ranks` ranks with at most one fault, and log each sample that is taken in `directory`/taken."""
    (directory / "taken").mkdir(parents=True, exist_ok=True)
    (directory / "struck").unlink(missing_ok=True)
    start = STARTS[launcher].format(ranks=ranks)
    engine = "--engine ddp" if launcher == "torchrun" else ""
    attacker = shlex.quote(str(ROOT / "tests" / "chaos" / "attacked.py"))
    command = f"{start} {attacker} {program.flags} --batch-size {batch} {engine} {flags}"
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


def struck_at(directory: Path) -> float | None:
    """Return when (seconds since the epoch) the fault of the last attempt struck; None where it never came to its point."""
    return next(iter(all_struck(directory)), None)


def all_struck(directory: Path) -> list[float]:
    """Return the same of each fault of the last launch: a wrapper's attempts may have several."""
    path = directory / "struck"
    return [float(line.split()[0]) for line in path.read_text().splitlines()] if path.exists() else []


def seconds_lost(directory: Path, faults: list[float]) -> float:
    """Return how many seconds of training were done again, over the faults that struck at these times.

    For each: from the checkpoint that the next attempt went on from, or from the attempt's own start where that came later.
    """
    paths = directory.glob("metrics*.jsonl")  # an attempt that found no checkpoint begins a new one
    lines = sorted(
        (json.loads(line) for path in paths for line in path.read_text().splitlines()), key=lambda e: e["time"]
    )
    lost = 0.0
    for previous, fault in zip([0.0, *faults], faults, strict=False):
        began = max((e["time"] for e in lines if e["event"] == "start" and previous < e["time"] < fault), default=fault)
        until = next((later for later in faults if later > fault), float("inf"))
        resumed = next((e["step"] for e in lines if e["event"] == "resume" and fault < e["time"] < until), None)
        saved = [e["time"] for e in lines if e["event"] == "checkpoint" and e["step"] == resumed and e["time"] < fault]
        lost += fault - max([began, *saved])
    return lost
