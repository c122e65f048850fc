"""Ranks that a fork server forks for their clients: what they take over, how both end. The ranks import nothing."""

import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hvdtrain.launching import processes
from hvdtrain.launching.fork_client import FORK_SERVER_VARIABLE
from tests.e2e.launchers import MARK, ROOT, environment, kill, members, new_job
from tests.waiting import wait_for

SERVER = [sys.executable, Path(__file__).parent / "without_imports.py", "forker"]
# Only programs that import hvdtrain have a server.
PROGRAM = "import hvdtrain, json, os, signal, sys, time\n"
FACTS = """
facts = dict(pid=os.getpid(), parent=os.getppid(), argv=sys.argv[1:], name=__name__, directory=os.getcwd())
facts |= dict(mine=os.environ.get("MINE"), server=os.environ.get("OF_SERVER"), group=os.getpgrp(), typed=sys.stdin.read())
processes = sys.modules.get("hvdtrain.launching.processes")
facts |= dict(proxy=processes.proxy if processes else None)
print(json.dumps(facts))
print("said", file=sys.stderr)
sys.exit(7)
"""
WAIT = """
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))
print(os.getpid(), flush=True)
time.sleep(600)
"""


class Server:
    """A fork server for one script, as the wrapper starts it, and its clients."""

    def __init__(self, directory: Path, body: str, stack: contextlib.ExitStack, **variables: str):
        self.job, self.stack, self.script = new_job(), stack, directory / "script.py"
        self.script.write_text(body)
        self.process = self.start([*SERVER, self.script], stdin=subprocess.DEVNULL, OF_SERVER="1", **variables)
        self.name = self.process.stdout.readline().strip()

    def start(self, words, *, stdin=subprocess.PIPE, stderr=None, **variables: str) -> subprocess.Popen[str]:
        env = environment(**{MARK: self.job}, **variables)
        pipes = dict(stdin=stdin, stdout=subprocess.PIPE, stderr=stderr)
        process = self.stack.enter_context(subprocess.Popen(words, cwd=ROOT, env=env, text=True, **pipes))
        self.stack.callback(kill, self.job)
        return process

    def client(self, *arguments: str, **variables: str) -> subprocess.Popen[str]:
        words = [sys.executable, "-m", "hvdtrain.launching.fork_client", self.script, *arguments]
        return self.start(words, stderr=subprocess.PIPE, **{FORK_SERVER_VARIABLE: self.name}, **variables)


@pytest.fixture
def server(tmp_path):
    with contextlib.ExitStack() as stack:
        yield lambda body, **variables: Server(tmp_path, body, stack, **variables)


def facts(server: Server, *arguments: str) -> dict:
    client = server.client(*arguments, MINE="x y")
    out, err = client.communicate("a line\n", timeout=60)
    assert (client.returncode, err) == (7, "said\n"), err
    return json.loads(out) | {"client": client.pid}


def test_a_rank_is_what_its_client_was(server):
    some = server(PROGRAM + FACTS)
    for attempt in range(2):
        found = facts(some, "--flag", str(attempt))
        assert found["argv"] == ["--flag", str(attempt)]
        assert (found["mine"], found["server"], found["name"]) == ("x y", None, "__main__")
        assert (found["directory"], found["typed"]) == (str(ROOT), "a line\n")
        assert found["parent"] == some.process.pid  # forked, with all that the server has imported
        assert found["proxy"] == found["client"]
        assert found["group"] == found["pid"]


@pytest.mark.parametrize("why", ["no such server", "its import failed", "not for hvdtrain"])
def test_without_a_server_the_client_becomes_the_rank(server, why):
    body = f"import os, sys, json{FACTS}" if why == "not for hvdtrain" else PROGRAM + FACTS
    some = server(body, **({"SETTINGS": '{"import_error": ""}'} if why == "its import failed" else {}))
    if why == "no such server":
        some.name = "nobody"
    found = facts(some, "x")
    assert (found["argv"], found["mine"], found["pid"]) == (["x"], "x y", found["client"])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start another user's process")
def test_nothing_is_handed_to_another_users_server(server):
    """Its name is in /proc/net/unix, and free when the server has ended."""
    some = server(PROGRAM + FACTS)
    some.name = f"taken-{os.getpid()}"
    listens, received = os.pipe(), os.pipe()
    if (other := os.fork()) == 0:  # not by exec: another user may not be able to read this interpreter
        os.setresuid(12345, 12345, 12345)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"\0{some.name}")
            listener.listen()
            os.write(listens[1], b".")
            os.write(received[1], b"%d" % len(listener.accept()[0].recv(1000)))
        os._exit(0)
    assert os.read(listens[0], 1) == b"."
    found = facts(some, "x")
    assert os.read(received[0], 10) == b"0"
    os.waitpid(other, 0)
    assert found["pid"] == found["client"]


def waiting(server: Server) -> tuple[subprocess.Popen, int]:
    """Return a client and its rank's pid, once the client forwards signals: the rank may be ready before it."""
    client = server.client()
    rank = int(client.stdout.readline())
    status = Path(f"/proc/{client.pid}/status")
    caught = 1 << (signal.SIGUSR1 - 1)
    wait_for(lambda: int(status.read_text().split("SigCgt:")[1].split()[0], 16) & caught, "it forwards nothing", 20)
    return client, rank


def test_signals_and_ends_go_through_the_client(server):
    some = server(PROGRAM + WAIT)
    client, rank = waiting(some)
    client.send_signal(signal.SIGUSR1)
    assert client.wait(20) == 75
    client, rank = waiting(some)
    os.kill(rank, signal.SIGKILL)
    assert client.wait(20) == -signal.SIGKILL  # as the rank
    client, rank = waiting(some)
    client.kill()  # as a launcher does with the others of a failed job
    wait_for(lambda: not processes.runs(rank), "it lives", 20)
    assert some.process.poll() is None


def test_ranks_end_with_their_server_and_it_with_its_starter(server):
    some = server(PROGRAM + WAIT)
    client, rank = waiting(some)
    some.process.kill()
    assert client.wait(20) == 1
    wait_for(lambda: not processes.runs(rank), "it lives", 20)
    command = shlex.join([*map(str, SERVER), str(some.script)])
    other = some.start(["sh", "-c", f"{command} & read line"])
    some.name = other.stdout.readline().strip()
    client, rank = waiting(some)
    other.kill()
    time.sleep(1.5)
    assert Path(f"/proc/{rank}").exists()  # it has time to save
    client.send_signal(signal.SIGUSR1)
    assert client.wait(20) == 75
    wait_for(lambda: not members(some.job), "the server is left")


def test_a_server_that_does_not_answer_is_done_without(tmp_path):
    """It hangs while it imports, for example. The client gives up after the time limit of a start, and becomes the rank."""
    script = tmp_path / "script.py"
    script.write_text(PROGRAM + "sys.exit(7 + len(sys.argv))")
    name = f"hvdtrain-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as silent:
        silent.bind(f"\0{name}")
        silent.listen()
        done = subprocess.run(
            [sys.executable, "-m", "hvdtrain.launching.fork_client", script, "x"], cwd=ROOT, timeout=60,
            env=environment(**{FORK_SERVER_VARIABLE: name, "HVDTRAIN_START_TIMEOUT": "0.2"}), stdin=subprocess.DEVNULL,
        )  # fmt: skip
    assert done.returncode == 9


def test_a_signal_before_there_is_a_rank_ends_the_client_as_the_imports_of_one_would(tmp_path):
    name = f"hvdtrain-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as silent:
        silent.bind(f"\0{name}")
        silent.listen()
        client = subprocess.Popen(
            [sys.executable, "-m", "hvdtrain.launching.fork_client", "script.py"], cwd=ROOT, stderr=subprocess.PIPE,
            env=environment(**{FORK_SERVER_VARIABLE: name}), text=True,
        )  # fmt: skip
        with client:
            with silent.accept()[
                0
            ]:  # it may hold what the client has sent: its standard error, which then does not end
                client.send_signal(signal.SIGUSR1)
                assert client.wait(60) == 75
            assert client.stderr.read() == "hvdtrain: SIGUSR1 before training: nothing to save\n"
