"""Where the ranks of a job meet when no launcher brings them together."""

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

BACKLOG = 4096  # connections that wait to be accepted; the kernel cuts it to net.core.somaxconn
SILENCE_SECONDS = 30.0  # for one request
MOST_HEAD, MOST_BODY = 2**14, 2**26  # bytes; a value is 136 bytes for each other rank
LENGTH = re.compile(rb"\r\nContent-Length: *([0-9]{1,9})(?=\r|$)", re.IGNORECASE)


def own_address_towards(host: str) -> str:
    """Return this host's IPv4 address on the way to `host`; connecting UDP sends nothing. Raises OSError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return str(probe.getsockname()[0])


def meeting_point(environment: Mapping[str, str], launcher: str) -> tuple[str, int]:
    """Return the host and port of rank 0: as told by MASTER_ADDR and MASTER_PORT, or as follows from the Slurm job."""
    host, port = environment.get("MASTER_ADDR"), environment.get("MASTER_PORT")
    if host and port:
        if not re.fullmatch("[0-9]{1,5}", port) or not 0 < int(port) < 65536:
            raise UserError(f"MASTER_PORT={port[:40]!r} is not a port: set a number from 1024 to 65535")
        return host, int(port)
    if launcher == "Slurm":
        return slurm_meeting_point(environment)
    raise UserError(f"{launcher} does not say where ranks meet: set MASTER_ADDR and MASTER_PORT, or use torchrun")


def horovods_server(environment: Mapping[str, str]) -> tuple[str, int] | None:
    """Return the address of the rendezvous server that `horovodrun --gloo` or hvdtrain.starter runs, if any does."""
    address = environment.get("HOROVOD_GLOO_RENDEZVOUS_ADDR")
    port = environment.get("HOROVOD_GLOO_RENDEZVOUS_PORT", "")
    return (address, int(port)) if address and port.isdecimal() else None


def put(server: tuple[str, int], scope: str, key: str, value: bytes) -> None:
    """Store `value` under /`scope`/`key` at a rendezvous server. Raises OSError."""
    _request(server, "PUT", f"/{scope}/{key}", value)


def wait_for(server: tuple[str, int], scope: str, key: str, seconds: float) -> bytes:
    """Return what was stored under /`scope`/`key`, as soon as it is there. Raises OSError, after `seconds` TimeoutError."""
    until = time.monotonic() + seconds
    while (value := _request(server, "GET", f"/{scope}/{key}")) is None:
        if time.monotonic() > until:
            raise TimeoutError(f"rank 0 did not connect within {seconds:.0f} s")
        time.sleep(0.05)
    return value


def _request(server: tuple[str, int], method: str, path: str, body: bytes = b"") -> bytes | None:
    """Return the answer's body; None: there is no such key. Raises OSError."""
    import http.client  # of use to few, and not imported by torch

    connection = http.client.HTTPConnection(*server, timeout=SILENCE_SECONDS)
    try:
        connection.request(method, path, body)
        answer = connection.getresponse()
        return answer.read() if answer.status == 200 else None
    except http.client.HTTPException as error:
        raise OSError(f"{server[0]}:{server[1]} is no rendezvous server ({error!r})") from error
    finally:
        connection.close()


def slurm_meeting_point(environment: Mapping[str, str]) -> tuple[str, int]:
    """Return the first host of this job step and a port that follows from the job's number."""
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
    """Where Gloo's ranks learn each other's sockets: as Horovod's own rendezvous server, in one thread of this process.

    Keys and values in scopes: PUT, GET and DELETE /scope/key, one request a connection. Horovod's own is Python's
    HTTPServer, whose listen queue holds 5, so that the ninth rank is dropped and comes again seconds later; and it starts a
    thread for each of the 3,000 requests of 24 ranks. The protocol has no authentication: any process that reaches it can
    misdirect the ranks of this job. So it listens on one address only, holds nothing but addresses, and unpickles nothing.

    port: 0 takes any that is free. Raises OSError where `address` cannot be bound.
    """

    def __init__(self, address: str, port: int):
        self._listener = socket.create_server((address, port), backlog=BACKLOG)
        self._listener.setblocking(False)
        self.port = int(self._listener.getsockname()[1])
        self._lock = threading.Lock()
        self._scopes: dict[str, dict[str, bytes]] = {}
        self._sizes: dict[str, int] = {}  # of scopes that are forgotten once so many have finished
        self._finished: dict[str, set[str]] = {}
        threading.Thread(target=self._serve, name="rendezvous", daemon=True).start()

    def get(self, scope: str) -> dict[str, bytes]:
        """Return what was put so far under /`scope`/, by key."""
        with self._lock:
            return dict(self._scopes.get(scope, {}))

    def put(self, scope: str, key: str, value: bytes) -> None:
        with self._lock:
            self._scopes.setdefault(scope, {})[key] = value

    def expect(self, hosts: list[str]) -> None:
        """Given the host of each rank, forget a scope once all its ranks have met: Horovod can then be started again."""
        on_host = Counter(hosts)
        sizes = {"global": len(hosts)} | {f"local_{host}": count for host, count in on_host.items()}
        for local_rank in range(max(on_host.values())):
            sizes[f"cross_{local_rank}"] = sum(count > local_rank for count in on_host.values())
        with self._lock:
            self._sizes.update(sizes)

    def _answer(self, method: str, scope: str, key: str, value: bytes) -> bytes | None:
        """Do what a request asks for, and return the answer's body; None: there is no such key."""
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

    # ---- the thread

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            swept = time.monotonic()
            while True:
                for ready, _ in selector.select(SILENCE_SECONDS):
                    if ready.data is None:
                        self._accept(selector)
                    else:
                        self._go_on(ready.data, selector)
                now = time.monotonic()
                if now - swept > SILENCE_SECONDS:
                    swept = now
                    for caller in [key.data for key in selector.get_map().values() if key.data is not None]:
                        if now > caller.until:
                            close(caller, selector)

    def _accept(self, selector: selectors.BaseSelector) -> None:
        with contextlib.suppress(OSError):  # the client has gone; out of open files: the others wait in the queue
            while True:
                connection, _ = self._listener.accept()
                connection.setblocking(False)
                caller = Caller(connection)
                selector.register(connection, selectors.EVENT_READ, caller)
                self._go_on(caller, selector)

    def _go_on(self, caller: "Caller", selector: selectors.BaseSelector) -> None:
        """Read or write as much as can be without waiting."""
        try:
            if not caller.answer:
                asked = caller.read()
                if asked is None:
                    return
                body = self._answer(*asked)
                status = b"404 Not Found" if body is None else b"200 OK"
                body = body or b""
                caller.answer = memoryview(b"HTTP/1.0 %s\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body))
            caller.answer = caller.answer[caller.socket.send(caller.answer) :]
            if caller.answer:
                selector.modify(caller.socket, selectors.EVENT_WRITE, caller)
                return
        except BlockingIOError:
            return
        except (OSError, ValueError):  # gone, or no request
            pass
        close(caller, selector)


class Caller:
    """One connection, which asks once."""

    __slots__ = ("answer", "received", "socket", "until")

    def __init__(self, connection: socket.socket):
        self.socket = connection
        self.received = b""
        self.answer: memoryview | None = None
        self.until = time.monotonic() + SILENCE_SECONDS

    def read(self) -> tuple[str, str, str, bytes] | None:
        """Return the request's method, scope, key and value; None where more is to come.

        Raises BlockingIOError where nothing has come, another OSError where the caller is gone, ValueError for what is
        no request.
        """
        part = self.socket.recv(65536)
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


def close(caller: Caller, selector: selectors.BaseSelector) -> None:
    selector.unregister(caller.socket)
    caller.socket.close()
