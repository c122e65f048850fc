"""The meeting of a job's starters, and the server at which they, and then Gloo's ranks, learn of each other.

A starter has one rank, which it becomes itself, or all ranks of its host. Each tells the first starter how many it has, and
receives all hosts' ranks. Does not import torch.
"""

import contextlib
import hmac
import json
import os
import re
import socket
import socketserver
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler
from typing import Any, NamedTuple

from hvdtrain.engines import files
from hvdtrain.engines.errors import Failure, UserError
from hvdtrain.launching.rendezvous import (
    ANSWER_SECONDS,
    SECRET_REMEDY,
    Server,
    first_few,
    own_address_towards,
    server_request,
    token,
)

POLL_SECONDS = 0.1
ABSENT_LINE_SECONDS = 10.0  # between two lines about missing ranks
FAILURE_SECONDS = 5.0  # between two checks whether another host has failed
COME_SECONDS = 10.0  # for a starter whose ranks have failed to reach the others, which would wait for it
GONE_AFTER = 20  # failed requests to a first starter that had answered before
REQUEST_SECONDS = 5.0  # for the first starter to answer


class Place(NamedTuple):
    """A rank's place among the hosts, in Horovod's terms: `cross_size` is the number of hosts that have this local rank."""

    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int


class Came(NamedTuple):
    """A starter's host name and number of ranks."""

    host: str
    ranks: int


def parse_came(text: bytes, size: int) -> list[Came]:
    """Return what `size` starters have said, as a list in JSON. Raises Failure if it is something else."""
    with contextlib.suppress(ValueError, TypeError):
        came = [Came(str(host), int(ranks)) for host, ranks in json.loads(text)]
        if len(came) == size:
            return came
    raise Failure(f"the starters do not understand each other ({text[:80]!r}): start the same hvdtrain on each host")


def place_of_rank(rank: int, hosts: Sequence[str]) -> Place:
    """Return the place of `rank`. hosts: the host name of every rank."""
    local_rank = hosts[:rank].count(hosts[rank])
    peers = [host for host, count in Counter(hosts).items() if count > local_rank]  # in order of their first ranks
    return Place(local_rank, hosts.count(hosts[rank]), peers.index(hosts[rank]), len(peers))


def resolve(host: str, deadline: float) -> str:
    """Return the IPv4 address of `host`. Retries until `deadline` (time.monotonic): on Kubernetes, a name resolves only once
    the pod runs. Raises UserError."""
    while True:
        try:
            return str(socket.getaddrinfo(host, None, socket.AF_INET)[0][4][0])
        except (OSError, UnicodeError) as error:  # UnicodeError: not a valid host name
            if time.monotonic() > deadline or isinstance(error, UnicodeError):
                raise UserError(
                    f"{host}, where rank 0 should be, has no address ({error}): check MASTER_ADDR"
                ) from None
            time.sleep(POLL_SECONDS)


def interface_with(address: str) -> str:
    """Return the name of this host's network interface with `address`. Raises UserError if there is none."""
    import psutil  # Horovod's launcher needs it too

    wanted = "127.0.0.1" if address.startswith("127.") else address  # Debian resolves a host's own name to 127.0.1.1
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == wanted for entry in entries):
            return str(name)
    here = f"{socket.gethostname()}, where rank 0 runs"
    raise UserError(f"{address} is not an address of {here}: set MASTER_ADDR to this host, or name its --interface")


def address_of(interface: str) -> str:
    """Return the IPv4 address of this host's network interface `interface`. Raises UserError if it has none."""
    import psutil

    for entry in psutil.net_if_addrs().get(interface, []):
        if entry.family == socket.AF_INET:
            return str(entry.address)
    raise UserError(f"--interface {interface}: not on this host, or without an IPv4 address (`ip -br addr` lists them)")


class Meeting:
    """One starter's side of the rendezvous. Call `come`, then `wait` once its ranks are ready to begin.

    number, size: this starter's number, and the number of starters. host, port: where the first starter listens; port 0
    (any free port) only if there is one starter. interface: the job's; None: the one with the route to `host`.
    seconds: limit for all starters to connect, for all to be ready, and for all to hear of it. secret: see `job_secret`.
    """

    def __init__(
        self, number: int, size: int, host: str, port: int, interface: str | None, seconds: float, secret: str
    ):  # fmt: skip
        self.number, self.size, self.seconds = number, size, seconds
        self.port, self.interface = port, interface or ""  # completed by `come`
        self.say: Callable[[str], None] = lambda line: None  # called with a line about missing ranks
        self.hosts: list[str] = []  # host name of every rank; set by `wait`
        self.first = 0  # the first rank of this starter; set by `wait`
        self._host, self._address, self._secret = host, "", secret
        self._came = threading.Event()  # `come` has ended
        self._deadline = time.monotonic() + seconds
        self._server: Rendezvous | None = None  # on the first starter
        self._reached = False  # the first starter has answered this one
        self._poll = max(POLL_SECONDS, size / 1000)  # seconds; limits the total to a thousand requests per second

    def come(self, ranks: int) -> None:
        """Register this starter with `ranks` ranks; the first starter begins to listen. Raises UserError."""
        try:
            self._find_addresses()
            if self.number == 0:
                self._listen()
            self._request("PUT", "hosts", str(self.number), json.dumps(Came(socket.gethostname(), ranks)).encode())
        finally:
            self._came.set()

    def _find_addresses(self) -> None:
        """Find out where the first starter listens, and the network interface of the job. Raises UserError."""
        address = own = resolve(self._host, self._deadline)
        if self.interface:
            own = address_of(self.interface)
        else:
            if self.number:
                try:
                    own = own_address_towards(address)
                except OSError as error:
                    message = f"{address}, where rank 0 should be, cannot be reached: {error.strerror}"
                    raise UserError(message) from None
            self.interface = interface_with(own)
        self._address = own if self.number == 0 else address

    def _listen(self) -> None:
        try:
            self._server = Rendezvous(self._address, self.port, self._secret)
        except OSError as error:
            remedy = "set MASTER_PORT (or --port) to a free port above 1023, the same for every rank"
            raise UserError(f"cannot listen on {self._address}:{self.port} ({error.strerror}): {remedy}") from None
        self.port = self._server.port

    def wait(self) -> None:
        """Report that this starter's ranks are ready. Return once all starters are ready.

        Raises UserError if a starter does not connect in time, Failure if a host has failed.
        """
        if self._server is None:
            # The first starter gives up earlier, and names the missing ranks. Anew: an import may have taken long.
            self._deadline = time.monotonic() + 3 * self.seconds
            self._request("PUT", "ready", str(self.number))
            came = parse_came(self._request("GET", "known", "hosts"), self.size)
            self._request("PUT", "met", str(self.number))
            self._place(came)
            return
        server, where = self._server, f"{self._address}:{self.port}"
        loopback = " (a loopback address: other hosts cannot reach it)" if where.startswith("127.") else ""
        self._all_in("hosts", lambda late: f"rank {first_few(late)} did not connect to {where}{loopback}: "
                     f"were all {self.size} started?")  # fmt: skip
        told = server.get("hosts")
        came = parse_came(b"[%s]" % b",".join(told[str(number)] for number in range(self.size)), self.size)
        server.answer("PUT", "ready", "0")
        self._all_in("ready", lambda late: f"still importing: {first_few([came[number].host for number in late])}; "
                     f"--wait gives more than {self.seconds:.0f} s")  # fmt: skip
        self._place(came)
        server.answer("PUT", "known", "hosts", json.dumps(came).encode())
        server.answer("PUT", "met", "0")
        # Wait, because this process and its server may end before a slower starter has read the hosts.
        self._all_in(
            "met", lambda late: f"{first_few([came[number].host for number in late])} connected, then stopped answering"
        )

    def _place(self, came: list[Came]) -> None:
        self.first = sum(each.ranks for each in came[: self.number])
        self.hosts = [each.host for each in came for _ in range(each.ranks)]

    def environment(self, rank: int) -> dict[str, str]:
        """Return the environment variables that Horovod's launcher would set for `rank`."""
        mine = place_of_rank(rank, self.hosts)
        return {
            "HOROVOD_HOSTNAME": self.hosts[rank],
            "HOROVOD_RANK": str(rank),
            "HOROVOD_SIZE": str(len(self.hosts)),
            "HOROVOD_LOCAL_RANK": str(mine.local_rank),
            "HOROVOD_LOCAL_SIZE": str(mine.local_size),
            "HOROVOD_CROSS_RANK": str(mine.cross_rank),
            "HOROVOD_CROSS_SIZE": str(mine.cross_size),
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": self._where().address,
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(self.port),
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
            "HOROVOD_GLOO_IFACE": self.interface,
            "NCCL_SOCKET_IFNAME": os.environ.get("NCCL_SOCKET_IFNAME", self.interface),
        }

    def fail(self, reason: str) -> None:
        """Tell the other starters that this one's ranks have failed, if they can still be reached."""
        self._came.wait(COME_SECONDS)
        if self._reached:
            with contextlib.suppress(OSError):
                self._once("PUT", "failed", "any", f"{socket.gethostname()}: {reason}".encode())

    def linger(self) -> None:
        """On the first starter, at its end: if ranks have failed, wait until the other starters have noticed."""
        if self._server is not None and self.size > 1 and self.failure():
            # The server ends with this process. The others ask it every FAILURE_SECONDS whether a host has failed.
            time.sleep(FAILURE_SECONDS + 1.0)

    def failure(self) -> str | None:
        """Return which other host's ranks have failed, and how; None if none are known to have failed."""
        with contextlib.suppress(OSError):  # the first starter has ended
            if self._reached and (told := self._once("GET", "failed", "any")):
                return told.decode(errors="replace")
        return None

    def _all_in(self, scope: str, complaint: Callable[[list[int]], str]) -> None:
        """On the first starter: return once every starter's number is a key of `scope`. Raises UserError, Failure."""
        assert self._server is not None
        began = said_at = time.monotonic()
        while late := [number for number in range(self.size) if str(number) not in self._server.get(scope)]:
            now = time.monotonic()
            if failed := self.failure():
                raise Failure(failed)
            if now - began > self.seconds:
                raise UserError(complaint(late))
            if now - said_at > ABSENT_LINE_SECONDS:
                said_at = now
                self.say(f"waiting for {len(late)} of {self.size} for {now - began:.0f} s: {complaint(late)}")
            time.sleep(self._poll)

    def _request(self, method: str, scope: str, key: str, data: bytes = b"") -> bytes:
        """Send a request to the first starter until there is an answer, and return it. Raises UserError, Failure."""
        gone = 0
        while True:
            why: object = "not every rank connected"
            try:
                answer = self._once(method, scope, key, data)
                if answer is not None:
                    return answer
                gone = 0
            except PermissionError as error:  # also another job's server
                raise UserError(
                    f"{error}: set another MASTER_PORT, or where hosts share no home directory, {SECRET_REMEDY}"
                ) from None
            except OSError as error:
                why, gone = error, gone + self._reached
            if time.monotonic() > self._deadline or gone > GONE_AFTER:
                raise UserError(f"the ranks did not meet at rank 0's {self._address}:{self.port}: {why}")
            if failed := self.failure():
                raise Failure(failed)
            time.sleep(self._poll)

    def _once(self, method: str, scope: str, key: str, data: bytes = b"") -> bytes | None:
        """Send one request and return the answer; None if there is no such key. Raises OSError if there is no answer."""
        if self._server is not None:
            answer = self._server.answer(method, scope, key, data)
        else:
            seconds = min(REQUEST_SECONDS, max(0.5, self._deadline - time.monotonic()))
            answer = server_request(self._where(), method, f"/{scope}/{key}", data, seconds)
        self._reached = True
        return answer

    def _where(self) -> Server:
        return Server(self._address, self.port, token(self._secret, self.port))


# ---- the server

PATH = re.compile("/([^/]*)/([^/]*)")  # scope and key
SELECTION = re.compile("addresses_of_([0-9]{1,5})_of_([0-9]{1,5})")  # launch/patches/27: a rank asks for its addresses
SELECTION_SECONDS = 5.0  # until a rank that waits for others is told that they have not all come yet
BACKLOG = 4096  # pending connections; the kernel limits it to net.core.somaxconn
MOST_BODY = 2**26  # bytes; a value has 136 bytes per other rank
MOST_STRANGERS = 256  # connections that have not named the token; more wait
SERVER_SPARE_FILES = 768  # open files besides; 1,024 are the usual limit


class Rendezvous(socketserver.ThreadingTCPServer):
    """A key-value server with the protocol of Horovod's rendezvous server. Gloo exchanges addresses with it.

    Requests are PUT, GET and DELETE /scope/key, one per connection. Under its number, a rank stores the addresses of its
    sockets for each other rank, one after the other. GET /scope/addresses_of_RANK_of_SIZE is answered when all SIZE ranks
    have done so, with the addresses meant for RANK; or with nothing after SELECTION_SECONDS.

    The protocol has no authentication. Therefore each path begins with a token of the job's secret (see
    `rendezvous.Server`), and connections that have not named it are limited. The server listens on one address only, stores
    only addresses, and does not use pickle.

    port: 0 for any free port. Raises OSError if `address` cannot be bound.
    """

    allow_reuse_address = daemon_threads = True
    block_on_close = False
    # Python's default is 5. The kernel drops the others of a large job, and each comes again after a second or more.
    request_queue_size = BACKLOG

    def __init__(self, address: str, port: int, secret: str):
        super().__init__((address, port), Caller)
        files.allow_open_files(MOST_STRANGERS + SERVER_SPARE_FILES)
        self.port = int(self.socket.getsockname()[1])
        self.server = Server(address, self.port, token(secret, self.port))
        self.strangers = threading.Semaphore(MOST_STRANGERS)
        self._lock = threading.Lock()
        self._scopes: dict[str, dict[str, bytes]] = {}
        self._finished: dict[str, set[str]] = {}  # by scope, the ranks that are done with it
        self._complete: dict[tuple[str, int], threading.Event] = {}  # set when the scope has this number of values
        threading.Thread(target=self.serve_forever, name="rendezvous", daemon=True).start()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Hear a caller in a thread. `Caller` gives its place free, once it has named the token or is gone."""
        # Each connection takes an open file of rank 0's process, in which the server may run: strangers could take all.
        self.strangers.acquire()
        super().process_request(request, client_address)

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing of a caller that is gone, or has sent no request."""

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
            else:
                # A rank is done with its scope. Once all are, it is forgotten: Horovod may be initialized again.
                finished = self._finished.setdefault(scope, set())
                finished.add(key)
                if finished.issuperset(values):
                    del self._scopes[scope], self._finished[scope]
        return b""

    def selection(self, scope: str, rank: int, size: int) -> bytes:
        """Return the addresses meant for `rank` when all have come; nothing after SELECTION_SECONDS."""
        with self._lock:
            complete = threading.Event()
            if len(self._scopes.get(scope, {})) < size:
                complete = self._complete.setdefault((scope, size), complete)
            else:
                complete.set()
        # Horovod's own server has no such answer. Each rank asks it for each other one: 3,000 requests of 24 ranks.
        complete.wait(SELECTION_SECONDS)
        values, parts = self.get(scope), []
        for other in (other for other in range(size) if other != rank):
            if (addresses := values.get(str(other))) is None:
                return b""
            length = len(addresses) // (size - 1)  # a rank stores none for itself
            first = (rank - (rank > other)) * length
            parts.append(addresses[first : first + length])
        return b"".join(parts)


class Caller(BaseHTTPRequestHandler):
    """One request to a `Rendezvous`. What is none is hung up on."""

    server: Rendezvous
    timeout = 10.0  # seconds in which a stranger sends something
    disable_nagle_algorithm = True  # headers and body are sent apart
    is_stranger = True

    def do_GET(self) -> None:
        """Execute a request of any method."""
        prefix = self.server.server.prefix
        # Who can store addresses can misdirect the ranks, and every user of the host can connect.
        if not hmac.compare_digest(self.path[: len(prefix)].encode("latin-1"), prefix.encode()):
            self._send(403)
            # Closing a socket with something unread would take the answer away. A large value is not read to its end.
            self.connection.shutdown(socket.SHUT_WR)
            self.connection.recv(4096)
            return
        self._is_known()
        self.connection.settimeout(ANSWER_SECONDS)
        place, length = PATH.fullmatch(self.path[len(prefix) :]), int(self.headers.get("Content-Length", 0))
        if place is None or not 0 <= length <= MOST_BODY or len(value := self.rfile.read(length)) < length:
            return
        scope, key = place.groups()
        if self.command == "GET" and (asked := SELECTION.fullmatch(key)):
            self._send(200, self.server.selection(scope, int(asked[1]), int(asked[2])))
        else:
            body = self.server.answer(self.command, scope, key, value)
            self._send(404 if body is None else 200, body or b"")

    do_PUT = do_DELETE = do_GET

    def _send(self, status: int, body: bytes = b"") -> None:
        self.send_response_only(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _is_known(self) -> None:
        if self.is_stranger:
            self.is_stranger = False
            self.server.strangers.release()

    def finish(self) -> None:
        self._is_known()
        super().finish()

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer nothing to what is no request."""

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""
