"""A program that forks, or starts training, within a training: one line, and nobody waits."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
BEGIN = """
import os, sys
import torch
from hvdtrain import training

flags = training.parser("program", "", output_dir="out").parse(["--engine", "serial", "--no-progress"])
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
with training.start(flags) as run:
    model, optimizer = run.prepare(model, optimizer)
    for epoch in run.epochs(1):
        for step in run.steps(torch.ones(64, 1)):
            BODY
            for batch in step.batches():
                step.backward(model(*batch).mean())
            step.update()
print("trained", flush=True)
"""
CHILD = """if step.number == 1 and (child := os.fork()):
    _, status = os.waitpid(child, 0)
    print("child", os.waitstatus_to_exitcode(status), flush=True)
elif step.number == 1:
    {}"""
LINE = "hvdtrain: error: a process that was forked from a rank goes on with the rank's work: end it with os._exit(), or use"


def run(body: str, directory: Path) -> subprocess.CompletedProcess[str]:
    (directory / "program.py").write_text(BEGIN.replace("BODY", textwrap.indent(body, " " * 12).strip()))
    return subprocess.run(
        [sys.executable, "program.py"], cwd=directory, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("does", "code", "said"),
    [("pass", 2, True), ("sys.exit(3)", 2, True), ("os._exit(3)", 3, False)],
    ids=["trains on", "raises", "ends itself"],
)
def test_a_child_that_goes_on_with_the_ranks_work_is_ended(does, code, said, tmp_path):
    done = run(CHILD.format(does), tmp_path)
    assert done.returncode == 0, done
    assert [line for line in done.stdout.splitlines() if line in ("trained", "child 2", "child 3")] == [
        f"child {code}", "trained",
    ], done  # fmt: skip
    assert (LINE in done.stderr) == said, done


def test_a_training_within_a_training_is_refused(tmp_path):
    """Not after the ten seconds for which a run waits until another has left its directory."""
    done = run("with training.start(flags) as other: pass", tmp_path)
    assert done.returncode == 1, done
    assert "UserError: training.start() inside training.start(): end the first block before the next\n" in done.stderr
