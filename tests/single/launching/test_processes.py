"""Which processes a rank takes for its launcher, and when it takes one for gone."""

import contextlib
import os
import resource
import subprocess
import sys

import pytest

from hvdtrain.engines.errors import UserError
from hvdtrain.launching import processes
from hvdtrain.launching.processes import Process, descendants, is_stopped, launcher_name, launchers, runs, stat
from tests.waiting import wait_for


@pytest.fixture
def proc(tmp_path, monkeypatch):
    """What is read in place of /proc."""
    monkeypatch.setattr(processes, "PROC", tmp_path)
    return tmp_path


def test_without_proc_nothing_begins(monkeypatch, tmp_path):
    processes.require_proc()
    monkeypatch.setattr(processes, "PROC", tmp_path)
    with pytest.raises(UserError, match="mount it"):
        processes.require_proc()


def test_proc_of_another_pid_namespace_is_refused(proc):
    """After `unshare --pid` without `--mount-proc`: every pid read there would be some other process's."""
    (proc / "77777777").mkdir()
    (proc / "77777777" / "stat").touch()
    (proc / "self").symlink_to("77777777")
    with pytest.raises(UserError, match="another PID namespace's: mount it"):
        processes.require_proc()


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("mpirun -np 2 python -m hvdtrain.mnist", "mpirun"),
        ("/opt/openmpi/bin/orterun -np 2 x", "orterun"),
        ("orted -mca ess env", "orted"),
        ("prted --prtemca x", "prted"),
        ("/usr/bin/hydra_pmi_proxy --control-port a:1", "hydra_pmi_proxy"),
        ("slurmstepd: [7.0]", "slurmstepd"),
        ("/venv/bin/python /venv/bin/torchrun --standalone -m hvdtrain.mnist", "torchrun"),
        ("python3.12 -u -m torch.distributed.run --nproc-per-node 2 x.py", "torch.distributed.run"),
        ("python /venv/bin/horovodrun --gloo -np 2 python x.py", "horovodrun"),
        ("python -m hvdtrain.benchmark --np 1,2", "hvdtrain.benchmark"),
        ("python -m hvdtrain.starter --local-ranks 2 -m hvdtrain.mnist", "hvdtrain.starter"),
        ("/venv/bin/python /venv/bin/hvdtrain benchmark --np 1,2", "hvdtrain.benchmark"),
        ("python -m hvdtrain starter --local-ranks 2 -m hvdtrain.mnist", "hvdtrain.starter"),
        ("bash launch/mpirun.sh -np 2 --restarts 3 -- python -m hvdtrain.mnist", "mpirun.sh"),
        ("/bin/bash /var/spool/slurmd/job7/slurm_script", "slurm_script"),
        # Whose end is nobody's business: they may have put the job into the background.
        ("bash mpirun.sh -np 2 python x.py", None),
        ("bash train.sh mpirun", None),
        ("-bash", None),
        ("sshd: user@pts/0", None),
        ("python -c import mpirun", None),
        ("python /venv/bin/hvdtrain mnist starter", None),
        ("python -m", None),
        ("python train.py torchrun", None),
        ("vim mpirun", None),
        ("", None),
    ],
)
def test_launchers_are_known_by_their_command_lines(line, name):
    assert launcher_name(line.split()) == name


def fake(proc, pid: int, parent: int, line: str) -> None:
    (proc / str(pid)).mkdir()
    fields = ["S", str(parent), *["0"] * 17, str(pid * 10), "0"]
    (proc / str(pid) / "stat").write_text(f"{pid} (a) b) {' '.join(fields)}")
    (proc / str(pid) / "cmdline").write_bytes("\0".join(line.split()).encode() + b"\0")


def test_all_up_to_the_topmost_launcher_are_missed_and_none_above(proc, monkeypatch):
    fake(proc, 2, 1, "-bash")
    fake(proc, 3, 2, "bash launch/mpirun.sh --restarts 2 -- python x.py")
    fake(proc, 4, 3, "sh -c something")
    fake(proc, 5, 4, "mpirun -np 2 python x.py")
    fake(proc, 6, 5, "python x.py")

    def of(pid: int) -> list[Process]:
        monkeypatch.setattr(processes, "proxy", pid)  # as if the launcher had started it in the place of this rank
        return launchers()

    assert [process.pid for process in of(6)] == [5, 4, 3]
    assert of(6)[0] == Process(5, 50, "mpirun")
    assert of(3) == []  # started by hand: its shell may go
    fake(proc, 7, 1, "python x.py")
    assert of(7) == []  # a daemon from the start
    assert of(8) == []  # no such process, or none that we may see


def test_a_process_is_gone_when_it_ended_even_if_another_has_its_number_or_nobody_waited_for_it():
    child = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    me = child.pid, stat(child.pid).started
    assert runs(*me)
    assert not runs(me[0], me[1] + 1)
    assert not is_stopped(child.pid)
    child.send_signal(19)
    wait_for(lambda: is_stopped(child.pid), "it is not stopped")
    assert runs(*me)
    child.kill()
    wait_for(lambda: not runs(*me), "it lives")
    child.communicate()
    assert not runs(*me)
    assert runs(os.getpid(), stat(os.getpid()).started)


def test_a_process_that_may_open_no_more_files_misses_nobody():
    me, held, limits = stat(os.getpid()), [], resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, limits[0]), limits[1]))
    try:
        with contextlib.suppress(OSError):
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))
        found = runs(os.getpid(), me.started), runs(2**22 + 1), processes.own_threads(), descendants(os.getpid())
    finally:
        for each in held:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert found == (True, False, [], [])


def test_a_forked_rank_began_when_its_starter_did(proc, monkeypatch):
    fake(proc, os.getpid(), 1, "python -m hvdtrain.mnist")
    fake(proc, 7, 1, "python -m hvdtrain.starter")
    assert processes.began() == os.getpid() * 10
    monkeypatch.setattr(processes, "starter", 7)
    assert processes.began() == 70
    monkeypatch.setattr(processes, "starter", 8)  # it has ended
    assert processes.began() == os.getpid() * 10


def test_a_process_that_the_kernel_is_ending_runs_no_more(proc):
    """Its connections are closed while its state is still R: a killed rank was said to run."""
    (proc / "7").mkdir()
    for flags, running in ((0x400040, True), (0x40044C, False)):
        (proc / "7" / "stat").write_text(f"7 (python) R 1 7 7 0 -1 {flags} 5 0 0 0 3 4 0 0 20 0 9 0 99 1 1")
        assert (runs(7), runs(7, 99)) == (running, running)
