"""`hvdtrain.doctor`: silent where all is well, and each fault found where it is made."""

import json
import os
import shlex
import sys

import pytest

from tests.e2e.cluster import Cluster, needs_hosts
from tests.e2e.launchers import LAUNCHERS, PYTHON, Done, launch, several

DOCTOR = [sys.executable, "-m", "hvdtrain.doctor"]
SLOW = pytest.mark.slow


def faults(done: Done) -> list[str]:
    """Return warnings and problems, each with its reason and remedy, from `--json`."""
    findings = json.loads(done.stdout[done.stdout.index("{") :])["findings"]
    for finding in findings:
        assert finding["what"]
        assert (finding["level"] == "ok") == (finding["why"] == "") == (finding["do"] == ""), finding
    return [f"{f['level']}: {f['what']}: {f['do']}" for f in findings if f["level"] != "ok"]


def test_alone():
    done = launch(shlex.join(DOCTOR))
    assert done.code == 0, done
    assert "started alone; launchers on PATH: horovodrun, mpirun" in done.stdout
    assert "0 problems" in done.stdout


@pytest.mark.parametrize("launcher", ["starter", *(pytest.param(name, marks=SLOW) for name in ("mpirun", "gloo"))])
def test_two_ranks(launcher, tmp_path):
    start = LAUNCHERS[launcher].format(ranks=2)
    done = launch(f"{start} {shlex.join(DOCTOR)} --output-dir {tmp_path}", OMP_NUM_THREADS="1")
    assert done.code == 0, done
    transport = "MPI" if launcher == "mpirun" else "Gloo"
    for expected in (f"all-reduce, horovod over {transport}", "every rank alike: ", "seen by all", "ranks: 2 on "):
        assert done.stdout.count(expected) == 1, done
    assert list(tmp_path.iterdir()) == []


FAULTS = {
    "HOROVOD_GLOO_IFACE=ib9": "problem: HOROVOD_GLOO_IFACE=ib9: no such interface here: name one of ",
    "SLURM_PROCID=0 SLURM_NTASKS=2": "problem: Slurm announced 2 ranks, but horovod sees 1: start with",
}


@SLOW
def test_a_fault_on_one_host(tmp_path):
    runs = several("alone", 1, tmp_path, {f"{n}": f"{how} --json" for n, how in enumerate(FAULTS)}, "hvdtrain.doctor")
    for done, expected in zip(runs.values(), FAULTS.values(), strict=True):
        assert done.code == 1, done
        assert any(expected in fault for fault in faults(done)), done


@SLOW
def test_ranks_that_differ():
    body = "import sys, torch, hvdtrain.doctor as d; from hvdtrain.engines import launchers; "
    body += "from hvdtrain.launching import exit_codes; "
    body += "torch.__version__ = f'2.{launchers.announced().rank}'; exit_codes.run_command(d.main)"
    done = launch(f'mpirun --oversubscribe -np 2 {PYTHON} -c "{body}" --json')
    assert done.code == 1, done
    assert any("problem: torch differs: rank 0 has 2.0, rank 1 has 2.1" in fault for fault in faults(done)), done


@SLOW
def test_more_threads_than_cores_is_a_warning():
    core = min(os.sched_getaffinity(0))
    done = launch(
        f"mpirun --oversubscribe --bind-to none -np 2 taskset -c {core} {shlex.join(DOCTOR)} --json",
        OMP_NUM_THREADS="1",
    )
    assert done.code == 0, done
    assert any("warning: cores: 1; ranks on this host: 2" in fault for fault in faults(done)), done


@SLOW
@needs_hosts
def test_faults_between_hosts(tmp_path):
    """A directory that only one host has, a host that does not know the other's name, a name without an address."""
    with Cluster(tmp_path, ["a", "b"]) as cluster:

        def doctor(*flags: str, **variables: str) -> dict[str, Done]:
            command = [
                sys.executable,
                *["-m", "hvdtrain.starter", "--wait", "20", "-m", "hvdtrain.doctor", "--json"],
                *flags,
            ]
            told = {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "9000", "WORLD_SIZE": "2"} | variables
            started = {host: cluster.start(host, command, RANK=str(rank), **told) for rank, host in enumerate("ab")}
            return cluster.finish(started, 60)

        done = doctor("--output-dir", str(tmp_path))
        assert {rank.code for rank in done.values()} == {0}, done
        assert faults(done["a"]) == [], done

        cluster.sh("b", "mkdir -p /run/out && mount -t tmpfs tmpfs /dev/shm -o size=64m")
        done = doctor("--output-dir", "/run/out")
        assert {rank.code for rank in done.values()} == {0}, done
        assert any("ranks [1] do not see what rank 0 writes there" in fault for fault in faults(done["a"])), done
        assert any("warning: /dev/shm is 64 MiB" in fault for fault in faults(done["a"])), done

        (tmp_path / "only-b").write_text("127.0.0.1 localhost\n127.0.1.1 b\n")
        cluster.sh("b", f"mount --bind {tmp_path}/only-b /etc/hosts")
        done = doctor()
        assert {rank.code for rank in done.values()} == {1}, done
        found = faults(done["a"])
        assert any("problem: b resolves its own name to 127.0.1.1" in fault for fault in found), found
        assert any("problem: a does not resolve on b" in fault for fault in found), found

        (tmp_path / "only-b").write_text("127.0.0.1 localhost\n")
        nameless = cluster.run("b", [*DOCTOR, "--json"])
        assert nameless.code == 1, nameless
        assert any("this host's name b does not resolve" in fault for fault in faults(nameless)), nameless


@SLOW
@needs_hosts
def test_bandwidth_is_that_of_the_wire(tmp_path):
    """Two hosts whose cable carries so much: the doctor can see no more, whatever else the machine is doing."""
    with Cluster(tmp_path, ["a", "b"], rate="100mbit") as cluster:
        command = [sys.executable, "-m", "hvdtrain.starter", "-m", "hvdtrain.doctor"]
        told = {"MASTER_ADDR": "a", "MASTER_PORT": "9000", "WORLD_SIZE": "2"}
        done = cluster.finish({h: cluster.start(h, command, RANK=str(r), **told) for r, h in enumerate("ab")}, 60)["a"]
    assert done.code == 0, done
    line = next(line for line in done.stdout.splitlines() if "all-reduce, horovod over Gloo" in line)
    measured = float(line.partition(" for 4 B, ")[2].split()[0]) * 8000  # GB/s -> Mbit/s
    # Of 2 ranks each sends S bytes: S/t is at most the wire. The first 128 kB of a burst are free.
    assert 0 < measured < 1.02 * 100, done
