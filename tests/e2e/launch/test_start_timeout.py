"""`--start-timeout`: jobs that do not start, because ssh, mpirun or Python hang. ssh and mpirun are scripts that sleep."""

import shlex
import sys
from pathlib import Path

import pytest

from tests.e2e.launch.test_wrappers import wrapper
from tests.e2e.launchers import environment

HOSTS = ["-H", "elsewhere:1", "--interface", "lo", "--start-timeout", "1"]
MPIRUN = '[ "$1" = --version ] && echo "mpirun (Open MPI) 4.1.8" && exit\n'
PROGRAM = [sys.executable, "-m", "hvdtrain.none"]  # never started; the fork server finds none, and imports nothing


def scripts(directory: Path, **bodies: str) -> dict[str, str]:
    """Return an environment in which these commands are scripts with these bodies."""
    for name, body in bodies.items():
        (directory / name).write_text(f"#!/bin/sh\n{body}\n")
        (directory / name).chmod(0o755)
    env = environment()
    return env | {"PATH": f"{directory}:{env['PATH']}"}


def test_ssh_that_hangs_ends_mpirun(tmp_path):
    env = scripts(tmp_path, ssh=f'echo "$@" > {tmp_path}/said\nexec sleep 600')
    done = wrapper("mpirun", *HOSTS, "--transport", "mpi", "true", env=env)
    assert done.code == 124, done
    assert "unable to reliably start one or more daemons" in done.stderr
    assert "-o ConnectTimeout=20 -o ServerAliveInterval=30 -o ServerAliveCountMax=20" in (tmp_path / "said").read_text()


def test_ssh_that_hangs_ends_horovodrun_with_the_name_of_the_host(tmp_path):
    env = scripts(tmp_path, ssh="exec sleep 600", horovodrun="echo started")
    done = wrapper("horovodrun", *HOSTS, "--transport", "gloo", *PROGRAM, env=env)
    assert (done.code, done.stdout) == (1, ""), done
    assert done.stderr == (
        "horovodrun.sh: error: no answer over ssh: elsewhere: try ssh NAME true, and look at the host\n"
    )


@pytest.mark.parametrize("body", ["exec sleep 600", pytest.param("trap '' TERM\nsleep 600", marks=pytest.mark.slow)])
def test_a_job_whose_python_does_not_start_is_ended_and_started_again(body, tmp_path):
    env = scripts(tmp_path, mpirun=f"{MPIRUN}echo try >> {tmp_path}/tries\n{body}")
    done = wrapper("mpirun", "-np", "1", "--restarts", "3", "--start-timeout", "1", "--", *PROGRAM, env=env)
    assert done.code == 1, done
    said = (
        "no rank on this host has started Python within 1 s (--start-timeout): look at ssh, mpirun and the file system"
    )
    assert done.stderr.count(said) == 2
    assert "giving up: no checkpoint was written between two failures" in done.stderr
    assert (tmp_path / "tries").read_text() == "try\ntry\n"


def test_a_python_that_hangs_before_the_first_attempt_does_not_hang_the_wrapper(tmp_path):
    """It is asked whether it has the library."""
    env = scripts(tmp_path, mpirun=f"{MPIRUN}exit 1", python="exec sleep 600")
    command = ["-np", "1", "--restarts", "1", "--start-timeout", "1", "--", "python", "x.py"]
    done = wrapper("mpirun", *command, env=env, timeout=30)
    assert done.code == 1, done
    assert "giving up after 1 restarts" in done.stderr, done


def test_a_python_without_the_library_that_prints_at_its_start_gets_no_fork_server(tmp_path):
    """Sites' sitecustomize may print."""
    env = scripts(tmp_path, mpirun=f"{MPIRUN}echo ranks: $*\nexit 1", python="echo welcome\nexit 1")
    done = wrapper("mpirun", "-np", "1", "--restarts", "1", "--", "python", "x.py", env=env, timeout=30)
    assert "python x.py" in done.stdout, done
    assert "fork_client" not in done.stdout, done


@pytest.mark.slow
def test_what_the_ranks_of_one_attempt_report_does_not_count_for_the_next(tmp_path):
    report = "from hvdtrain.launching.import_timeout import report_start; report_start()"
    python = f"{shlex.quote(sys.executable)} -c '{report}'"
    body = f"[ -e {tmp_path}/second ] && exec sleep 600\ntouch {tmp_path}/second\n{python}\n{python}\nexit 1"
    env = scripts(tmp_path, mpirun=MPIRUN + body)
    done = wrapper("mpirun", "-np", "2", "--restarts", "1", "--start-timeout", "2", "--", *PROGRAM, env=env)
    assert "no rank on this host has started Python within 2 s" in done.stderr, done


@pytest.mark.slow
def test_a_rank_that_imports_the_library_has_started(tmp_path):
    """It takes longer than the limit afterwards; so may a program that does not import hvdtrain.training."""
    ours, other = tmp_path / "ours.py", tmp_path / "other.py"
    ours.write_text("from hvdtrain import training\nimport time\ntime.sleep(11)\n")
    other.write_text("import time\ntime.sleep(11)\n")
    env = scripts(
        tmp_path, mpirun=f'{MPIRUN}while [ "$1" != {shlex.quote(sys.executable)} ]; do shift; done\nexec "$@"'
    )
    for program in (ours, other):
        done = wrapper(
            "mpirun", "-np", "1", "--restarts", "1", "--start-timeout", "8", "--", sys.executable, str(program), env=env
        )
        assert (done.code, done.stderr) == (0, ""), done


def test_a_program_without_the_library_has_no_limit_under_the_option_with_which_wrappers_start_ours_either(tmp_path):
    program = tmp_path / "other.py"
    program.write_text("import time\ntime.sleep(4)\n")
    env = scripts(
        tmp_path, mpirun=f'{MPIRUN}while [ "$1" != {shlex.quote(sys.executable)} ]; do shift; done\nexec "$@"'
    )
    command = ["-np", "1", "--restarts", "1", "--start-timeout", "2", "--", sys.executable, "-P", str(program)]
    done = wrapper("mpirun", *command, env=env)
    assert (done.code, done.stderr) == (0, ""), done


def test_a_job_that_ends_before_it_has_started_is_not_waited_for(tmp_path):
    env = scripts(tmp_path, mpirun=f"{MPIRUN}exit 2")
    done = wrapper("mpirun", "-np", "1", "--restarts", "1", "--", *PROGRAM, env=env, timeout=60)
    assert (done.code, done.stderr) == (2, ""), done


@pytest.mark.parametrize("own", ["OMPI_MCA_plm_rsh_agent", "PRTE_MCA_plm_ssh_agent", "PE_HOSTFILE"])
def test_an_agent_of_the_users_own_is_kept(own, tmp_path):
    env = scripts(tmp_path, mpirun=MPIRUN) | {"DRY_RUN": "1"}
    command = ["mpirun", *HOSTS, "--transport", "mpi", "true"]
    assert "timeout" in wrapper(*command, env=env).stdout
    assert "timeout" not in wrapper(*command, env=env | {own: "mine"}).stdout
    command[command.index("1")] = "0"
    assert "timeout" not in wrapper(*command, env=env).stdout.replace("HVDTRAIN_START_TIMEOUT", "")
