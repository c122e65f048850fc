"""The ranks' own connections: who gets one, how soon, and who cannot keep others from it."""

import contextlib
import os
import socket
import threading
import time

import pytest

from hvdtrain.engines.single import SerialEngine
from hvdtrain.guards import connection as connections
from hvdtrain.guards.connection import accept, listen_for_ranks, say_hello
from tests.waiting import wait_for

KEY = bytes(32)


@pytest.fixture
def hub():
    """Begin to accept, in a thread; return the address, and what gives the channels once all have come."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=200)
    got: dict = {}
    threads: list[threading.Thread] = []

    def serve(size: int, seconds: float) -> None:
        try:
            got.update(accept([listener], KEY, size, seconds))
        except OSError as error:
            got["error"] = error

    def begin(size: int = 2, seconds: float = 10.0):
        threads.append(threading.Thread(target=serve, args=(size, seconds)))
        threads[0].start()

        def end() -> dict:
            threads[0].join(seconds + 5)
            assert not threads[0].is_alive()
            return got

        return listener.getsockname(), end

    yield begin
    for one in got.values():
        with contextlib.suppress(AttributeError):
            one.socket.close()
    listener.close()


def test_a_host_whose_name_has_no_address_is_named():
    with pytest.raises(
        OSError, match=r"no address for host-9\.invalid \(.*\): add it to /etc/hosts, or to the name server"
    ):
        listen_for_ranks(["h0", "host-9.invalid"])


def test_the_same_number_on_two_hosts_of_one_name_is_another_process(monkeypatch):
    here, there = [], []
    for boot, found in (("a", here), ("b", there), ("a", here)):
        monkeypatch.setattr(connections.processes, "boot_id", lambda boot=boot: boot)
        engine = SerialEngine(tuning=False, rank=0, size=1, launcher="none")
        found += connections.connect_all(engine)[0].all
    peers = connections.Peers(0, here + there, {})
    assert [peers.is_here(rank) for rank in range(3)] == [True, True, False]


def test_only_who_knows_the_secret_gets_a_channel(hub):
    address, end = hub()
    with socket.create_connection(address) as stranger:
        stranger.recv(32)
        stranger.sendall(bytes(68))
        assert stranger.recv(32) == b""
    with pytest.raises(OSError, match=r"closed|reset|not rank 0"):
        say_hello(address, b"wrong" * 7, 1)
    mine = say_hello(address, KEY, 1)
    got = end()
    assert list(got) == [1]
    mine.send("stop", "x")
    assert got[1].receive() == [["stop", "x"]]
    mine.socket.close()


def test_strangers_who_are_silent_or_slow_keep_nobody_waiting(hub):
    address, end = hub(3, seconds=20.0)
    crowd = [socket.create_connection(address) for _ in range(100)]
    for stranger in crowd[::2]:
        stranger.sendall(b"x")
    began = time.monotonic()
    mine = [say_hello(address, KEY, rank) for rank in (2, 1)]
    assert sorted(end()) == [1, 2]
    assert time.monotonic() - began < connections.ONE_HELLO_SECONDS
    for connection in (*crowd, *(channel.socket for channel in mine)):
        connection.close()


def test_one_deadline_for_all_hellos_whatever_strangers_send(hub):
    address, end = hub(2, seconds=1.0)
    with socket.create_connection(address) as stranger:
        stranger.sendall(b"x")
        assert str(end()["error"]) == "rank 1 did not connect within 1 s"


def test_a_stranger_is_heard_for_no_longer_than_its_time(hub, monkeypatch):
    monkeypatch.setattr(connections, "ONE_HELLO_SECONDS", 0.5)
    address, end = hub(2, seconds=10.0)
    with socket.create_connection(address) as stranger:
        stranger.recv(32)
        with pytest.raises(OSError, match=r"Broken pipe|reset"):
            while True:
                stranger.sendall(b"x")  # never the 68 bytes in time
                time.sleep(0.1)
    say_hello(address, KEY, 1).socket.close()
    assert list(end()) == [1]


@pytest.mark.parametrize(
    ("hosts", "addresses"),
    [
        (["a", "a"], {"a": "127.0.0.1"}),
        (
            ["a", "a", "b", "c"],
            {"a": "127.0.0.2", "b": "127.0.0.2", "c": "127.0.0.2"},
        ),  # its own ranks take the same way
        (["a", "b", "d"], {"a": "127.0.0.2", "b": "127.0.0.2", "d": "127.0.0.3"}),
    ],
)
def test_rank_0_listens_only_where_its_ranks_are(hosts, addresses, monkeypatch):
    monkeypatch.setattr(connections, "own_address_towards", {"b": "127.0.0.2", "c": "127.0.0.2", "d": "127.0.0.3"}.get)
    listeners, where = listen_for_ranks(hosts)
    try:
        assert {host: address for host, (address, _) in where.items()} == addresses
        assert {listener.getsockname() for listener in listeners} == set(where.values())
        assert not any(address == "0.0.0.0" for address, _ in where.values())
    finally:
        for listener in listeners:
            listener.close()


def test_half_a_message_is_not_followed_by_another():
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    here = _WithoutNoDelay(here)
    channel = connections.Channel(here)
    here.settimeout(0.1)
    for _ in range(3):
        channel.send("stop", "x" * 10_000_000)  # nobody reads
    there.settimeout(1)
    received = b""
    with contextlib.suppress(TimeoutError):
        while part := there.recv(1_000_000):
            received += part
    assert received.count(b"[") == 1
    here.close()
    there.close()


class _WithoutNoDelay:
    """A socket of this host, which has no TCP options."""

    def __init__(self, real: socket.socket):
        self.__dict__["real"] = real

    def setsockopt(self, *_):
        pass

    def __getattr__(self, name):
        return getattr(self.real, name)


def test_strangers_take_few_of_the_open_files(hub, monkeypatch):
    """Each connection is one, and rank 0 opens others at the start. Once there is room again, its ranks come."""
    monkeypatch.setattr(connections, "ONE_HELLO_SECONDS", 100.0)  # else they end by themselves
    address, end = hub(2, seconds=100.0)
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    crowd = []
    for _ in range(300):
        with contextlib.suppress(OSError):
            crowd.append(socket.create_connection(address, timeout=10))

    def few_are_taken():
        return len(os.listdir("/proc/self/fd")) - before - len(crowd) <= connections.MOST_UNNAMED_CONNECTIONS + 4  # noqa: PTH208

    wait_for(few_are_taken, "more than its share", 60.0)
    for connection in crowd:
        connection.close()
    mine = say_hello(address, KEY, 1)
    assert list(end()) == [1]
    mine.socket.close()
