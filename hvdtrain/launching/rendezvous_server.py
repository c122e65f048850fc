"""The server at which Gloo's ranks, and the starters of a job, learn of each other."""

import asyncio
import contextlib
import re
import socket
import threading
from collections import Counter

from hvdtrain.launching.rendezvous import SILENCE_SECONDS

SELECTION = re.compile("addresses_of_([0-9]{1,5})_of_([0-9]{1,5})")  # launch/patches/27: a rank asks for its addresses
SELECTION_SECONDS = 5.0  # until a rank that waits for others is told that they have not all come yet
BACKLOG = 4096  # pending connections; the kernel limits it to net.core.somaxconn
MOST_HEAD, MOST_BODY = 2**14, 2**26  # bytes; a value has 136 bytes per other rank
LENGTH = re.compile(rb"\r\nContent-Length: *([0-9]{1,9})(?=\r|$)", re.IGNORECASE)


class Rendezvous:
    """A key-value server with the protocol of Horovod's rendezvous server, in one thread. Gloo exchanges addresses with it.

    Requests are PUT, GET and DELETE /scope/key, one per connection. Under its number, a rank stores the addresses of its
    sockets for each other rank, one after the other. GET /scope/addresses_of_RANK_of_SIZE is answered when all SIZE ranks
    have done so, with the addresses meant for RANK; or with nothing after SELECTION_SECONDS.

    Horovod's own server is Python's HTTPServer: its listen queue holds 5 connections, so the ninth rank is dropped and
    retries seconds later, and it starts a thread for each of the 3,000 requests of 24 ranks. The protocol has no
    authentication: any process that can connect can misdirect the ranks of this job. Therefore the server listens on one
    address only, stores only addresses, and does not use pickle.

    port: 0 for any free port. Raises OSError if `address` cannot be bound.
    """

    def __init__(self, address: str, port: int):
        listener = socket.create_server((address, port), backlog=BACKLOG)
        self.port = int(listener.getsockname()[1])
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
        loop.set_exception_handler(lambda loop, context: None)  # a client that is gone, or the limit of open files
        server = await asyncio.start_server(self._hear, sock=listener, limit=MOST_HEAD, backlog=BACKLOG)
        await server.serve_forever()

    async def _hear(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the request of one connection. Invalid ones, and those that take long, get no answer."""
        expected = OSError, ValueError, EOFError, asyncio.LimitOverrunError
        with contextlib.closing(writer), contextlib.suppress(*expected):
            async with asyncio.timeout(SILENCE_SECONDS):
                method, scope, key, value = await read_request(reader)
            body: bytes | None
            if method == "GET" and (asked := SELECTION.fullmatch(key)):
                body = await self._selection(scope, int(asked[1]), int(asked[2]))
            else:
                body = self._answer(method, scope, key, value)
            status = b"404 Not Found" if body is None else b"200 OK"
            writer.transport.set_write_buffer_limits(0)  # `drain` waits for all of it
            writer.write(b"HTTP/1.0 %s\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body or b""), body or b""))
            async with asyncio.timeout(SILENCE_SECONDS):
                await writer.drain()

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


async def read_request(reader: asyncio.StreamReader) -> tuple[str, str, str, bytes]:
    """Return method, scope, key and value of a request. Raises ValueError if it is invalid, EOFError if it is incomplete."""
    head = await reader.readuntil(b"\r\n\r\n")
    method, path, _ = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ")
    _, scope, key = path.split("/")
    length = LENGTH.search(head)
    wanted = int(length[1]) if length else 0
    if method not in ("GET", "PUT", "DELETE") or wanted > MOST_BODY:
        raise ValueError(method)
    return method, scope, key, await reader.readexactly(wanted)
