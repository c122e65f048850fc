"""How a job ends under each launcher: with the exit code of the rank that ended it, said once, and nothing left behind."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.e2e.launchers import LAUNCHERS, PYTHON, events, launch, members, running, train, wait_for_training
from tests.waiting import wait_for


def ended_by(done) -> list[str]:
    """Return the lines in which horovodrun --gloo names the rank that ended the job."""
    return [line for line in done.stderr.splitlines() if line.startswith("horovodrun: ")]


# As a command refuses its input, but without torch.
REFUSES = """
from hvdtrain.engines.errors import UserError
from hvdtrain.launching.exit_codes import run_command
def main():
    raise UserError("1 samples but 2 ranks: take more", everywhere=True)
run_command(main)
"""
# Under --gloo: tests/single/launch/test_horovodrun_patches.py has the launcher's exit codes and lines, without torch.
EACH = ["horovodrun", *(pytest.param(name, marks=pytest.mark.slow) for name in ("mpirun", "gloo"))]


@pytest.mark.parametrize("launcher", ["horovodrun", "mpirun", "gloo"])
@pytest.mark.parametrize("real", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_bad_input_ends_with_two(real, launcher, tmp_path):
    (tmp_path / "refuses.py").write_text(REFUSES)
    program = "-m hvdtrain.mnist --dataset digits --train-samples 1" if real else f"{tmp_path}/refuses.py"
    done = launch(f"{LAUNCHERS[launcher].format(ranks=2)} {PYTHON} {program}", timeout=120)
    assert done.code == 2, done
    said = [line for line in done.stderr.splitlines() if ": error: " in line]
    assert len(said) == 1, done
    assert ("hvdtrain.mnist" if real else "refuses") + ": error: 1 samples but 2 ranks" in said[0], done
    assert "Traceback" not in done.stdout + done.stderr, done
    if launcher == "gloo":
        assert ended_by(done) == ["horovodrun: rank 0 on localhost ended the job with exit code 2"], done
        assert len(done.stderr.splitlines()) == 2, done
    assert done.left_behind == 0


def test_a_home_that_cannot_be_written_is_not_needed():
    """Horovod's launcher keeps a cache there. Nobody, root included, can make a directory in /proc."""
    done = launch(f"{LAUNCHERS['gloo'].format(ranks=2)} {PYTHON} -c 'print(6 * 7)'", HOME="/proc/none")
    assert done.code == 0, done
    assert done.stdout.count("42") == 2, done


@pytest.mark.slow
@pytest.mark.parametrize("launcher", EACH)
def test_a_missed_target_ends_with_three(launcher, tmp_path):
    done = train(launcher, 2, f"--target-accuracy 0.9999 --epochs 1 --output-dir {tmp_path}")
    assert done.code == 3, done
    assert "target accuracy 99.99% not reached" in done.stdout
    assert "Traceback" not in done.stderr, done
    assert (tmp_path / "summary.json").exists()  # rank 0 had its say, whichever rank left first
    if launcher == "gloo":
        (line,) = ended_by(done)
        assert line.endswith("ended the job with exit code 3")
    assert done.left_behind == 0


@pytest.mark.parametrize("launcher", EACH)
def test_a_killed_rank_is_the_one_that_counts(launcher, tmp_path):
    """It ends with that rank's code (128 + 9), although the others fail because of it, long before our own time-out."""
    flags = f"--dataset digits --epochs 100000 --step-timeout 1000 --no-progress --output-dir {tmp_path}"
    command = f"{LAUNCHERS[launcher].format(ranks=2)} {PYTHON} -m hvdtrain.mnist {flags}"
    with running(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as (process, job):
        wait_for_training(tmp_path)
        os.kill(events(tmp_path, "start")[0]["ranks"][1]["pid"], signal.SIGKILL)
        _, stderr = process.communicate(timeout=100)
        assert process.returncode == 137, stderr
        if launcher == "gloo":
            assert "horovodrun: rank 1 on localhost ended the job with exit code 137 (SIGKILL)\n" in stderr
        wait_for(lambda: not members(job), lambda: f"left behind: {members(job)}")


@pytest.mark.parametrize("start", ["horovodrun -np 2", "mpirun -np 2"])
def test_ranks_of_this_host_need_no_ssh(start, tmp_path):
    """As in many containers. mpirun looks for ssh and rsh before it starts anything."""
    for folder in dict.fromkeys(Path(part).resolve() for part in ("/bin", "/usr/bin")):
        for program in folder.iterdir():
            if program.name not in ("ssh", "rsh"):
                (tmp_path / program.name).symlink_to(program)
    environment = f"{Path(PYTHON).parent}{os.pathsep}{tmp_path}"
    done = launch(f"{start} {PYTHON} -c 'print(6 * 7)'", PATH=environment)
    assert done.code == 0, done
    assert done.stdout.count("42") == 2, done
