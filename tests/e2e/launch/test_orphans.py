"""Launchers that are killed, shells that go away, a first step that takes long, a stop signal before it is over."""

import os
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.e2e.launchers import (
    LAUNCHERS,
    PYTHON,
    ROOT,
    TORCHRUN,
    events,
    launch,
    members,
    running,
    wait_for_training,
)
from tests.waiting import wait_for

TRAIN = "-m hvdtrain.mnist --dataset digits --epochs 100000 --no-progress --output-dir"
WRAPPER = shlex.quote(str(ROOT / "launch" / "mpirun.sh"))
STARTS = {
    "torchrun": f"{TORCHRUN.format(ranks=2)} {TRAIN} {{out}} --engine ddp",
    "mpirun": f"{LAUNCHERS['mpirun'].format(ranks=2)} {PYTHON} {TRAIN} {{out}}",
    "mpirun.sh": f"bash {WRAPPER} -np 2 --restarts 3 -- {PYTHON} {TRAIN} {{out}}",
    "horovodrun": f"{LAUNCHERS['gloo'].format(ranks=2)} {PYTHON} {TRAIN} {{out}}",
    "hvdtrain.starter": f"{LAUNCHERS['starter'].format(ranks=2)} {TRAIN} {{out}}",
}


@pytest.mark.slow
@pytest.mark.parametrize("launcher", STARTS)
@pytest.mark.timeout(200)
@pytest.mark.leaves("ompi.", "vader_segment.")  # mpirun's own, which it cannot remove once it is killed
def test_ranks_stop_when_their_launcher_is_killed(launcher, tmp_path):
    command = STARTS[launcher].format(out=tmp_path)
    with (
        (tmp_path / "output").open("w") as output,
        running(command, stdout=output, stderr=subprocess.STDOUT) as (process, job),
    ):
        wait_for_training(tmp_path)
        process.kill()
        process.wait()
        wait_for(lambda: not members(job), lambda: f"ranks train on: {events(tmp_path)[-1]}")
    (stop,) = events(tmp_path, "stop")
    assert launcher in stop["reason"] or stop["reason"].startswith("SIGTERM"), stop
    assert events(tmp_path, "checkpoint")[-1]["step"] == stop["step"]


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.leaves("ompi.", "vader_segment.")  # mpirun's own
def test_a_run_in_the_background_outlives_its_shell(tmp_path):
    """Under mpirun and alone: the shell that started them ends at once."""
    alone = f"{PYTHON} {TRAIN} {tmp_path / 'alone'} --engine serial"
    both = f"nohup {STARTS['mpirun'].format(out=tmp_path / 'mpi')} > {tmp_path}/1 2>&1 & nohup {alone} > {tmp_path}/2 2>&1 &"
    with running(["sh", "-c", both]) as (shell, _):
        assert shell.wait(60) == 0
        for name in ("alone", "mpi"):
            wait_for_training(tmp_path / name)
        time.sleep(3)
        for name in ("alone", "mpi"):
            steps = events(tmp_path / name, "train")[-1]["step"]
            wait_for(lambda steps=steps, name=name: events(tmp_path / name, "train")[-1]["step"] > steps, name)
            assert not events(tmp_path / name, "stop")


def slow_first_step(tmp_path: Path, seconds: float, flags: str) -> str:
    """Return a command whose rank 1 takes so long in its first backward pass."""
    body = "import hvdtrain.mnist as m, time, torch; from hvdtrain.launching.exit_codes import run_command; "
    body += (
        "from hvdtrain.engines.launchers import announced; real = torch.Tensor.backward; first = [announced().rank]; "
    )
    body += f"pause = lambda: first and first.pop() and time.sleep({seconds}); "
    body += "torch.Tensor.backward = lambda *a, **k: (pause(), real(*a, **k))[1]; run_command(m.main)"
    start = f'{LAUNCHERS["mpirun"].format(ranks=2)} {PYTHON} -c "{body}"'
    return f"{start} --dataset digits --no-progress --output-dir {tmp_path} {flags}"


@pytest.mark.slow
def test_a_first_step_that_takes_longer_than_the_time_out_is_not_killed(tmp_path):
    done = launch(slow_first_step(tmp_path, 12.0, "--epochs 1 --step-timeout 2"), timeout=150)
    assert done.code == 0, done


@pytest.mark.slow
def test_a_stop_signal_in_the_first_step_is_obeyed_there(tmp_path):
    command = slow_first_step(tmp_path, 1000.0, "--epochs 1")
    with running(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as (process, job):
        metrics = tmp_path / "metrics.jsonl"
        wait_for(lambda: metrics.exists() and events(tmp_path, "start"), "it did not start")
        rank = events(tmp_path, "start")[0]["ranks"][1]["pid"]
        os.kill(rank, signal.SIGTERM)
        output, _ = process.communicate(timeout=40)
        assert process.returncode == 75, output
        assert "stopped by SIGTERM on rank 1 " in output
        assert "before the first step was finished; nothing to save: run the same command again" in output
        assert events(tmp_path, "stop")[0]["reason"].startswith("SIGTERM on rank 1")
        wait_for(lambda: not members(job), "left behind")
