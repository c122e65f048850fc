"""TCP connections from each rank to rank 0, separate from those of the engine.

Only ranks that know the job's secret, which is broadcast over the engine, can connect. Messages: messages.py.
"""

import contextlib
import hmac
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Iterable, Sequence

from hvdtrain.engines import files
from hvdtrain.guards.messages import Message, decode, encode
from hvdtrain.launching.rendezvous import own_address_towards

HELLO_SECONDS = 20.0  # for all ranks to connect, at the start
ONE_HELLO_SECONDS = 5.0  # for one connection to authenticate; after a failure, a rank tries again
LOOK_SECONDS = 0.005  # between two looks whether all ranks have connected
MOST_STRANGERS = 128  # connections besides those of ranks that have not authenticated
SPARE_FILES = 832  # open files besides the connections of ranks
SEND_SECONDS = 5.0  # time limit to send a message
LONGEST_LINE = 2**20  # bytes
CHALLENGE = PROOF = 32  # bytes
ANSWER = 4 + CHALLENGE + PROOF


class Channel:
    """One connection, which transfers messages in both directions. Any thread may send; only the watchdog receives."""

    def __init__(self, connection: socket.socket):
        connection.settimeout(SEND_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connection
        self.error: OSError | None = None  # why nothing more can be received; None also after a regular end
        self.odd: ValueError | None = None  # the first line that was no message
        self._unread = b""
        self._lock = threading.Lock()
        self._sends = True

    def send(self, message: Message) -> None:
        """Send a message. Errors are ignored: `receive` detects a dead peer."""
        with self._lock:
            if not self._sends:
                return
            try:
                self.socket.sendall(encode(message))
            except OSError:  # send nothing after an incomplete line
                self._sends = False

    def receive(self) -> list[Message] | None:
        """Return the messages received; None if the peer is gone. What is no message is left out, and noted in `odd`."""
        try:
            data = self.socket.recv(65536)
        except OSError as error:
            data, self.error = b"", error
        *lines, self._unread = (self._unread + data).split(b"\n")
        if not data or len(self._unread) > LONGEST_LINE:
            return None
        messages = []
        for line in lines:
            try:
                messages.append(decode(line))
            except ValueError as error:
                self.odd = self.odd or error
        return messages


def listen(hosts: Sequence[str]) -> tuple[list[socket.socket], dict[str, tuple[str, int]]]:
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
    listeners: dict[str, socket.socket] = {}
    try:
        for address in addresses.values():
            if address not in listeners:
                listeners[address] = socket.create_server((address, 0), backlog=len(hosts) + 64)
    except OSError:
        for listener in listeners.values():
            listener.close()
        raise
    files.allow_open_files(len(hosts) + SPARE_FILES)
    return list(listeners.values()), {
        host: (address, listeners[address].getsockname()[1]) for host, address in addresses.items()
    }


def hear_hello(connection: socket.socket, key: bytes) -> int:
    """Return the rank at the other end of a new connection, after mutual authentication by `key`. Raises OSError."""
    until = time.monotonic() + ONE_HELLO_SECONDS
    challenge = secrets.token_bytes(CHALLENGE)
    connection.settimeout(ONE_HELLO_SECONDS)
    connection.sendall(challenge)
    answer = receive_exactly(connection, ANSWER, until)
    number, theirs, proof = answer[:4], answer[4 : 4 + CHALLENGE], answer[4 + CHALLENGE :]
    if not hmac.compare_digest(proof, hmac.digest(key, b"rank" + number + challenge + theirs, "sha256")):
        raise ConnectionError("does not know the job's secret")
    connection.sendall(hmac.digest(key, b"hub" + theirs + challenge, "sha256"))
    return int.from_bytes(number)


def accept(
    listeners: Iterable[socket.socket], key: bytes, size: int, seconds: float = HELLO_SECONDS
) -> dict[int, Channel]:
    """Return a channel for each rank from 1 on. Each connection has a thread, so strangers cannot delay the ranks.

    Raises TimeoutError with the missing ranks after `seconds`.
    """
    channels: dict[int, Channel] = {}
    unknown: dict[socket.socket, None] = {}  # connections that have not authenticated, the oldest first
    until = time.monotonic() + seconds

    def meet(connection: socket.socket) -> None:
        try:
            rank = hear_hello(connection, key)
        except OSError:
            connection.close()
            return
        finally:
            unknown.pop(connection, None)
        if rank in channels:  # it did not receive the answer, and has connected again
            channels[rank].socket.close()
        channels[rank] = Channel(connection)

    with selectors.DefaultSelector() as selector:
        for listener in listeners:
            listener.setblocking(False)  # who has called may be gone again
            selector.register(listener, selectors.EVENT_READ)
        while len(channels) < size - 1:
            if time.monotonic() > until:
                missing = [str(rank) for rank in range(1, size) if rank not in channels]
                for channel in channels.values():
                    channel.socket.close()
                raise TimeoutError(f"rank {', '.join(missing)} did not connect within {seconds:.0f} s")
            for ready, _ in selector.select(LOOK_SECONDS):
                assert isinstance(ready.fileobj, socket.socket)
                with contextlib.suppress(OSError):
                    unknown[connection := ready.fileobj.accept()[0]] = None
                    try:
                        threading.Thread(target=meet, args=[connection], daemon=True).start()
                    except RuntimeError:  # this user may have no more threads now
                        unknown.pop(connection)
                        connection.close()
            for oldest in list(unknown)[: max(0, len(unknown) - size - MOST_STRANGERS)]:
                unknown.pop(oldest, None)
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # which ends its thread
    return channels


def say_hello(address: tuple[str, int], key: bytes, rank: int) -> Channel:
    """Connect to rank 0 with mutual authentication by `key`, and return the channel. Raises OSError."""
    until = time.monotonic() + HELLO_SECONDS
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
        connection.settimeout(max(0.001, until - time.monotonic()))
        if not (part := connection.recv(count - len(data))):
            raise ConnectionError("closed during the hello")
        data += part
    return data
