"""hvdtrain.audit: each fault of a program is told from every other, and a sound program from all."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.audited import forked
from tests.e2e.launchers import environment
from tests.waiting import wait_for

PROGRAM = Path(forked.__file__).with_name("program.py")
# The guarantees that fail with each fault of tests/audited/program.py, the kills that are made, and a part of what is said.
LATER = {"losses", "evaluations", "final weights"}
FAULTS = {
    "none": (set(), 4, "All that was seen held"),
    "nothing": ({"resumes", "work repeated"}, 1, "it starts over"),
    "traceback": ({"resumes", "exit codes"}, 1, "it ends with 1: ValueError: a checkpoint that this program can't read"),
    "hang": ({"resumes"}, 1, "it hangs: no end after"),
    "older": ({"work repeated"}, 1, "although checkpoint.pt was written before"),
    "torn": ({"resumes", "exit codes"}, 4, "kill 4: it ends with 1"),
    "weights": ({"weights", *LATER}, 1, "those of no step of the whole run; the optimizer's count of steps say"),
    "buffers": ({"weights", "evaluations", "final weights"}, 1, "buffers of the model, such as running means, differ"),
    "optimizer": ({"optimizer state", "learning rates", *LATER}, 1, "AdamW: for 0 parameters instead of 6"),
    "scheduler": ({"learning rates", *LATER}, 1, "0.01 instead of"),
    "scaler": ({"gradient scaler", "losses"}, 1, "scale and count [1024.0, 0] instead"),
    "random": ({"random numbers", *LATER}, 1, "torch from step"),
    "samples": ({"samples", "number of steps", *LATER}, 1, "of 288, 0 lost, 24 repeated, from step"),
    "augmentation": ({"augmentation", *LATER}, 1, "other content in"),
    "loss": ({"losses", *LATER}, 1, "from step"),
    "average": ({"evaluations"}, 1, "other results"),
    "rest": ({"samples", "number of steps", *LATER}, 1, "lost, 0 repeated, from step"),
    "term": ({"exit codes"}, 2, "0 after SIGTERM, with"),
    "processes": ({"left behind"}, 1, "processes, such as sleep 600"),
    "files": ({"left behind"}, 4, "temporary files, such as checkpoint.pt."),
}  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    path = tmp_path_factory.mktemp("server") / "socket"
    process = subprocess.Popen(
        [sys.executable, forked.__file__, "serve", str(path)], env=environment(OMP_NUM_THREADS="1")
    )
    wait_for(path.exists, "it does not listen", 120)
    yield path
    process.kill()
    process.wait()


def audit(folder: Path, *words: str, seconds: int = 300) -> subprocess.CompletedProcess:
    line = [sys.executable, "-m", "hvdtrain.audit", *words]
    env = environment(OMP_NUM_THREADS="1", PYTHONPATH=str(PROGRAM.parents[2]))
    return subprocess.run(line, cwd=folder, env=env, capture_output=True, text=True, timeout=seconds)


def failing(folder: Path) -> set[str]:
    kills = json.loads((folder / "audit/audit.json").read_text())["kills"]
    return {name for kill in kills for name, verdict in kill["verdicts"].items() if verdict["status"] == "fails"}


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("fault", FAULTS)
def test_told_apart(fault, ranks, server, tmp_path):
    expected, kills, said = FAULTS[fault]
    line = [sys.executable, forked.__file__, "run", str(server), str(ranks), str(PROGRAM), "{out}", fault]
    options = ["-np", str(ranks), "--launcher", "none", "--kills", str(kills)]
    if fault == "hang":
        options += ["--timeout", "10"]
    if fault == "term":
        options += ["--signals", "term"]
    done = audit(tmp_path, *options, "--", *line)
    assert done.returncode == bool(expected), done
    assert failing(tmp_path) == expected, done.stdout
    assert said in done.stdout
