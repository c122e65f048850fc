"""`launch/*.sh --restarts N`: what is started again, with what, and when it gives up."""

import shlex
import signal
import subprocess
import sys

import pytest

from tests.e2e.launch.test_wrappers import program, wrapper
from tests.e2e.launchers import (
    PYTHON,
    ROOT,
    environment,
    events,
    remaining,
    running,
    summary,
    train,
    wait_for_training,
)

# One rank whose first ends are as told: it keeps count in a file, and leaves a checkpoint's name where it made progress.
PROGRAM = """
import os, pathlib, sys
out, *ends = sys.argv[2:]
counter = pathlib.Path(out, "count")
number = int(counter.read_text()) if counter.exists() else 0
counter.parent.mkdir(parents=True, exist_ok=True)
counter.write_text(str(number + 1))
code, progress = ends[min(number, len(ends) - 1)].split(":")
if progress == "new":
    (counter.parent / "checkpoints").mkdir(exist_ok=True)
    (counter.parent / "checkpoints" / f"step-{number:08d}.safetensors").touch()
sys.exit(int(code))
"""


def ends(tmp_path, *how: str, restarts: int = 3):
    tmp_path.mkdir(exist_ok=True)
    (tmp_path / "program.py").write_text(PROGRAM)  # it does not import hvdtrain: no fork server
    program = [sys.executable, str(tmp_path / "program.py"), "--output-dir", str(tmp_path / "out"), *how]
    done = wrapper("mpirun", "-np", "1", "--restarts", str(restarts), "--", *program, timeout=120)
    return done, int((tmp_path / "out" / "count").read_text())


def test_a_failure_is_started_again_until_it_is_done(tmp_path):
    done, tries = ends(tmp_path, "1:new", "139:new", "0:new")
    assert (done.code, tries) == (0, 3), done
    assert "exit code 1; starting again, restart 1 of 3, from step-00000000.safetensors" in done.stderr
    assert "exit code 139; starting again, restart 2 of 3, from step-00000001.safetensors" in done.stderr


# One rank that notes its --resume. It fails before it has moved another run aside, and after it has written a checkpoint.
STARTS_OVER = """
import pathlib, sys
out, how = (pathlib.Path(sys.argv[at]) for at in (2, 4))
with (out / "attempts").open("a") as attempts:
    attempts.write(f"{how} ")
number = len((out / "attempts").read_text().split())
if number == 2:
    if (out / "checkpoints").exists():
        (out / "checkpoints").rename(out / "checkpoints.1")
    (out / "checkpoints").mkdir()
    (out / "checkpoints" / "step-00000006.safetensors").touch()
sys.exit(number < 3)
"""


@pytest.mark.parametrize(("resume", "earlier"), [("never", True), ("elsewhere/step-00000005.safetensors", False)])
def test_a_restart_continues_what_the_job_has_written_also_if_it_was_to_start_over(resume, earlier, tmp_path):
    """It said "from step-00000006", and began at the beginning again, in each attempt."""
    (tmp_path / "program.py").write_text(STARTS_OVER)
    (tmp_path / "out").mkdir()
    if earlier:
        (tmp_path / "out" / "checkpoints").mkdir()
        (tmp_path / "out" / "checkpoints" / "step-00000099.safetensors").touch()
    program = [sys.executable, str(tmp_path / "program.py"), "--output-dir", str(tmp_path / "out"), "--resume", resume]
    done = wrapper("mpirun", "-np", "1", "--restarts", "3", "--", *program, timeout=120)
    assert done.code == 0, done
    assert (tmp_path / "out" / "attempts").read_text().split() == [resume, resume, "auto"]
    begins = "the beginning" if resume == "never" else resume
    assert f"starting again, restart 1 of 3, from {begins}\n" in done.stderr
    assert "starting again, restart 2 of 3, from step-00000006.safetensors\n" in done.stderr


@pytest.mark.parametrize("code", [2, 3, 75])
def test_what_is_no_failure_is_not_started_again(code, tmp_path):
    done, tries = ends(tmp_path, f"{code}:new")
    assert (done.code, tries) == (code, 1), done


def test_it_gives_up_without_progress(tmp_path):
    done, tries = ends(tmp_path, "1:none", "1:none")
    assert "exit code 1; starting again, restart 1 of 3, from the beginning" in done.stderr
    done, tries = ends(tmp_path / "other", "1:new", "1:none")
    assert (done.code, tries) == (1, 2), done
    assert (
        "giving up: no checkpoint was written between two failures (newest: step-00000000.safetensors)" in done.stderr
    )


def test_it_gives_up_after_so_many(tmp_path):
    done, tries = ends(tmp_path, "1:new", restarts=1)
    assert (done.code, tries) == (1, 2), done
    assert "giving up after 1 restarts" in done.stderr


@pytest.mark.parametrize("options", ["--restarts 1", "--transport gloo"])
def test_modules_in_the_working_directory_do_not_replace_those_of_the_library(options, tmp_path):
    """`python FILE` would not import them either, and anyone may write into some directories."""
    (tmp_path / "cwd").mkdir()
    (tmp_path / "scripts").mkdir()
    for name in ("secrets", "selectors", "json", "argparse", "threading"):
        (tmp_path / "cwd" / f"{name}.py").write_text("import pathlib; pathlib.Path(__file__ + '.executed').touch()\n")
    (tmp_path / "scripts" / "beside.py").touch()
    program = tmp_path / "scripts" / "program.py"
    program.write_text("import hvdtrain, sys, beside; print(sys.path[0])\n")
    done = wrapper("mpirun", "-np", "1", *options.split(), "--", sys.executable, str(program), cwd=tmp_path / "cwd")
    assert (done.code, done.stdout) == (0, f"{tmp_path / 'scripts'}\n"), done
    assert not list((tmp_path / "cwd").glob("*.executed"))


@pytest.mark.parametrize("name", ["mpirun", pytest.param("horovodrun", marks=pytest.mark.slow)])
def test_a_killed_rank_costs_nothing_but_time(name, tmp_path):
    flags = "--dataset digits --model convnet --epochs 3 --checkpoint-steps 4 --no-progress --log-steps 1"
    assert train("starter", 2, f"{flags} --output-dir {tmp_path / 'whole'}").code == 0  # imports torch once
    # Rank 1 kills itself at its twentieth step, the first time.
    body = f"""
import os, pathlib, signal, sys
from hvdtrain.guards import activity
from hvdtrain import mnist
from hvdtrain.engines import launchers
from hvdtrain.launching import exit_codes, processes
with pathlib.Path({str(tmp_path / "forked")!r}).open("a") as forked:
    forked.write("01"[bool(processes.proxy)])
once, steps = pathlib.Path({str(tmp_path / "once")!r}), iter(range(10**6))
begin = activity.Activity.begin_step
def dies(self, step):
    begin(self, step)
    if launchers.announced().rank == 1 and next(steps) == 19 and not once.exists():
        once.touch()
        os.kill(os.getpid(), signal.SIGKILL)
activity.Activity.begin_step = dies
exit_codes.run_command(mnist.main)
"""
    script = tmp_path / "program.py"
    script.write_text(body)
    program = [sys.executable, str(script), *flags.split(), "--output-dir", str(tmp_path / "killed")]
    done = wrapper(name, "-np", "2", "--restarts", "2", "--", *program, timeout=200)
    assert done.code == 0, done
    assert "restart 1 of 2, from step-000000" in done.stderr
    (resumed,) = events(tmp_path / "killed", "resume")
    assert 0 < resumed["step"] < 20
    lines = events(tmp_path / "killed")
    assert [line["event"] for line in lines][0 :: len(lines) - 1] == ["start", "end"]  # one record of both parts
    assert (
        tmp_path / "forked"
    ).read_text() == "1111"  # both attempts' ranks, by a process that had imported everything
    assert summary(tmp_path / "killed")["parameters_sha256"] == summary(tmp_path / "whole")["parameters_sha256"]


def test_before_a_restart_all_hosts_are_asked_at_once(tmp_path):
    """This ssh answers for a host when all three have been asked, and refuses for `gone`."""
    ssh = tmp_path / "ssh"
    ssh.write_text(f"""#!/bin/bash
host=${{@: -2:1}}
touch {tmp_path}/$host.asked
until [[ -e {tmp_path}/a.asked && -e {tmp_path}/gone.asked && -e {tmp_path}/b.asked ]]; do sleep 0.02; done
[[ $host != gone ]]
""")
    ssh.chmod(0o755)
    ask = """
source launch/options.sh; source launch/restarts.sh
read_options -H a:2,gone:4,b true
hosts_that_answer
echo "$answering, $answering_slots slots"
"""
    env = environment() | {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run(["bash", "-c", ask], cwd=ROOT, env=env, capture_output=True, text=True, timeout=100)
    assert done.stdout == "a:2,b, 3 slots\n", done
    assert done.stderr == "bash: gone does not answer\n"


@pytest.mark.slow
def test_a_host_that_is_gone_is_left_out_where_fewer_ranks_are_allowed(tmp_path):
    """Of localhost:1,nowhere:1 only the first answers; ssh is told so by a program of that name."""
    (tmp_path / "bin").mkdir()
    for name, body in {
        "ssh": "exit 255",
        "mpirun": '[ "$1" = --version ] && echo "mpirun (Open MPI) 4.1.8" && exit\n'
        f'echo "$@" >> {tmp_path}/started\n[ -e {tmp_path}/second ] && exit\ntouch {tmp_path}/second\nexit 1',
    }.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    env = environment() | {"PATH": f"{tmp_path}/bin:/usr/bin:/bin"}
    options = ["-H", "localhost:1,nowhere:1", "--interface", "lo", "--transport", "mpi", "--restarts", "3"]
    refused = wrapper("mpirun", *options, "true", env=env, timeout=120)
    assert refused.code == 1
    assert "nowhere does not answer" in refused.stderr
    assert "only 1 ranks could start, and --min-np is 2: giving up" in refused.stderr
    (tmp_path / "second").unlink()
    done = wrapper("mpirun", *options, "--min-np", "1", "true", env=env, timeout=120)
    assert done.code == 0, done
    assert "continuing with 1 ranks on localhost:1" in done.stderr
    first, second = (tmp_path / "started").read_text().splitlines()[-2:]
    assert "-np 2 -H localhost:1,nowhere:1" in first
    assert "-np 1 -H localhost:1 " in second


@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, *(pytest.param(other, marks=pytest.mark.slow) for other in (signal.SIGUSR1, signal.SIGINT))],
)
def test_a_stop_signal_reaches_the_ranks_and_is_not_a_failure(number, tmp_path):
    program = f"{PYTHON} -m hvdtrain.mnist --dataset digits --epochs 100000 --no-progress --output-dir {tmp_path}"
    command = [str(ROOT / "launch" / "mpirun.sh"), "-np", "2", "--restarts", "3", "--", *shlex.split(program)]
    with running(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as (process, job):
        wait_for_training(tmp_path)
        process.send_signal(number)
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 75, output
        assert len(events(tmp_path, "stop")) == 1
        assert remaining(job) == []


def test_a_stop_between_two_attempts_is_one_too(tmp_path):
    program(tmp_path / "mpirun", """case $1 in --version) echo 'mpirun (Open MPI) 4.1.8' && exit ;; esac
        echo started && { sleep 0.5; kill -USR1 ${HVDTRAIN_START_PIPE%% *}; } >/dev/null 2>&1 &
        exit 1""")  # fmt: skip
    env = environment() | {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = wrapper("mpirun", "-np", "1", "--restarts", "3", "true", env=env)
    assert (done.code, done.stdout) == (75, "started\n"), done
    assert done.stderr.endswith("mpirun.sh: asked to stop while no attempt runs: nothing to save\n")
