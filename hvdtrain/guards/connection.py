"""Who the ranks are, and a TCP connection from each to rank 0, separate from those of the engine.

Only ranks that know the job's secret, which is broadcast over the engine, can connect. A message is a line of JSON, [KIND,
FIELD, ...]. Without text in quotes, the kinds are:

ask                     where are you? Answered by
stand REPORT            the fields of a `Report` (judge.py)
stop REASON             a request to stop, from any rank to rank 0, and from rank 0 to all
appoint WHAT STEP WHY   the step after which all ranks do WHAT, "stop" or "save"; from rank 0, answered by
know WHAT
fail ERROR MISTAKE      the sender leaves the job alone: see `Fail`
end CODE                the job ends with this exit code
bye                     the sender has finished
"""

import contextlib
import hmac
import json
import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from hvdtrain.engines import files
from hvdtrain.engines.base import Engine
from hvdtrain.engines.errors import one_line
from hvdtrain.launching import processes
from hvdtrain.launching.rendezvous import own_address_towards

FIRST_MESSAGE_SECONDS = 20.0  # for all ranks to connect, at the start
ONE_HELLO_SECONDS = 5.0  # for one connection to authenticate; after a failure, a rank tries again
ACCEPT_SECONDS = 0.1  # between two looks at the time, while ranks connect
MOST_UNNAMED_CONNECTIONS = 128  # connections at a time that have not authenticated, besides those of ranks
RANK_SPARE_FILES = 832  # open files besides the connections of ranks
SEND_SECONDS = 5.0  # time limit to send a message
LONGEST_MESSAGE = 2**20  # bytes
CHALLENGE = PROOF = 32  # bytes
ANSWER = 4 + CHALLENGE + PROOF


class Channel:
    """One connection, which transfers messages in both directions. Any thread may send; only the watch receives."""

    def __init__(self, connection: socket.socket):
        connection.settimeout(SEND_SECONDS)
        # Messages are short: without this, the kernel holds one back until the one before is acknowledged.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connection
        self.error: OSError | None = None  # why nothing more can be received; None also after a regular end
        self._unread = b""
        self._lock = threading.Lock()
        self._sends = True

    def send(self, *message: object) -> None:
        """Send a message. Errors are ignored: `receive` detects a dead peer."""
        with self._lock:
            if not self._sends:
                return
            try:
                self.socket.sendall(json.dumps(message).encode() + b"\n")
            except OSError:  # send nothing after an incomplete line
                self._sends = False

    def receive(self) -> list[list[Any]] | None:
        """Return the messages received; None if the peer is gone. Raises ValueError for what no rank sends."""
        try:
            data = self.socket.recv(65536)
        except OSError as error:
            data, self.error = b"", error
        *lines, self._unread = (self._unread + data).split(b"\n")
        if not data or len(self._unread) > LONGEST_MESSAGE:
            return None
        return [json.loads(line) for line in lines]


# ---------------------------------------------------------------------------------------------- the ranks


class Peer(NamedTuple):
    """A rank's process. place: host and `pid_space`; ranks with the same place can inspect each other's processes."""

    host: str
    place: str
    pid: int


class Fail(NamedTuple):
    """A rank leaves the job alone, because of this error. mistake: of the input or the program, which other ranks may make,
    too."""

    error: str
    mistake: bool = False


class LostRank(NamedTuple):
    """A rank whose connection has ended. since: time.monotonic; infinity if it had finished. failure: if it has said so.
    error: of the connection."""

    since: float
    failure: Fail | None = None
    error: str = ""


class Peers:
    """All ranks of the job, as rank `me` sees them. channels: its connections, by rank."""

    def __init__(self, me: int, peers: Sequence[Peer], channels: Mapping[int, Channel]):
        self.me, self.all, self.channels = me, list(peers), dict(channels)
        self.gone: dict[int, LostRank] = {}

    def name(self, rank: int) -> str:
        """Return "rank N on HOST"."""
        return f"rank {rank} on {self.all[rank].host}"

    def names(self) -> list[str]:
        """Return the names of all ranks."""
        return [self.name(rank) for rank in range(len(self.all))]

    def send_all(self, *message: object) -> None:
        """Send a message over all connections."""
        for channel in list(self.channels.values()):
            channel.send(*message)

    def is_here(self, rank: int) -> bool:
        """Return whether the process of `rank` can be inspected from here."""
        return self.all[rank].place == self.all[self.me].place

    def is_stopped(self, rank: int) -> bool:
        """Return whether `rank` is known to be stopped by a signal. Only ranks on this host can be checked."""
        return self.is_here(rank) and processes.is_stopped(self.all[rank].pid)

    def has_left(self, rank: int) -> bool:
        """Return whether `rank` has finished."""
        return rank in self.gone and self.gone[rank].since == float("inf")

    def all_have_left(self) -> bool:
        """Return whether all ranks that were connected have finished."""
        return not self.channels and all(map(self.has_left, self.gone))

    def failed_alike(self, rank: int, failure: Fail | None) -> bool:
        """Return whether `rank` has said that it failed for the same reason as this one."""
        return failure is not None and rank in self.gone and self.gone[rank].failure == failure

    def fate(self, rank: int) -> str:
        """Return what became of a rank whose connection is gone."""
        _, failure, error = self.gone[rank]
        if failure is not None:
            return f"failed: {one_line(failure.error)}"
        if self.has_left(rank):
            return "left"
        if self.is_here(rank) and processes.runs(self.all[rank].pid):
            return "is cut off: its connection was lost, but its process runs"
        if self.is_here(rank) or not error:
            return "died: its connection closed unexpectedly"
        return f"died or is cut off: its connection was lost ({error})"


# ---------------------------------------------------------------------------------------------- the start


def connect_all(engine: Engine) -> tuple[Peers, str | None]:
    """Return all ranks, connected, and None; or without connections, and why. A collective."""
    host = socket.gethostname()
    # Containers of one host have pid namespaces of their own, where the same number is another process.
    gathered = engine.all_gather_object([host, f"{host} {processes.pid_space()}", os.getpid()], "hangs.peers")
    peers = [Peer(*peer) for peer in gathered]
    channels, off = connect(engine, [peer.host for peer in peers]) if engine.size > 1 else ({}, None)
    return Peers(engine.rank, peers, channels), off


def connect(engine: Engine, hosts: Sequence[str]) -> tuple[dict[int, Channel], str | None]:
    """Return this rank's channels: to all ranks on rank 0, to rank 0 on the others. Without them, why there are none.

    A collective. hosts: host name of every rank.
    """
    key = bytes.fromhex(engine.broadcast_object(secrets.token_hex(32), "hangs.secret"))
    listeners: list[socket.socket] = []
    channels: dict[int, Channel] = {}
    addresses, error = None, None
    if engine.rank == 0:
        try:
            listeners, addresses = listen_for_ranks(hosts)
        except OSError as problem:
            error = f"rank 0 on {hosts[0]} cannot listen: {problem}"
    addresses = engine.broadcast_object(addresses, "hangs.where")
    if addresses is not None:
        try:
            if engine.rank == 0:
                channels = accept(listeners, key, engine.size)
            else:
                host, port = addresses[hosts[engine.rank]]
                channels = {0: say_hello((host, port), key, engine.rank)}
        except OSError as problem:
            error = f"rank {engine.rank} on {hosts[engine.rank]}: {problem}"
    for listener in listeners:
        listener.close()
    errors = [error for error in engine.all_gather_object(error, "hangs.errors") if error]
    if not errors:
        return channels, None
    for channel in channels.values():
        channel.socket.close()
    return {}, errors[0]


def listen_for_ranks(hosts: Sequence[str]) -> tuple[list[socket.socket], dict[str, tuple[str, int]]]:
    """Listen for connections. Return the sockets, and for each host the address to which its ranks connect.

    hosts: host name of every rank; the first is this host. Listens only on the interfaces used to reach these hosts; if all
    ranks are on this host, on loopback. Raises OSError.
    """
    remote = {}
    for host in sorted(set(hosts) - {hosts[0]}):
        try:
            remote[host] = own_address_towards(host)
        except socket.gaierror as error:
            remedy = "add it to /etc/hosts, or to the name server"
            raise OSError(f"no address for {host} ({error.strerror}): {remedy}") from None
    addresses = {hosts[0]: next(iter(remote.values()), "127.0.0.1")} | remote
    with contextlib.ExitStack() as failing:
        listeners: dict[str, socket.socket] = {}
        for address in dict.fromkeys(addresses.values()):
            # All ranks connect at once.
            # Connections beyond the backlog are dropped, and tried again after a second or more.
            listeners[address] = socket.create_server((address, 0), backlog=len(hosts) + 64)
            failing.callback(listeners[address].close)
        failing.pop_all()
    files.allow_open_files(len(hosts) + RANK_SPARE_FILES)
    ports = {address: listener.getsockname()[1] for address, listener in listeners.items()}
    return list(listeners.values()), {host: (address, ports[address]) for host, address in addresses.items()}


def accept(
    listeners: Iterable[socket.socket], key: bytes, size: int, seconds: float = FIRST_MESSAGE_SECONDS
) -> dict[int, Channel]:
    """Return a channel for each rank from 1 on, after mutual authentication by `key`. Nobody waits for a stranger.

    Raises TimeoutError with the missing ranks after `seconds`.
    """
    channels: dict[int, Channel] = {}
    places = threading.BoundedSemaphore(size + MOST_UNNAMED_CONNECTIONS)
    until = time.monotonic() + seconds

    def hear(connection: socket.socket) -> None:
        """Thread: make a channel of a connection, if a rank is at its other end."""
        try:
            rank = heard_hello(connection, key, min(until, time.monotonic() + ONE_HELLO_SECONDS))
            if rank in channels:  # it did not receive the answer, and has connected again
                channels[rank].socket.close()
            channels[rank] = Channel(connection)
        except OSError:
            connection.close()
        places.release()

    with selectors.DefaultSelector() as selector:
        for listener in listeners:
            listener.setblocking(False)  # who has called may be gone again
            selector.register(listener, selectors.EVENT_READ, listener)
        while len(channels) < size - 1 and time.monotonic() < until:
            for ready, _ in selector.select(ACCEPT_SECONDS):
                with contextlib.suppress(OSError):
                    connection, _ = ready.data.accept()
                    if places.acquire(blocking=False):
                        threading.Thread(target=hear, args=[connection], name="hello", daemon=True).start()
                    else:
                        connection.close()
    if missing := [str(rank) for rank in range(1, size) if rank not in channels]:
        for channel in channels.values():
            channel.socket.close()
        raise TimeoutError(f"rank {', '.join(missing)} did not connect within {seconds:.0f} s")
    return dict(channels)


def heard_hello(connection: socket.socket, key: bytes, until: float) -> int:
    """Return which rank says hello, after mutual authentication by `key`. Raises OSError, also at the time `until`."""
    connection.settimeout(ONE_HELLO_SECONDS)
    challenge = secrets.token_bytes(CHALLENGE)
    connection.sendall(challenge)
    answer = receive_exactly(connection, ANSWER, until)
    number, theirs, proof = answer[:4], answer[4 : 4 + CHALLENGE], answer[4 + CHALLENGE :]
    # "rank" and "hub" differ, so that nobody can send one side's proof back to it as its own.
    if not hmac.compare_digest(proof, hmac.digest(key, b"rank" + number + challenge + theirs, "sha256")):
        raise ConnectionError("does not know the job's secret")
    connection.sendall(hmac.digest(key, b"hub" + theirs + challenge, "sha256"))
    return int.from_bytes(number)


def say_hello(address: tuple[str, int], key: bytes, rank: int) -> Channel:
    """Connect to rank 0 with mutual authentication by `key`, and return the channel. Raises OSError."""
    until = time.monotonic() + FIRST_MESSAGE_SECONDS
    answered = 0
    while True:
        connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            connection.settimeout(max(0.1, until - time.monotonic()))
            connection.connect(tuple(address))
            challenge = receive_exactly(connection, CHALLENGE, until)
            mine, number = secrets.token_bytes(CHALLENGE), rank.to_bytes(4)
            connection.sendall(number + mine + hmac.digest(key, b"rank" + number + challenge + mine, "sha256"))
            answered += 1
            proof = receive_exactly(connection, PROOF, until)
            if not hmac.compare_digest(proof, hmac.digest(key, b"hub" + mine + challenge, "sha256")):
                raise ConnectionError(f"the process that listens at {address[0]}:{address[1]} is not rank 0")
            return Channel(connection)
        except OSError:
            connection.close()
            # Retry what the network has lost. If the answer is rejected repeatedly, the secret differs.
            if answered > 2 or time.monotonic() + 0.2 > until:
                raise
            time.sleep(0.2)


def receive_exactly(connection: socket.socket, count: int, until: float) -> bytes:
    """Return `count` bytes. Raises OSError if the peer disconnects, or at the time `until` (time.monotonic)."""
    data = b""
    while len(data) < count:
        # Set anew for each part: else a stranger that sends a byte now and then is heard for ever.
        connection.settimeout(max(0.001, until - time.monotonic()))
        if not (part := connection.recv(count - len(data))):
            raise ConnectionError("closed during the hello")
        data += part
    return data
