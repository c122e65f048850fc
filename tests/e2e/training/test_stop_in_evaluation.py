"""A stop signal during an evaluation is obeyed there, and an evaluation longer than the time-out is not killed."""

import os
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.e2e.launchers import LAUNCHERS, MARK, PYTHON, ROOT, environment, events, kill, launch, remaining, summary

PROGRAM = '''
"""A small net, and an evaluation that takes its time."""
import time
import torch
from torch import nn
from hvdtrain import training

def main():
    parser = training.parser("slow", __doc__, epochs=2, batch_size=8)
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.may_change_on_resume("seconds")
    flags = parser.parse_args()
    with training.start(flags) as run:
        torch.manual_seed(1)
        x = torch.randn(64, 4)
        net = nn.Linear(4, 1)
        net, optimizer = run.prepare(net, torch.optim.Adam(net.parameters()))
        for epoch in run.epochs(flags.epochs):
            for step in run.steps(x):
                for (inputs,) in step.batches():
                    step.backward(net(inputs).square().mean())
                step.update()
            with run.evaluating(40) as mine:
                for part in x[:40][mine].split(1):
                    time.sleep(flags.seconds)
                    run.record(loss=net(part).square().sum())
    return run.exit_code

if __name__ == "__main__":
    training.main(main)
'''


def command(directory: Path, seconds: float, flags: str = "") -> str:
    (directory / "slow.py").write_text(PROGRAM)
    start = f"{LAUNCHERS['mpirun'].format(ranks=2)} {PYTHON} {directory / 'slow.py'}"
    return f"{start} --seconds {seconds} --no-progress --output-dir {directory / 'out'} {flags}"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_stop_signal_in_an_evaluation_is_obeyed_there_and_the_next_start_repeats_it(tmp_path):
    (tmp_path / "whole").mkdir()
    assert launch(command(tmp_path / "whole", 0), PYTHONPATH=str(ROOT), timeout=100).code == 0
    job, out = f"evaluating-{os.getpid()}", tmp_path / "out"
    process = subprocess.Popen(
        shlex.split(command(tmp_path, 2.0)), cwd=ROOT,
        env=environment(**{MARK: job, "PYTHONPATH": str(ROOT)}), start_new_session=True, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        until = time.monotonic() + 60
        while not (out / "metrics.jsonl").exists() or not events(out, "ranks"):
            assert time.monotonic() < until, process.poll()
            time.sleep(0.1)
        os.kill(events(out, "start")[0]["ranks"][1]["pid"], signal.SIGUSR1)
        output, _ = process.communicate(timeout=30)  # whole, the evaluation would take 40 s more
        assert process.returncode == 75, output
        (stop,) = events(out, "stop")
        assert stop["reason"].startswith("SIGUSR1 on rank 1")
        assert not events(out, "evaluate")
        assert events(out, "checkpoint")[-1]["step"] == stop["step"] == 4
        assert remaining(job) == []
    finally:
        kill(job)
    done = launch(command(tmp_path, 0), PYTHONPATH=str(ROOT), timeout=100)
    assert done.code == 0, done
    assert [event["step"] for event in events(out, "evaluate")] == [4, 8]
    same = ("parameters_sha256", "loss", "samples", "steps")
    assert {key: summary(out)[key] for key in same} == {key: summary(tmp_path / "whole/out")[key] for key in same}


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_an_evaluation_longer_than_the_time_out_is_not_killed(tmp_path):
    done = launch(command(tmp_path, 0.4, "--step-timeout 2 --epochs 1"), PYTHONPATH=str(ROOT), timeout=120)
    assert done.code == 0, done
    assert len(events(tmp_path / "out", "evaluate")) == 1
