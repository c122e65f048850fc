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
from hvdtrain.launching.rendezvous import ANSWER_SECONDS, Server

REQUEST = re.compile(rb"(GET|PUT|DELETE) ([^ \r\n]*) [^\r\n]*\r\n")
PATH = re.compile("/([^/]*)/([^/]*)")  # scope and key
LENGTH = re.compile(rb"\r\nContent-Length: *([0-9]{1,9})(?=\r)", re.IGNORECASE)
SELECTION = re.compile("addresses_of_([0-9]{1,5})_of_([0-9]{1,5})")  # launch/patches/27: a rank asks for its addresses
SELECTION_SECONDS = 5.0  # until a rank that waits for others is told that they have not all come yet
BACKLOG = 4096  # pending connections; the kernel limits it to net.core.somaxconn
MOST_HEAD, MOST_BODY = 2**12, 2**26  # bytes; a value has 136 bytes per other rank
MOST_CONNECTIONS = 256  # connections that have not named the token
STRANGER_SECONDS = 10.0  # in which they name it
SERVER_SPARE_FILES = 768  # open files besides; 1,024 are the usual limit


class Rendezvous:
    """A key-value server with the protocol of Horovod's rendezvous server, in one thread. Gloo exchanges addresses with it.

    Requests are PUT, GET and DELETE /scope/key, one per connection. Under its number, a rank stores the addresses of its
    sockets for each other rank, one after the other. GET /scope/addresses_of_RANK_of_SIZE is answered when all SIZE ranks
    have done so, with the addresses meant for RANK; or with nothing after SELECTION_SECONDS.

    Horovod's own server is Python's HTTPServer: it has no such answer, so that each rank asks for each other rank, and it
    starts a thread for each of the 3,000 requests of 24 ranks.

    The protocol has no authentication, and who can store addresses can misdirect the ranks. Therefore each path begins with
    a token of the job's secret (see `rendezvous.Server`). Every user of this host and of its network can connect: of those
    who have not named the token, the oldest give way to others. The server listens on one address only, stores only
    addresses, and does not use pickle.

    port: 0 for any free port. Raises OSError if `address` cannot be bound.
    """

    def __init__(self, address: str, port: int, secret: str):
        listener = socket.create_server((address, port), backlog=BACKLOG)
        files.allow_open_files(MOST_CONNECTIONS + SERVER_SPARE_FILES)
        self.port = int(listener.getsockname()[1])
        self.server = Server(address, self.port, token(secret, self.port))
        self._expected = self.server.prefix.encode()
        self._strangers: dict[asyncio.Task[None], None] = {}  # the oldest first
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

    def answer(self, method: str, scope: str, key: str, value: bytes = b"") -> bytes | None:
        """Execute a request. Return the body of the answer; None if there is no such key."""
        with self._lock:
            values = self._scopes.setdefault(scope, {})
            if method == "GET":
                return values.get(key)
            if method == "PUT":
                values[key] = value
                if complete := self._complete.pop((scope, len(values)), None):
                    complete.set()
            elif scope in self._sizes:
                finished = self._finished.setdefault(scope, set())
                finished.add(key)
                if len(finished) == self._sizes[scope]:
                    del self._scopes[scope], self._finished[scope]
            else:
                values.pop(key, None)
        return b""

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
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)  # a client that is gone
        server = await asyncio.start_server(self._hear, sock=listener, limit=MOST_HEAD, backlog=BACKLOG)
        await server.serve_forever()

    async def _hear(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the request of one connection. Invalid ones, and those that take long, get no answer."""
        task = asyncio.current_task()
        assert task is not None
        self._strangers[task] = None
        if len(self._strangers) > MOST_CONNECTIONS:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.cancel()
        refused = (OSError, EOFError, ValueError, asyncio.LimitOverrunError)
        try:
            with contextlib.suppress(*refused):
                async with asyncio.timeout(STRANGER_SECONDS):
                    head = await reader.readuntil(b"\r\n\r\n")
                    method, path = requested(head)
                    if not hmac.compare_digest(path[: len(self._expected)], self._expected):
                        await answer(writer, b"403 Forbidden")
                        writer.write_eof()
                        await reader.read(
                            MOST_HEAD
                        )  # closing a socket with something unread would take the answer away
                        return
                self._strangers.pop(task, None)
                async with asyncio.timeout(ANSWER_SECONDS):
                    body = await self._answer(method, path[len(self._expected) :].decode("latin-1"), head, reader)
                    await answer(writer, b"404 Not Found" if body is None else b"200 OK", body or b"")
        finally:
            self._strangers.pop(task, None)
            writer.close()

    async def _answer(self, method: bytes, path: str, head: bytes, reader: asyncio.StreamReader) -> bytes | None:
        """Execute a request. Return the body of the answer; None if there is no such key. Raises ValueError, EOFError."""
        place, length = PATH.fullmatch(path), LENGTH.search(head)
        if place is None or (length is not None and int(length[1]) > MOST_BODY):
            raise ValueError(path)
        scope, key = place.groups()
        value = await reader.readexactly(int(length[1]) if length else 0)
        if method == b"GET" and (asked := SELECTION.fullmatch(key)):
            return await self._selection(scope, int(asked[1]), int(asked[2]))
        return self.answer(method.decode(), scope, key, value)

    async def _selection(self, scope: str, rank: int, size: int) -> bytes:
        """Return the addresses meant for `rank` when all have come; nothing after SELECTION_SECONDS."""
        if len(self.get(scope)) < size:
            complete = self._complete.setdefault((scope, size), asyncio.Event())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(complete.wait(), SELECTION_SECONDS)
        values, parts = self.get(scope), []
        for other in (other for other in range(size) if other != rank):
            if (addresses := values.get(str(other))) is None:
                return b""
            length = len(addresses) // (size - 1)  # a rank stores none for itself
            first = (rank - (rank > other)) * length
            parts.append(addresses[first : first + length])
        return b"".join(parts)


def requested(head: bytes) -> tuple[bytes, bytes]:
    """Return method and path. Raises ValueError if they are none."""
    found = REQUEST.match(head)
    if found is None:
        raise ValueError(head)
    return found[1], found[2]


async def answer(writer: asyncio.StreamWriter, status: bytes, body: bytes = b"") -> None:
    """Send an answer. Raises OSError."""
    writer.write(b"HTTP/1.0 %s\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body))
    await writer.drain()
