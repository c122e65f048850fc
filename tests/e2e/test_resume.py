"""A run that was killed, started again: the same bits as one that was not; and what stands in the way of a restart."""

import json
import sys
from pathlib import Path

import pytest

from .launchers import LAUNCHERS, ROOT, Done, events, launch, summary

# Eight steps of 64 an epoch, the last with 52 samples; checkpoints at 3, 6, 9, 12, 15 and after each epoch (8, 16).
FLAGS = "--dataset digits --train-samples 500 --batch-size {batch} --epochs 2 --checkpoint-steps 3 --no-progress"


def run(
    directory: Path, *, ranks: int = 2, batch: int = 32, flags: str = "", attack: dict | None = None, **extra
) -> Done:
    """Train on `ranks` ranks, with at most one fault."""
    start = LAUNCHERS["mpirun"].format(ranks=ranks)
    script = f"{sys.executable} {ROOT}/tests/chaos/attacked.py"
    extra |= {"PYTHONPATH": str(ROOT), "ATTACK": json.dumps(attack or {})}
    return launch(f"{start} {script} {FLAGS.format(batch=batch)} {flags} --output-dir {directory}", timeout=60, **extra)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The directory of a run that nothing disturbed."""
    directory = tmp_path_factory.mktemp("whole")
    done = run(directory)
    assert done.code == 0, done
    return directory


RESULTS = ("parameters_sha256", "test_loss", "test_accuracy", "samples", "steps", "epochs")


def results(directory: Path) -> dict:
    return {key: summary(directory)[key] for key in RESULTS}


@pytest.mark.parametrize(
    "attack",
    [
        dict(rank=1, point="backward", count=5, kind="kill"),
        dict(rank=0, point="half", count=4, kind="kill"),  # with half a checkpoint written
    ],
    ids=lambda attack: attack["point"],
)
def test_a_killed_run_ends_as_if_nothing_had_been(attack, whole, tmp_path):
    killed = run(tmp_path, attack=attack)
    assert killed.code not in (0, 2), killed
    assert "attack: rank" in killed.stdout, killed
    done = run(tmp_path)
    assert done.code == 0, done
    assert results(tmp_path) == results(whole)
    (resumed,) = events(tmp_path, "resume")
    assert 0 < resumed["step"] < 16
    steps = [line["step"] for line in events(tmp_path, "train")]
    assert steps[-1] == 16
    assert not [path for path in (tmp_path / "checkpoints").iterdir() if path.name.startswith(".")]
