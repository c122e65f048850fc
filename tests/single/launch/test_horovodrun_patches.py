"""Horovod's own launcher as our patches leave it, run from its source: how `horovodrun --gloo` ends. No build needed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.waiting import wait_for

# As the console script does; the check for Gloo would load the extension, which a source tree does not have.
HOROVODRUN = "from horovod.runner import launch; launch.gloo_built = lambda **_: True; launch.run_commandline()"

RANK = """
import os, signal, sys, time
def save(*_):
    time.sleep(0.5)
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
open(os.environ["READY"] + os.environ["HOROVOD_RANK"], "w").close()
while not all(os.path.exists(os.environ["READY"] + rank) for rank in "01"):
    time.sleep(0.05)
if os.environ["HOROVOD_RANK"] == "1":
    exec(sys.argv[1])
time.sleep(60)
"""


def python(source, tmp_path, *arguments):
    """Run Python with the patched source; return its standard output."""
    done = subprocess.run(
        [sys.executable, *arguments], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(source)},
        text=True, capture_output=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def horovodrun(source, tmp_path, what):
    command = [sys.executable, "-c", HOROVODRUN, "--gloo", "-np", "2", sys.executable, "-c", RANK, what]
    env = os.environ | {"PYTHONPATH": str(source), "READY": f"{tmp_path}/ready"}
    return subprocess.Popen(
        command, cwd=tmp_path, env=env, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("what", "code", "said"),
    [
        ("sys.exit(2)", 2, "exit code 2"),
        ("sys.exit(3)", 3, "exit code 3"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "exit code 137 (SIGKILL)"),
        ("os.abort()", 134, "exit code 134 (SIGABRT)"),
    ],
)
def test_it_ends_with_the_code_of_the_rank_that_ended_the_job(source, tmp_path, what, code, said):
    """The other rank, which is stopped and ends later with 75, does not count and is not reported."""
    out, err = (process := horovodrun(source, tmp_path, what)).communicate(timeout=60)
    assert process.returncode == code, err
    assert err.splitlines() == [f"horovodrun: rank 1 on localhost ended the job with {said}"]
    assert out == ""


def test_told_to_stop_the_ranks_may_save_first(source, tmp_path):
    process = horovodrun(source, tmp_path, "time.sleep(60)")
    wait_for(lambda: len(list(tmp_path.glob("ready[01]"))) == 2, "the ranks did not start")
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 75, err
    assert err.count("ended the job with exit code 75") == 1
    assert "Traceback" not in err


def test_run_from_python_still_raises(source, tmp_path):
    (tmp_path / "job.py").write_text(
        "import os, sys, horovod\n"
        "def rank():\n    sys.exit(3 if os.environ['HOROVOD_RANK'] == '1' else 0)\n"
        "if __name__ == '__main__':\n"
        "    from horovod.runner import launch\n    launch.gloo_built = lambda **_: True\n"
        "    try:\n        horovod.run(rank, num_proc=2, use_gloo=True)\n"
        "    except RuntimeError as error:\n        print(error)\n"
    )
    assert python(source, tmp_path, "job.py") == "rank 1 on localhost ended the job with exit code 3\n"


RENDEZVOUS = """
import http.client
from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
from horovod.runner.http.http_server import RendezvousServer

server = RendezvousServer()
port = server.start(address="127.0.0.1")
server.init(get_host_assignments(parse_hosts("a:2"), 2))

def ask(method, path):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request(method, path, b"address" if method == "PUT" else None)
    return connection.getresponse().status

for path in ("/local_a/0", "/local_a/1", "/cross_0/0"):
    ask("PUT", path)
ask("DELETE", "/local_a/0")  # rank 0 has met rank 1,
ask("DELETE", "/cross_0/0")  # and is through with a scope of its own,
ask("DELETE", "/local_a/1")  # before rank 1 says that it has met rank 0
print([ask("GET", path) for path in ("/local_a/0", "/local_a/1", "/cross_0/0")])
"""


def test_no_address_of_a_first_start_is_left_for_a_second(source, tmp_path):
    assert python(source, tmp_path, "-c", RENDEZVOUS) == "[404, 404, 404]\n"


QUEUE = """
import socket
from horovod.runner.http.http_server import RendezvousHTTPServer, RendezvousHandler

server = RendezvousHTTPServer(("127.0.0.1", 0), RendezvousHandler, 0)  # listens, and accepts nobody yet
ranks = [socket.create_connection(server.server_address, timeout=2) for _ in range(64)]
print(len(ranks))
"""


def test_all_ranks_can_connect_to_the_rendezvous_server_at_once(source, tmp_path):
    """As released the kernel queues six connections, drops the others, and each is tried again seconds later."""
    assert python(source, tmp_path, "-c", QUEUE) == "64\n"


MPIRUN = """
from horovod.runner import mpi_run

class Settings:
    hosts, num_proc, nics, verbose = "a:1,b:1", 2, ["eth0"], 0
    __getattr__ = lambda self, name: None

for says in ("mpirun (Open MPI) 4.1.8", "HYDRA build details:", "Intel(R) MPI Library", "MPICH"):
    mpi_run.tiny_shell_exec.execute = lambda command, env=None: (says, 0)
    ran = []
    mpi_run.os.execve = lambda path, words, env: ran.append(words[-1])
    settings = Settings()
    mpi_run.mpi_run(settings, ["eth0"], {"PATH": "/usr/bin"}, ["python"])
    print([part for part in ("exec mpirun", "--bind-to none", "^openib,ofi", "-iface eth0", "btl_tcp_if_include eth0")
           if part in ran[0]])
"""


def test_each_mpirun_gets_its_own_options(source, tmp_path):
    open_mpi, mpich, intel, _ = python(source, tmp_path, "-c", MPIRUN).splitlines()
    assert open_mpi == "['exec mpirun', '--bind-to none', '^openib,ofi', 'btl_tcp_if_include eth0']"
    assert mpich == "['exec mpirun', '--bind-to none', '-iface eth0']"
    assert intel == "['exec mpirun', '-iface eth0']"
