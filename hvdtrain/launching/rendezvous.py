"""Rendezvous of a job's ranks: the address of rank 0, and a server for Gloo."""

import contextlib
import re
import selectors
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Mapping

from hvdtrain.engines.errors import UserError

SELECTION = re.compile("addresses_of_([0-9]{1,5})_of_([0-9]{1,5})")  # launch/patches/27: a rank asks for its addresses
SELECTION_SECONDS = 5.0  # until a rank that waits for others is told that they have not all come yet
BACKLOG = 4096  # pending connections; the kernel limits it to net.core.somaxconn
SILENCE_SECONDS = 30.0  # time limit of one request
MOST_HEAD, MOST_BODY = 2**14, 2**26  # bytes; a value has 136 bytes per other rank
LENGTH = re.compile(rb"\r\nContent-Length: *([0-9]{1,9})(?=\r|$)", re.IGNORECASE)


def own_address_towards(host: str) -> str:
    """Return the local IPv4 address used to reach `host`. Connecting a UDP socket sends nothing. Raises OSError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return str(probe.getsockname()[0])


def meeting_point(environment: Mapping[str, str], launcher: str) -> tuple[str, int]:
    """Return the host and port of rank 0: from MASTER_ADDR and MASTER_PORT, from Kubeflow's PET_MASTER_ADDR and
    PET_MASTER_PORT, or from the Slurm job. Raises UserError."""
    host = environment.get("MASTER_ADDR") or environment.get("PET_MASTER_ADDR")
    port = environment.get("MASTER_PORT") or environment.get("PET_MASTER_PORT")
    if host and port:
        if not re.fullmatch("[0-9]{1,5}", port) or not 0 < int(port) < 65536:
            raise UserError(f"MASTER_PORT={port[:40]!r} is not a port: set a number from 1024 to 65535")
        return host, int(port)
    if launcher == "Slurm":
        return slurm_meeting_point(environment)
    raise UserError(
        f"{launcher} does not tell the ranks where to meet: set MASTER_ADDR and MASTER_PORT, or use torchrun"
    )


def horovods_server(environment: Mapping[str, str]) -> tuple[str, int] | None:
    """Return host and port of the rendezvous server of `horovodrun --gloo` or hvdtrain.starter; None if there is none."""
    address = environment.get("HOROVOD_GLOO_RENDEZVOUS_ADDR")
    port = environment.get("HOROVOD_GLOO_RENDEZVOUS_PORT", "")
    return (address, int(port)) if address and port.isdecimal() else None


def put(server: tuple[str, int], scope: str, key: str, value: bytes) -> None:
    """Store `value` under /`scope`/`key` on a rendezvous server. Raises OSError."""
    request(server, "PUT", f"/{scope}/{key}", value)


def wait_for(server: tuple[str, int], scope: str, key: str, seconds: float) -> bytes:
    """Wait until there is a value under /`scope`/`key`, and return it. Raises OSError; TimeoutError after `seconds`."""
    until = time.monotonic() + seconds
    while (value := request(server, "GET", f"/{scope}/{key}")) is None:
        if time.monotonic() > until:
            raise TimeoutError(f"rank 0 did not connect within {seconds:.0f} s")
        time.sleep(0.05)
    return value


def request(
    server: tuple[str, int], method: str, path: str, body: bytes = b"", seconds: float = SILENCE_SECONDS
) -> bytes | None:
    """Return the body of the answer; None if there is no such key. Raises OSError. seconds: limit of each wait for it."""
    import http.client  # rarely needed, and not imported by torch

    connection = http.client.HTTPConnection(*server, timeout=seconds)
    try:
        connection.request(method, path, body)
        answer = connection.getresponse()
        return answer.read() if answer.status == 200 else None
    except http.client.HTTPException as error:
        raise OSError(f"{server[0]}:{server[1]} is not a rendezvous server ({error!r})") from error
    finally:
        connection.close()


def slurm_meeting_point(environment: Mapping[str, str]) -> tuple[str, int]:
    """Return the first host of this job step, and a port derived from the job ID. Raises UserError."""
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "localhost")
    number = environment.get("SLURM_JOB_ID", "0")
    if not re.fullmatch("[0-9]{1,20}", number):
        raise UserError(f"SLURM_JOB_ID={number[:40]!r} is not a number: set MASTER_ADDR and MASTER_PORT")
    with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError):
        nodes = subprocess.run(
            ["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=True, timeout=10
        ).stdout
    if not nodes.split():
        raise UserError("Slurm names no host (SLURM_JOB_NODELIST is empty): set MASTER_ADDR and MASTER_PORT")
    return nodes.split()[0], 20_000 + int(number) % 10_000


class Rendezvous:
    """A key-value server with the protocol of Horovod's rendezvous server, in one thread. Gloo exchanges addresses with it.

    Requests are PUT, GET and DELETE /scope/key, one per connection. Under its number, a rank stores the addresses of its
    sockets for each other rank, one after the other. GET /scope/addresses_of_RANK_of_SIZE is answered when all SIZE ranks
    have done so, with the addresses meant for RANK; or with nothing after SELECTION_SECONDS.

    Horovod's own server is Python's HTTPServer: its listen queue holds 5 connections, so the ninth rank is dropped and
    retries seconds later, and it starts a thread for each of the 3,000 requests of 24 ranks. The protocol has no
    authentication: any process that can connect can misdirect the ranks of
    this job. Therefore the server listens on one address only, stores only addresses, and does not use pickle.

    port: 0 for any free port. Raises OSError if `address` cannot be bound.
    """

    def __init__(self, address: str, port: int):
        self._listener = socket.create_server((address, port), backlog=BACKLOG)
        self._listener.setblocking(False)
        self.port = int(self._listener.getsockname()[1])
        self._lock = threading.Lock()
        self._scopes: dict[str, dict[str, bytes]] = {}
        self._sizes: dict[str, int] = {}  # scope -> number of ranks after whose DELETE the scope is removed
        self._finished: dict[str, set[str]] = {}
        self._waiting: dict[str, list[Caller]] = {}  # scope -> ranks that wait for the addresses of others
        threading.Thread(target=self._serve, name="rendezvous", daemon=True).start()

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

    def _answer(self, method: str, scope: str, key: str, value: bytes) -> bytes | None:
        """Execute a request. Return the body of the answer; None if there is no such key."""
        with self._lock:
            if method == "GET":
                return self._scopes.get(scope, {}).get(key)
            if method == "PUT":
                self._scopes.setdefault(scope, {})[key] = value
            elif scope in self._sizes:
                finished = self._finished.setdefault(scope, set())
                finished.add(key)
                if len(finished) == self._sizes[scope]:
                    self._scopes.pop(scope, None)
                    del self._finished[scope]
            else:
                self._scopes.get(scope, {}).pop(key, None)
        return b""

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

    # ---- the thread

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            swept = time.monotonic()
            while True:
                for ready, _ in selector.select(1.0 if self._waiting else SILENCE_SECONDS):
                    if ready.data is None:
                        self._accept(selector)
                    else:
                        self._go_on(ready.data, selector)
                for scope in list(self._waiting):
                    self._answer_waiting(scope, selector)
                now = time.monotonic()
                if now - swept > SILENCE_SECONDS:
                    swept = now
                    for caller in [key.data for key in selector.get_map().values() if key.data is not None]:
                        if now > caller.until:
                            self._close(caller, selector)

    def _answer_waiting(self, scope: str, selector: selectors.BaseSelector) -> None:
        """Answer the ranks that wait for addresses in `scope`, if these are complete, or the wait has been long."""
        now = time.monotonic()
        for caller in list(self._waiting[scope]):
            body = self._selected(scope, caller.rank, caller.size)
            if body is None and now < caller.waits_until:
                break  # those after it have waited less, and wait for the same ranks
            self._waiting[scope].remove(caller)
            caller.reply(body or b"")
            self._send(caller, selector)
        if not self._waiting[scope]:
            del self._waiting[scope]

    def _accept(self, selector: selectors.BaseSelector) -> None:
        with contextlib.suppress(OSError):  # the client is gone, or the limit of open files is reached
            while True:
                connection, _ = self._listener.accept()
                connection.setblocking(False)
                caller = Caller(connection)
                selector.register(connection, selectors.EVENT_READ, caller)
                self._go_on(caller, selector)

    def _go_on(self, caller: "Caller", selector: selectors.BaseSelector) -> None:
        """Read or write as much as possible without blocking."""
        try:
            if caller.answer is None:
                asked = caller.read()
                if asked is None:
                    return
                method, scope, key, value = asked
                if method == "GET" and (selection := SELECTION.fullmatch(key)):
                    caller.wait_for(int(selection[1]), int(selection[2]))
                    self._waiting.setdefault(scope, []).append(caller)
                    return
                caller.reply(self._answer(method, scope, key, value))
        except BlockingIOError:
            return
        except (OSError, ValueError):  # the client is gone, or the request is invalid
            self._close(caller, selector)
            return
        self._send(caller, selector)

    def _send(self, caller: "Caller", selector: selectors.BaseSelector) -> None:
        """Send as much of the answer as possible without blocking. Close the connection after the last part."""
        assert caller.answer is not None
        try:
            with contextlib.suppress(BlockingIOError):
                caller.answer = caller.answer[caller.socket.send(caller.answer) :]
            if caller.answer:
                selector.modify(caller.socket, selectors.EVENT_WRITE, caller)
                return
        except OSError:  # the client is gone
            pass
        self._close(caller, selector)

    def _close(self, caller: "Caller", selector: selectors.BaseSelector) -> None:
        """Unregister the connection and close it."""
        for waiting in self._waiting.values():
            if caller in waiting:
                waiting.remove(caller)
        selector.unregister(caller.socket)
        caller.socket.close()


class Caller:
    """One connection, with one request."""

    __slots__ = ("answer", "rank", "received", "size", "socket", "until", "waits_until")

    def __init__(self, connection: socket.socket):
        self.socket = connection
        self.received = b""
        self.answer: memoryview | None = None  # not yet sent; None: not known yet
        self.until = time.monotonic() + SILENCE_SECONDS
        self.rank, self.size, self.waits_until = 0, 0, 0.0  # size > 0: it waits for the addresses meant for `rank`

    def wait_for(self, rank: int, size: int) -> None:
        """Note that this rank waits for the addresses of `size` ranks."""
        self.rank, self.size = rank, size
        self.waits_until = time.monotonic() + SELECTION_SECONDS

    def reply(self, body: bytes | None) -> None:
        """Set the answer. None: there is no such key."""
        status = b"404 Not Found" if body is None else b"200 OK"
        body = body or b""
        self.answer = memoryview(b"HTTP/1.0 %s\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body))

    def read(self) -> tuple[str, str, str, bytes] | None:
        """Return method, scope, key and value of the request; None if it is not complete yet.

        Raises BlockingIOError if no data is available, another OSError if the client is gone, ValueError if the request is
        invalid.
        """
        part = self.socket.recv(65536)
        if self.size:
            if not part:
                raise ConnectionError("closed while it waited")
            return None
        self.received += part
        head, end, body = self.received.partition(b"\r\n\r\n")
        length = LENGTH.search(head) if end else None
        wanted = int(length[1]) if length else 0
        if len(head) > MOST_HEAD or wanted > MOST_BODY:
            raise ValueError("too long")
        if not end or len(body) < wanted:
            if not part:
                raise ConnectionError("closed within a request")
            return None
        method, path, _ = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ")
        _, scope, key = path.split("/")
        if method not in ("GET", "PUT", "DELETE"):
            raise ValueError(method)
        return method, scope, key, body[:wanted]
