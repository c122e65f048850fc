"""The server at which Gloo's ranks, and the starters of a job, learn of each other."""

import asyncio
import contextlib
import hmac
import re
import socket
import threading
from collections import Counter

from hvdtrain.engines import files
from hvdtrain.launching.job_secret import token
from hvdtrain.launching.rendezvous import SILENCE_SECONDS, Server

SELECTION = re.compile("addresses_of_([0-9]{1,5})_of_([0-9]{1,5})")  # launch/patches/27: a rank asks for its addresses
SELECTION_SECONDS = 5.0  # until a rank that waits for others is told that they have not all come yet
BACKLOG = 4096  # pending connections; the kernel limits it to net.core.somaxconn
MOST_HEAD, MOST_BODY = 2**12, 2**26  # bytes; a value has 136 bytes per other rank
MOST_STRANGERS = 256  # connections
STRANGER_SECONDS = 10.0  # for a request to say that it is one of the job
SPARE_FILES = 768  # open files besides; 1,024 are the usual limit
RETRY_SECONDS = 0.05  # after accept has failed
END_OF_HEAD = b"\r\n\r\n"
HEAD = b"HTTP/1.0 %s\r\nContent-Length: %d\r\n\r\n"
LENGTH = re.compile(rb"\r\nContent-Length: *([0-9]{1,9})(?=\r|$)", re.IGNORECASE)


class Rendezvous:
    """A key-value server with the protocol of Horovod's rendezvous server, in one thread. Gloo exchanges addresses with it.

    Requests are PUT, GET and DELETE /scope/key, one per connection. Under its number, a rank stores the addresses of its
    sockets for each other rank, one after the other. GET /scope/addresses_of_RANK_of_SIZE is answered when all SIZE ranks
    have done so, with the addresses meant for RANK; or with nothing after SELECTION_SECONDS.

    Horovod's own server is Python's HTTPServer: its listen queue holds 5 connections, so the ninth rank is dropped and
    retries seconds later, and it starts a thread for each of the 3,000 requests of 24 ranks.

    The protocol has no authentication, and who can store addresses can misdirect the ranks. Therefore each path begins with
    a token of the job's secret (see `rendezvous.Server`). Every user of this host and of its network can connect: of those
    who have not named the token, there are at most MOST_STRANGERS at once; they may send a head, within STRANGER_SECONDS.
    The server listens on one address only, stores only addresses, and does not use pickle.

    port: 0 for any free port. Raises OSError if `address` cannot be bound.
    """

    def __init__(self, address: str, port: int, secret: str):
        listener = socket.create_server((address, port), backlog=BACKLOG)
        listener.setblocking(False)
        files.allow_open_files(MOST_STRANGERS + SPARE_FILES)
        self.port = int(listener.getsockname()[1])
        self.server = Server(address, self.port, token(secret, self.port))
        self._expected = self.server.prefix.encode()
        self._strangers: dict[asyncio.Task[None], None] = {}  # the oldest first
        self._known: set[asyncio.Task[None]] = set()  # those that have named the token
        self._lock = threading.Lock()
        self._scopes: dict[str, dict[str, bytes]] = {}
        self._sizes: dict[str, int] = {}  # scope -> number of ranks after whose DELETE the scope is removed
        self._finished: dict[str, set[str]] = {}
        self._complete: dict[tuple[str, int], asyncio.Event] = {}  # set when the scope has this number of values
        threading.Thread(target=asyncio.run, args=[self._serve(listener)], name="rendezvous", daemon=True).start()

    def get(self, scope: str) -> dict[str, bytes]:
        """Return all values under /`scope`/, by key."""
        with self._lock:
            return dict(self._scopes.get(scope, {}))

    def put(self, scope: str, key: str, value: bytes) -> None:
        """Store `value` under /`scope`/`key`."""
        with self._lock:
            self._scopes.setdefault(scope, {})[key] = value

    def expect(self, hosts: list[str]) -> None:
        """Remove each scope once all its ranks are done with it, so that Horovod can be initialized again.

        hosts: the host name of every rank.
        """
        on_host = Counter(hosts)
        sizes = {"global": len(hosts)} | {f"local_{host}": count for host, count in on_host.items()}
        for local_rank in range(max(on_host.values())):
            sizes[f"cross_{local_rank}"] = sum(count > local_rank for count in on_host.values())
        with self._lock:
            self._sizes.update(sizes)

    # ---- the thread

    async def _serve(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda loop, context: None)  # a client that is gone
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError:  # a client that is gone, or the limit of open files
                await self._turn_away(len(self._strangers) // 2)
                await asyncio.sleep(RETRY_SECONDS)
                continue
            task = loop.create_task(self._hear(connection))
            self._strangers[task] = None
            await asyncio.sleep(0)  # usually the request is there, and names the token
            await self._turn_away(MOST_STRANGERS)

    async def _turn_away(self, most: int) -> None:
        """Disconnect the oldest strangers until there are `most`."""
        while len(self._strangers) > most:
            oldest = next(iter(self._strangers))
            oldest.cancel()
            await asyncio.wait([oldest])
            self._strangers.pop(oldest, None)

    async def _hear(self, connection: socket.socket) -> None:
        """Answer the request of one connection. Invalid ones, and those that take long, get no answer."""
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None
        try:
            with connection, contextlib.suppress(OSError, ValueError, EOFError):
                async with asyncio.timeout(STRANGER_SECONDS):
                    head, value = await read_head(connection)
                    method, path = parse_head(head)
                    if not hmac.compare_digest(path[: len(self._expected)], self._expected):
                        await refuse(connection)
                        return
                del self._strangers[task]
                self._known.add(task)
                async with asyncio.timeout(SILENCE_SECONDS):
                    scope, key = scope_and_key(path[len(self._expected) :])
                    await read_value(connection, head, value)
                body: bytes | None
                if method == "GET" and (asked := SELECTION.fullmatch(key)):
                    body = await self._selection(scope, int(asked[1]), int(asked[2]))
                else:
                    body = self._answer(method, scope, key, bytes(value))
                status = b"404 Not Found" if body is None else b"200 OK"
                async with asyncio.timeout(SILENCE_SECONDS):
                    await loop.sock_sendall(connection, HEAD % (status, len(body or b"")) + (body or b""))
        finally:
            self._strangers.pop(task, None)
            self._known.discard(task)

    def _answer(self, method: str, scope: str, key: str, value: bytes) -> bytes | None:
        """Execute a request. Return the body of the answer; None if there is no such key."""
        with self._lock:
            if method == "GET":
                return self._scopes.get(scope, {}).get(key)
            if method == "PUT":
                values = self._scopes.setdefault(scope, {})
                values[key] = value
                if complete := self._complete.pop((scope, len(values)), None):
                    complete.set()
            elif scope in self._sizes:
                finished = self._finished.setdefault(scope, set())
                finished.add(key)
                if len(finished) == self._sizes[scope]:
                    self._scopes.pop(scope, None)
                    del self._finished[scope]
            else:
                self._scopes.get(scope, {}).pop(key, None)
        return b""

    async def _selection(self, scope: str, rank: int, size: int) -> bytes:
        """Return the addresses meant for `rank` when all have come; nothing after SELECTION_SECONDS."""
        if (found := self._selected(scope, rank, size)) is None:
            complete = self._complete.setdefault((scope, size), asyncio.Event())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(complete.wait(), SELECTION_SECONDS)
            found = self._selected(scope, rank, size)
        return found or b""

    def _selected(self, scope: str, rank: int, size: int) -> bytes | None:
        """Return the addresses meant for `rank`, of all other ranks in their order; None if one of them has not come."""
        with self._lock:
            values = self._scopes.get(scope, {})
            if len(values) < size:
                return None
            found = [values.get(str(other)) for other in range(size) if other != rank]
            if None in found or size < 2:
                return None
        parts = []
        for number, value in enumerate(found):
            assert value is not None
            other = number + (number >= rank)
            length = len(value) // (size - 1)  # a rank stores none for itself
            first = (rank - (rank > other)) * length
            parts.append(value[first : first + length])
        return b"".join(parts)


async def read_head(connection: socket.socket) -> tuple[bytes, bytearray]:
    """Return the head of a request, and what has come after it. Raises ValueError if it is too long, EOFError, OSError."""
    loop, data = asyncio.get_running_loop(), bytearray()
    while (end := data.find(END_OF_HEAD)) < 0:
        if len(data) > MOST_HEAD:
            raise ValueError("no end of the head")
        if not (part := await loop.sock_recv(connection, MOST_HEAD)):
            raise EOFError
        data += part
    end += len(END_OF_HEAD)
    return bytes(data[:end]), data[end:]


def parse_head(head: bytes) -> tuple[str, bytes]:
    """Return method and path. Raises ValueError if they are none."""
    method, path, _ = head.split(b"\r\n", 1)[0].split(b" ")
    if method not in (b"GET", b"PUT", b"DELETE"):
        raise ValueError(method)
    return method.decode(), path


def scope_and_key(path: bytes) -> tuple[str, str]:
    """Return the scope and the key in /SCOPE/KEY. Raises ValueError."""
    nothing, scope, key = path.decode("latin-1").split("/")
    if nothing:
        raise ValueError(path)
    return scope, key


async def read_value(connection: socket.socket, head: bytes, value: bytearray) -> None:
    """Complete the value of a request. Raises ValueError if it is too long, EOFError if it is incomplete, OSError."""
    found = LENGTH.search(head)
    wanted = int(found[1]) if found else 0
    if wanted > MOST_BODY:
        raise ValueError(wanted)
    while len(value) < wanted:
        if not (part := await asyncio.get_running_loop().sock_recv(connection, 2**18)):
            raise EOFError
        value += part
    del value[wanted:]


async def refuse(connection: socket.socket) -> None:
    """Answer a request without the token. Raises OSError."""
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(connection, HEAD % (b"403 Forbidden", 0))
    connection.shutdown(socket.SHUT_WR)
    for _ in range(16):  # closing a socket with something unread would take the answer away
        if not await loop.sock_recv(connection, 2**14):
            return
