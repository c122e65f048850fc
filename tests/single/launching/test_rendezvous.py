"""The server at which Gloo's ranks learn each other's sockets: many callers at once, slow ones, and what is no request."""

import contextlib
import os
import shlex
import socket
import stat
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest

from hvdtrain.engines.errors import Failure, UserError
from hvdtrain.launching import meeting
from hvdtrain.launching.meeting import Meeting, Rendezvous
from hvdtrain.launching.rendezvous import Server, horovods_server, job_secret, put_value, server_request, wait_for

SECRET = "a secret of this job"
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@pytest.fixture(scope="module")
def server():
    return Rendezvous("127.0.0.1", 0, SECRET)


def ask(server: Rendezvous, method: str, path: str, data: bytes | None = None) -> bytes:
    request = urllib.request.Request(f"http://{server.server.address}:{server.port}/{path}", data=data, method=method)
    with DIRECT.open(request, timeout=20) as response:
        return response.read()


def connect(server: Rendezvous) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=20)


def read_all(connection: socket.socket) -> bytes:
    with connection:
        return b"".join(iter(lambda: connection.recv(65536), b""))


def test_what_is_put_can_be_read_and_taken_away(server):
    with pytest.raises(urllib.error.HTTPError, match="404"):
        ask(server, "GET", "a/key")
    assert ask(server, "PUT", "a/key", b"value") == b""
    assert ask(server, "GET", "a/key") == b"value"
    assert server.get("a") == {"key": b"value"}
    ask(server, "DELETE", "a/key")
    assert server.get("a") == {}


def test_large_values_arrive_whole(server):
    value = bytes(range(256)) * 8_000  # 2 MB: more than any socket's buffer takes at once
    ask(server, "PUT", "large/key", value)
    assert ask(server, "GET", "large/key") == value


def test_a_scope_is_forgotten_once_all_its_ranks_have_finished(server):
    for rank in range(3):
        server.answer("PUT", "global", str(rank), b"sockets")
    for rank in (0, 1, 1):  # one of them twice
        ask(server, "DELETE", f"global/{rank}")
    assert len(server.get("global")) == 3
    ask(server, "DELETE", "global/2")
    assert server.get("global") == {}
    ask(server, "PUT", "global/0", b"again")  # Horovod is started a second time
    assert server.get("global") == {"0": b"again"}


def addresses_of(sender: int, size: int) -> bytes:
    """Return what Gloo's rank `sender` stores: the address of a socket for each other rank, of 136 bytes each."""
    return b"".join(f"from {sender} for {rank}".encode().ljust(136) for rank in range(size) if rank != sender)


@pytest.mark.parametrize("size", [2, 3, 8])
def test_each_rank_gets_the_addresses_meant_for_it_as_soon_as_the_last_one_is_there(server, size):
    connections = [connect(server) for _ in range(size)]
    for rank, connection in enumerate(connections):
        head = f"GET {server.server.prefix}/own{size}/addresses_of_{rank}_of_{size} HTTP/1.1\r\n\r\n"
        connection.sendall(head.encode())
        if rank:
            ask(server, "PUT", f"own{size}/{rank}", addresses_of(rank, size))
    connections.pop(1).close()  # one of those that wait is gone: nobody else notices
    ask(server, "PUT", f"own{size}/0", addresses_of(0, size))
    for rank, connection in zip([0, *range(2, size)], connections, strict=True):
        head, _, body = read_all(connection).partition(b"\r\n\r\n")
        assert b"200 OK" in head
        expected = [f"from {sender} for {rank}".encode() for sender in range(size) if sender != rank]
        assert [body[at : at + 136].rstrip() for at in range(0, len(body), 136)] == expected


def test_a_rank_that_waits_for_one_that_does_not_come_is_told_nothing_after_a_while(server, monkeypatch):
    monkeypatch.setattr(meeting, "SELECTION_SECONDS", 0.2)
    ask(server, "PUT", "missing/0", addresses_of(0, 3))
    assert ask(server, "GET", "missing/addresses_of_0_of_3") == b""


def test_hundreds_that_connect_before_anybody_asks_are_all_answered(server):
    """A listen queue of five drops the others, and each comes again after a second or more."""
    server.answer("PUT", "many", "key", b"value")
    connections = [connect(server) for _ in range(200)]
    for connection in connections:
        head = f"GET {server.server.prefix}/many/key HTTP/1.1\r\nHost: here\r\nContent-Length: 0\r\n\r\n"
        connection.sendall(head.encode())
    for connection in connections:
        assert read_all(connection) == b"HTTP/1.0 200 OK\r\nContent-Length: 5\r\n\r\nvalue"


def test_nobody_waits_for_a_caller_that_is_slow(server):
    silent, slow = connect(server), connect(server)
    slow.sendall(f"PUT {server.server.prefix}/slow/key HTTP/1.1\r\ncontent-length: 4\r\n\r\nab".encode())
    ask(server, "PUT", "quick/key", b"value")
    assert server.get("slow") == {}
    slow.sendall(b"cd")
    assert read_all(slow).startswith(b"HTTP/1.0 200")
    assert server.get("slow") == {"key": b"abcd"}
    silent.close()


@pytest.mark.parametrize(
    "said",
    [
        b"\r\n\r\n",
        b"nonsense\r\n\r\n",
        b"POST %s/a/b HTTP/1.1\r\n\r\n",
        b"GET %s/only-a-scope HTTP/1.1\r\n\r\n",
        b"GET %s/a/b/c HTTP/1.1\r\n\r\n",
        b"GET %sa/b HTTP/1.1\r\n\r\n",
        b"PUT %s/a/b HTTP/1.1\r\nContent-Length: 999999999\r\n\r\n",  # more than it would hold
        b"GET %s/" + b"a" * 70_000,
    ],
)
def test_what_is_no_request_is_hung_up_on(said, server):
    connection = connect(server)
    connection.sendall(said.replace(b"%s", server.server.prefix.encode()))
    with contextlib.suppress(ConnectionResetError):  # what it had not read yet
        assert read_all(connection) == b""
    assert ask(server, "PUT", "after/key", b"") == b""  # and the server lives


def test_an_address_that_is_taken_is_said(server):
    with pytest.raises(OSError, match="in use"):
        Rendezvous("127.0.0.1", server.port, SECRET)


def test_what_one_rank_puts_the_others_get_as_soon_as_it_is_there(server):
    told = {"HOROVOD_GLOO_RENDEZVOUS_ADDR": server.server.address, "HOROVOD_GLOO_RENDEZVOUS_PORT": str(server.port)}
    where = horovods_server(told)
    assert where == server.server
    with pytest.raises(TimeoutError, match="rank 0 did not connect within 0 s"):
        wait_for(where, "hvdtrain.ddp", "0", 0.0)
    later = threading.Timer(0.2, put_value, (where, "hvdtrain.ddp", "0", b"10.0.0.1 4711"))
    later.start()
    assert wait_for(where, "hvdtrain.ddp", "0", 30.0) == b"10.0.0.1 4711"
    later.join()


def test_where_no_launcher_runs_a_server_there_is_none():
    assert horovods_server({}) is None
    assert horovods_server({"HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1"}) is None
    of_horovodrun = {"HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1", "HOROVOD_GLOO_RENDEZVOUS_PORT": "9"}
    assert horovods_server(of_horovodrun) == Server("10.0.0.1", 9)


ODD = [
    b"hello, who is there?\r\n\r\n", b"HTTP/1.0 200 OK\r\nContent-Length: 9\r\n\r\nall", b"",
]  # fmt: skip


@pytest.mark.parametrize("answer", [*ODD, b"HTTP/1.0 200 OK\r\n" + b"a: b\r\n" * 30_000])
def test_what_is_no_rendezvous_server_is_an_oserror(answer):
    with socket.create_server(("127.0.0.1", 0)) as other:

        def serve() -> None:
            with other.accept()[0] as connection:
                connection.recv(1000)
                with contextlib.suppress(OSError):
                    connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(OSError, match="is not a rendezvous server"):
            put_value(Server(*other.getsockname()), "scope", "key", b"")
        thread.join()


# ---- strangers


def test_a_request_without_the_secret_is_refused_before_its_value_is_read(server):
    """Every user of the host can connect. One PUT of `failed/any` ended the job, and 24 of 64 MiB took 1.6 GB."""
    for stranger in (Server("127.0.0.1", server.port), Server("127.0.0.1", server.port, "0" * 64)):
        for method, body in (("PUT", b"ended"), ("GET", b""), ("DELETE", b"")):
            with pytest.raises(PermissionError, match="does not know the secret of this job"):
                server_request(stranger, method, "/failed/any", body)
    connection = connect(server)
    connection.sendall(b"PUT /huge/any HTTP/1.1\r\nContent-Length: 67108864\r\n\r\n")
    with contextlib.suppress(OSError):  # it hangs up
        for _ in range(64):
            connection.sendall(bytes(2**20))
        pytest.fail("64 MiB were read")
    connection.close()
    assert server.get("failed") == server.get("huge") == {}


def test_strangers_are_limited_and_keep_nobody_away_for_long(monkeypatch):
    """3,000 connections of one byte each left rank 0, in whose process the server runs, no file to open."""
    monkeypatch.setattr(meeting, "MOST_STRANGERS", 4)
    monkeypatch.setattr(meeting.Caller, "timeout", 0.5)
    server = Rendezvous("127.0.0.1", 0, SECRET)
    put_value(server.server, "among", "strangers", b"value")
    threads = threading.active_count()
    strangers = [connect(server) for _ in range(20)]
    time.sleep(0.2)
    assert threading.active_count() <= threads + 4
    assert server_request(server.server, "GET", "/among/strangers") == b"value"
    for stranger in strangers:
        stranger.close()


def test_a_stranger_who_says_little_is_hung_up_on(server, monkeypatch):
    monkeypatch.setattr(meeting.Caller, "timeout", 0.2)
    connection = connect(server)
    connection.sendall(b"GET /a")
    assert read_all(connection) == b""


def test_the_secret_is_in_the_environment_or_in_a_file_that_only_this_user_can_read(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert job_secret({"HVDTRAIN_JOB_SECRET": "0123456789abcdef"}, 2) == "0123456789abcdef"
    with pytest.raises(UserError, match="HVDTRAIN_JOB_SECRET has 15 characters, which can be guessed"):
        job_secret({"HVDTRAIN_JOB_SECRET": "0123456789abcde"}, 2)
    assert job_secret({}, 1) != job_secret({}, 1)
    assert not list(tmp_path.iterdir())
    before = os.umask(0)
    try:
        with ThreadPoolExecutor(8) as pool:  # starters that come at once
            (secret,) = set(pool.map(lambda _: job_secret({}, 2), range(32)))
    finally:
        os.umask(before)
    (path,) = tmp_path.rglob("secret")
    assert [stat.S_IMODE(path.stat().st_mode), path.read_text(), len(secret)] == [0o600, secret, 64]
    assert list(path.parent.iterdir()) == [path]
    path.write_text("short")
    with pytest.raises(UserError, match="secret, the job's secret, cannot be used"):
        job_secret({}, 2)
    path.parent.chmod(0o777)
    with pytest.raises(UserError, match=r"no private cache directory.*set HVDTRAIN_JOB_SECRET"):
        job_secret({}, 2)


def test_in_kubernetes_pods_need_no_secret(tmp_path, monkeypatch):
    """They share no home directory, and a network policy keeps others away."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    pods = [{"KUBERNETES_SERVICE_HOST": "10.0.0.1", "MASTER_ADDR": host} for host in ("a", "a", "b")]
    first, second, other = (job_secret(pod, 2) for pod in pods)
    assert first == second != other
    assert job_secret(pods[0] | {"HVDTRAIN_JOB_SECRET": "0123456789abcdef"}, 2) == "0123456789abcdef"
    assert not list(tmp_path.iterdir())


def starter(number: int, port: int, secret: str = SECRET, seconds: float = 20.0) -> Meeting:
    return Meeting(number, 2, "127.0.0.1", port, None, seconds, secret)


def test_starters_with_another_secret_are_told_at_once():
    first = starter(0, 0)
    first.come(1)
    with pytest.raises(
        UserError, match=r"does not know the secret of this job: set another MASTER_PORT, or.*HVDTRAIN_JOB"
    ):
        starter(1, first.port, "that of another user").come(1)


def test_each_part_of_a_meeting_has_its_time():
    """A starter that is ready in the last moment, and then is told late of the others, is not gone."""
    first, ended = starter(0, 0, seconds=3.0), []
    first.come(1)
    other = starter(1, first.port)
    other.come(1)
    (waits := threading.Thread(target=lambda: ended.append(first.wait()))).start()
    for part in ("ready", "met"):
        time.sleep(2.0)
        other._request("PUT", part, "1")
    waits.join(20)
    assert ended == [None]


def test_a_starter_whose_import_took_long_waits_for_a_busy_first_one(monkeypatch):
    """It had half a second for each answer, and was gone after the first one that took longer."""
    first, answer = starter(0, 0), Rendezvous.answer
    first.come(1)
    other = starter(1, first.port, seconds=1.0)
    other.come(1)
    waits = threading.Thread(target=first.wait)
    waits.start()
    time.sleep(1.1)  # the import

    def late(server: Rendezvous, method: str, scope: str, key: str, value: bytes = b"") -> bytes | None:
        time.sleep(0.7 * ((scope, key) == ("ready", "1")))
        return answer(server, method, scope, key, value)

    monkeypatch.setattr(Rendezvous, "answer", late)
    other.wait()
    waits.join(20)
    assert other.hosts == first.hosts


@pytest.mark.parametrize("answer", ["{}", "[]", "7", '[["a", 1], ["b", "x"]]', '[["a", 1], ["b"]]'])
def test_what_no_starter_says_is_one_line(answer):
    first = starter(0, 0)
    first.come(1)
    put_value(first._where(), "known", "hosts", answer.encode())
    second = starter(1, first.port)
    second.come(1)
    with pytest.raises(Failure, match="the starters do not understand each other"):
        second.wait()
    put_value(first._where(), "hosts", "1", answer.encode())
    with pytest.raises(Failure, match="the starters do not understand each other"):
        first.wait()


@pytest.mark.skipif(os.geteuid() != 0, reason="a network of its own with few ports needs root")
def test_a_host_without_free_ports_is_told_at_once():
    code = "from hvdtrain.launching.rendezvous import require_free_ports; require_free_ports()"
    few = "echo '40000 {last}' >/proc/sys/net/ipv4/ip_local_port_range"
    said = []
    for last in (40002, 40100):
        shell = f"{few.format(last=last)} && exec {shlex.quote(sys.executable)} -c {shlex.quote(code)}"
        done = subprocess.run(["unshare", "-n", "bash", "-c", shell], text=True, capture_output=True, timeout=60)
        said.append((done.returncode, done.stderr.splitlines()[-1:]))
    assert said[1] == (0, [])
    assert said[0][0] == 1
    assert "no ports are free on this host (Address already in use): end what holds them" in said[0][1][0]
