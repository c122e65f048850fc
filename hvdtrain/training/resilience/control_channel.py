"""Connections of our own between the ranks, beside the engine's: TCP, from each rank to rank 0.

Only ranks that know the job's secret, which travels over the engine, can connect. Messages are lines of JSON.
"""

import contextlib
import hmac
import json
import secrets
import socket
import threading
import time

HELLO_SECONDS = 20.0  # to connect, at the start
LONGEST_LINE = 2**20  # bytes


class Link:
    """One connection: dictionaries in both directions. Any thread may send; the watchdog's receives."""

    def __init__(self, connection: socket.socket):
        self.socket = connection
        self._unread = b""
        self._lock = threading.Lock()

    def send(self, **message: object) -> None:
        with self._lock, contextlib.suppress(OSError):  # a dead peer is noticed by `receive`
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[dict] | None:
        """Return what has arrived; None where the peer is gone."""
        try:
            data = self.socket.recv(65536)
        except OSError:
            data = b""
        *lines, self._unread = (self._unread + data).split(b"\n")
        if not data or len(self._unread) > LONGEST_LINE:
            return None
        return [json.loads(line) for line in lines]


def own_address_towards(host: str, own: str) -> str:
    """Return the address of the interface from which `host` is reached; connecting UDP sends nothing."""
    if host == own:
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return probe.getsockname()[0]


def accept(listener: socket.socket, key: bytes, size: int) -> dict[int, Link]:
    """Return a link for each rank from 1. A stranger's connection is closed, and takes two seconds at most."""
    links: dict[int, Link] = {}
    until = time.monotonic() + HELLO_SECONDS
    while len(links) < size - 1:
        listener.settimeout(max(0.01, until - time.monotonic()))
        connection, _ = listener.accept()  # TimeoutError is an OSError
        with contextlib.suppress(OSError):
            connection.settimeout(2.0)
            challenge = secrets.token_bytes(32)
            connection.sendall(challenge)
            answer = receive_exactly(connection, 4 + 32 + 32)
            rank, theirs, proof = answer[:4], answer[4:36], answer[36:]
            if hmac.compare_digest(proof, hmac.digest(key, b"rank" + rank + challenge + theirs, "sha256")):
                connection.sendall(hmac.digest(key, b"hub" + theirs + challenge, "sha256"))
                connection.settimeout(5.0)
                links[int.from_bytes(rank)] = Link(connection)
                continue
        connection.close()
    return links


def say_hello(address: tuple[str, int], key: bytes, rank: int) -> socket.socket:
    """Connect to rank 0; both prove that they know `key`. Raises OSError."""
    connection = socket.create_connection(address, timeout=HELLO_SECONDS)
    challenge, mine, number = receive_exactly(connection, 32), secrets.token_bytes(32), rank.to_bytes(4)
    connection.sendall(number + mine + hmac.digest(key, b"rank" + number + challenge + mine, "sha256"))
    if not hmac.compare_digest(receive_exactly(connection, 32), hmac.digest(key, b"hub" + mine + challenge, "sha256")):
        raise OSError(f"whoever listens at {address[0]}:{address[1]} is not rank 0")
    connection.settimeout(5.0)
    return connection


def receive_exactly(connection: socket.socket, count: int) -> bytes:
    """Return `count` bytes. Raises OSError where the peer leaves or falls silent before."""
    data = b""
    while len(data) < count:
        if not (part := connection.recv(count - len(data))):
            raise ConnectionError("closed during the hello")
        data += part
    return data
