"""A program that forks, or starts training, within a training: one line, and nobody waits."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = """
import os, sys
import torch
from hvdtrain import training

def settings(name):
    return training.parser("program", "", output_dir=name).parse(["--engine", "serial", "--no-progress"])

def train(name, within_first_step):
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with training.start(settings(name)) as run:
        model, optimizer = run.prepare(model, optimizer)
        for epoch in run.epochs(1):
            for step in run.steps(torch.ones(64, 1)):
                if step.number == 1:
                    within_first_step()
                for batch in step.batches():
                    step.backward(model(*batch).mean())
                step.update()
    print(name, "trained", flush=True)

def forking(name, does):
    def fork():
        if child := os.fork():
            _, status = os.waitpid(child, 0)
            print(name, "child", os.waitstatus_to_exitcode(status), flush=True)
        else:
            does()
    return name, fork

def start_again():
    with training.start(settings("within")):
        pass

train(*forking("trains-on", lambda: None))
train(*forking("raises", lambda: sys.exit(3)))
train(*forking("ends-itself", lambda: os._exit(3)))
train("outer", start_again)
"""
LINE = "hvdtrain: error: a process that was forked from a rank goes on with the rank's work: end it with os._exit(), or use"


def test_a_child_or_a_training_within_a_training_is_ended_and_the_rank_trains_on(tmp_path):
    """The training within is refused at once, and not after the ten seconds for which a run waits for its directory."""
    (tmp_path / "program.py").write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True,
        text=True, timeout=120, check=False,
    )  # fmt: skip
    assert [line for line in done.stdout.splitlines() if line.endswith((" trained", "2", "3"))] == [
        *("trains-on child 2", "trains-on trained", "raises child 2", "raises trained"),
        *("ends-itself child 3", "ends-itself trained"),
    ], done
    assert done.stderr.count(LINE) == 2, done
    assert done.returncode == 1, done
    assert "UserError: training.start() inside training.start(): end the first block before the next\n" in done.stderr
