"""The server at which Gloo's ranks learn each other's sockets: many callers at once, slow ones, and what is no request."""

import contextlib
import socket
import threading
import urllib.error
import urllib.request

import pytest

from hvdtrain.launching import rendezvous_server
from hvdtrain.launching.rendezvous import horovods_server, put, wait_for
from hvdtrain.launching.rendezvous_server import Rendezvous

DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@pytest.fixture(scope="module")
def server():
    return Rendezvous("127.0.0.1", 0)


def ask(server: Rendezvous, method: str, path: str, data: bytes | None = None) -> bytes:
    request = urllib.request.Request(f"http://127.0.0.1:{server.port}/{path}", data=data, method=method)
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
    server.expect(["x", "x", "y"])
    for rank in range(3):
        server.put("global", str(rank), b"sockets")
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
        connection.sendall(f"GET /own{size}/addresses_of_{rank}_of_{size} HTTP/1.1\r\n\r\n".encode())
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
    monkeypatch.setattr(rendezvous_server, "SELECTION_SECONDS", 0.2)
    ask(server, "PUT", "missing/0", addresses_of(0, 3))
    assert ask(server, "GET", "missing/addresses_of_0_of_3") == b""


def test_hundreds_that_connect_before_anybody_asks_are_all_answered(server):
    """A listen queue of five drops the others, and each comes again after a second or more."""
    server.put("many", "key", b"value")
    connections = [connect(server) for _ in range(300)]
    for connection in connections:
        connection.sendall(b"GET /many/key HTTP/1.1\r\nHost: here\r\nContent-Length: 0\r\n\r\n")
    for connection in connections:
        assert read_all(connection) == b"HTTP/1.0 200 OK\r\nContent-Length: 5\r\n\r\nvalue"


def test_nobody_waits_for_a_caller_that_is_slow(server):
    silent, slow = connect(server), connect(server)
    slow.sendall(b"PUT /slow/key HTTP/1.1\r\ncontent-length: 4\r\n\r\nab")
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
        b"POST /a/b HTTP/1.1\r\n\r\n",
        b"GET /only-a-scope HTTP/1.1\r\n\r\n",
        b"GET /a/b/c HTTP/1.1\r\n\r\n",
        b"PUT /a/b HTTP/1.1\r\nContent-Length: 999999999\r\n\r\n",  # more than it would hold
        b"GET /" + b"a" * 40_000,
    ],
)
def test_what_is_no_request_is_hung_up_on(said, server):
    connection = connect(server)
    connection.sendall(said)
    with contextlib.suppress(ConnectionResetError):  # what it had not read yet
        assert read_all(connection) == b""
    assert ask(server, "PUT", "after/key", b"") == b""  # and the server lives


def test_an_address_that_is_taken_is_said(server):
    with pytest.raises(OSError, match="in use"):
        Rendezvous("127.0.0.1", server.port)


def test_what_one_rank_puts_the_others_get_as_soon_as_it_is_there(server):
    where = horovods_server(
        {"HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1", "HOROVOD_GLOO_RENDEZVOUS_PORT": str(server.port)}
    )
    assert where == ("127.0.0.1", server.port)
    with pytest.raises(TimeoutError, match="rank 0 did not connect within 0 s"):
        wait_for(where, "hvdtrain.ddp", "0", 0.0)
    later = threading.Timer(0.2, put, (where, "hvdtrain.ddp", "0", b"10.0.0.1 4711"))
    later.start()
    assert wait_for(where, "hvdtrain.ddp", "0", 30.0) == b"10.0.0.1 4711"
    later.join()


def test_where_no_launcher_runs_a_server_there_is_none():
    assert horovods_server({}) is None
    assert horovods_server({"HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1"}) is None


def test_what_is_no_rendezvous_server_is_an_oserror():
    with socket.create_server(("127.0.0.1", 0)) as other:
        answer = threading.Thread(target=lambda: other.accept()[0].sendall(b"hello, who is there?\r\n\r\n"))
        answer.start()
        with pytest.raises(OSError, match="is not a rendezvous server"):
            put(other.getsockname(), "scope", "key", b"")
        answer.join()
