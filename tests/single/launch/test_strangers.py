"""What a stranger sends to the servers of Horovod's launcher (CVE-2024-10190, CVE-2026-31234) is not unpickled, and the job
goes on. The launcher runs from its patched source; tests/e2e/launch/test_horovod_run.py has whole jobs with collectives.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# A stranger: reaches the port, and has no key. Whoever unpickles what it sends leaves the file $WRITTEN.
STRANGER = """
import base64, http.client, os, pickle, socket, struct, sys

class Evil:
    def __reduce__(self):
        return exec, (f"open({os.environ['WRITTEN']!r}, 'a').close()",)

EVIL = pickle.dumps(Evil())
FORMS = [base64.b64encode(EVIL), EVIL, bytes(32) + EVIL]  # as released, as a pickle, as if it were signed

def ask(method, port, path, body=None, headers={}, address="127.0.0.1"):
    connection = http.client.HTTPConnection(address, port, timeout=10)
    try:
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    except (ConnectionError, http.client.RemoteDisconnected) as error:  # released: the handler died of the pickle
        return error, b""
    finally:
        connection.close()
"""

# Stands for ssh: notes what `ps` would show, and runs the command here, with none of the caller's variables but PATH.
SSH = """#!/bin/sh
printf '%s\\n' "$*" >> "$SSH_LOG"
while :; do case $1 in -o | -p | -i) shift 2 ;; other) shift ;; *) break ;; esac; done
exec env -i PATH="$PATH" PYTHONPATH="$PYTHONPATH" WRITTEN="$WRITTEN" sh -c "$*"
"""


@pytest.fixture
def run(source: Path, tmp_path: Path):
    """Run a program with the patched source; return what it printed. Fails if a pickle of a stranger was executed."""
    (tmp_path / "stranger.py").write_text(STRANGER)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ssh").write_text(SSH)
    (tmp_path / "bin" / "ssh").chmod(0o755)
    written, log = tmp_path / "written", tmp_path / "ssh.log"
    env = os.environ | {
        "PYTHONPATH": f"{source}:{tmp_path}",
        "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
        "WRITTEN": str(written),
        "SSH_LOG": str(log),
    }
    log.touch()

    def run(program: str) -> str:
        (tmp_path / "program.py").write_text(program)
        done = subprocess.run(
            [sys.executable, "program.py"], cwd=tmp_path, env=env, text=True, capture_output=True, timeout=120
        )
        assert not written.exists(), "a stranger's pickle was executed"
        assert done.returncode == 0, done.stderr
        assert "Traceback" not in done.stderr, done.stderr
        return done.stdout

    return run


ELASTIC = """
from stranger import *
from horovod.runner.common.util import codec, secret
from horovod.runner.elastic.rendezvous import create_rendezvous_handler
from horovod.runner.elastic.worker import WorkerNotificationClient, WorkerNotificationManager
from horovod.runner.http.http_server import RendezvousServer

class Driver:
    registered = {}
    def register_worker_server(self, host, slot, addresses, key):
        self.registered[host, slot] = addresses, key
    def record_ready(self, host, slot):
        raise AssertionError("a stranger was taken for a rank")

key = secret.make_secret_key()
server = RendezvousServer()
port = server.start(create_rendezvous_handler(Driver()), address="127.0.0.1", key=key)
for form in FORMS:
    print("PUT", ask("PUT", port, "/worker_addresses/a:0", form))
seen = {"Authorization": "Bearer " + secret.rendezvous_token(key)}  # on the network, which is not encrypted
for form in [*FORMS, b'{"lo": [["127.0.0.1", 9]]}']:
    print("PUT with the token", ask("PUT", port, "/worker_addresses/a:0", form, seen))
os.environ.update(secret.environment(secret.make_secret_key()))  # of another job
try:
    WorkerNotificationManager().init("127.0.0.1", port, "lo", "a", 0)
except RuntimeError as error:
    print(error)
print(Driver.registered)

os.environ.update(secret.environment(key))
WorkerNotificationManager().init("127.0.0.1", port, "lo", "a", 0)
print(WorkerNotificationClient(*Driver.registered["a", 0], verbose=0)._send is not None)
for method, path in ("GET", "/rank_and_size/a:0"), ("GET", "/worker_addresses/a:0"), ("DELETE", "/global/0"), ("GET", "/"):
    print(method, path, ask(method, port, path))
print("HEAD", ask("HEAD", port, "/program.py")[0])
server.stop()
"""


def test_the_elastic_driver_takes_addresses_from_its_own_ranks_only(run) -> None:
    out = run(ELASTIC).splitlines()
    assert out[:3] == ["PUT (403, b'')"] * 3
    assert out[3:7] == ["PUT with the token (403, b'')"] * 4
    assert "403" in out[7]
    assert "_HOROVOD_SECRET_KEY" in out[7]
    assert out[8:10] == ["{}", "True"]
    assert [line.rpartition(" (")[2] for line in out[10:14]] == ["403, b'')"] * 4
    assert out[14] == "HEAD 501"  # released: the files of the working directory


# The ranks of horovod.run() need no collective here, and so no build. `other` is a host behind SSH above.
RUN = """
from stranger import *
import horovod
from horovod.runner import launch
from horovod.runner.common.util import codec, secret

launch.gloo_built = lambda **_: True
started = launch._launch_job

def rank(factor):
    return factor * int(os.environ["HOROVOD_RANK"]), "_HOROVOD_SECRET_KEY" in os.environ

def attacked(args, settings, nics, command):
    *_, address, port = command
    for path in ("/runfunc/func", "/runfunc_result/0", "/runfunc_result/1"):
        for headers in {}, {"Authorization": "Bearer " + secret.rendezvous_token(settings.key)}:
            for form in FORMS:
                print(ask("PUT", int(port), path, form, headers, address))
    print(ask("GET", int(port), "/runfunc/func", address=address))
    silent = socket.create_connection((address, int(port)))
    started(args, settings, nics, command)
    print(ask("GET", int(port), "/runfunc_result/0", address=address))
    print(codec.dumps_base64(settings.key) in open(os.environ["SSH_LOG"]).read())
    silent.close()

if __name__ == "__main__":
    launch._launch_job = attacked
    hosts = {"hosts": "localhost:1,other:1", "network_interfaces": ["lo"], "disable_cache": True}
    print(horovod.run(rank, (3,), num_proc=2, use_gloo=True, **hosts))
"""


def test_horovod_run_unpickles_neither_a_strangers_function_nor_its_result(run, tmp_path: Path) -> None:
    out = run(RUN).splitlines()
    assert out[:18] == ["(403, b'')"] * 18
    assert out[18:] == ["(403, b'')", "(403, b'')", "False", "[(0, True), (3, True)]"]
    assert "horovod.runner.run_task" in (tmp_path / "ssh.log").read_text()


RUN_WITHOUT_KEY = """
from horovod.runner.common.util import secret
from horovod.runner.http.http_server import KVStoreServer
import subprocess, sys

server = KVStoreServer(verbose=0, key=secret.make_secret_key())
port = server.start_server("127.0.0.1")
rank = [sys.executable, "-m", "horovod.runner.run_task", "127.0.0.1", str(port)]
done = subprocess.run(rank, capture_output=True, text=True)
print(done.returncode, done.stderr.strip())
server.shutdown_server()
"""


def test_a_rank_without_the_key_says_so_in_one_line(run) -> None:
    (said,) = run(RUN_WITHOUT_KEY).splitlines()
    assert said.startswith("1 horovod.run: Read data from KVStore server failed: HTTP Error 403")
    assert said.endswith("this process has another key (_HOROVOD_SECRET_KEY) than the job")


# All of the comparison of interfaces, between this host and `other`, which is this host behind SSH above.
SERVICES = """
from stranger import *
import os
import time
from horovod.runner.common.util import codec, network, secret, timeout
from horovod.runner.common.util.settings import Settings
from horovod.runner.driver import driver_service
from horovod.runner.task import task_service

def main():
    network.REQUEST_TIMEOUT = 1
    key = secret.make_secret_key()
    service = task_service.HorovodRunTaskService(0, key, {"lo"})
    silent = socket.create_connection(("127.0.0.1", service.get_port()))
    unsigned = [bytes(32) + struct.pack("i", length) + EVIL for length in (len(EVIL), -1)]
    for message in (b"", b"GET / HTTP/1.0\\r\\n\\r\\n" + bytes(40), *unsigned):
        with socket.create_connection(("127.0.0.1", service.get_port()), timeout=20) as stranger:
            stranger.sendall(message)
            stranger.shutdown(socket.SHUT_WR)
            print(stranger.makefile("rb").read())
    task_service.HorovodRunTaskClient(0, service.addresses(), key, 0).notify_initial_registration_complete()
    service.wait_for_initial_registration(timeout.Timeout(20, "{activity}"))
    service.shutdown()  # released: waits for the silent connection for ever

    settings = Settings(verbose=2, key=key, start_timeout=timeout.Timeout(60, "{activity}"))
    print(sorted(driver_service._driver_fn(["here", "other"], {"here"}, settings, fn_cache=None)) != [], flush=True)
    os._exit(0)  # released: a thread whose command is cut off by Python's end calls os._exit(None)

if __name__ == "__main__":  # safe_shell_exec spawns: that imports this file
    main()
"""


def test_the_services_that_compare_interfaces_answer_no_stranger_and_show_no_key(run, tmp_path: Path) -> None:
    out = run(SERVICES)
    assert out.splitlines()[:4] == ["b''"] * 4
    assert "True" in out.splitlines()  # its threads may print after it
    commands = [line for line in out.splitlines() if line.startswith("Launching horovod task function: ")]
    assert len(commands) == 2
    log = (tmp_path / "ssh.log").read_text()
    assert "horovod.runner.task_fn" in log
    from horovod.runner.common.util import codec  # of the build: it reads its own words

    for line in [*commands, *log.splitlines()]:
        assert codec.loads_base64(line.split()[-1].strip("'")).key is None, "the job's key is on a command line"
