"""How the starters of a job find each other: each tells the first how many ranks it brings, and learns all places.

A starter brings one rank, which it then becomes, or all ranks of its host. Imports no torch.
"""

import contextlib
import json
import os
import socket
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from hvdtrain.engines.errors import Failure, UserError
from hvdtrain.engines.rendezvous import Rendezvous, own_address_towards

POLL_SECONDS = 0.1
SAY_SECONDS = 10.0  # between two lines about who is waited for
FAILURE_SECONDS = 5.0  # between two looks whether another host has failed
GONE_AFTER = 20  # requests in vain to a first starter that had answered before
MOST_NAMED = 8
# Only straight to the first starter: a proxy variable of the site's must not send the others elsewhere.
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Place(NamedTuple):
    """A rank's place among the hosts, in Horovod's words: `cross` counts the hosts that have a rank of this local rank."""

    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int


class Came(NamedTuple):
    """What a starter brings to the job."""

    host: str
    ranks: int


def place(rank: int, hosts: Sequence[str]) -> Place:
    """Return the place of `rank`, given the host name of every rank."""
    local_rank = hosts[:rank].count(hosts[rank])
    peers = [host for host, count in Counter(hosts).items() if count > local_rank]  # in order of their first ranks
    return Place(local_rank, hosts.count(hosts[rank]), peers.index(hosts[rank]), len(peers))


def resolve(host: str, deadline: float) -> str:
    """Return the IPv4 address of `host`; a name may take its time to appear (Kubernetes: once the pod runs)."""
    while True:
        try:
            return str(socket.getaddrinfo(host, None, socket.AF_INET)[0][4][0])
        except (OSError, UnicodeError) as error:  # UnicodeError: no name at all
            if time.monotonic() > deadline or isinstance(error, UnicodeError):
                raise UserError(
                    f"{host}, where rank 0 should be, has no address ({error}): check MASTER_ADDR"
                ) from None
            time.sleep(POLL_SECONDS)


def interface_with(address: str) -> str:
    """Return the name of this host's interface that has `address`."""
    import psutil  # Horovod's launcher needs it too

    wanted = "127.0.0.1" if address.startswith("127.") else address  # Debian gives a host's own name 127.0.1.1
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == wanted for entry in entries):
            return name
    here = f"{socket.gethostname()}, where rank 0 runs"
    raise UserError(f"{address} is not an address of {here}: set MASTER_ADDR to this host, or name its --interface")


def address_of(interface: str) -> str:
    """Return the IPv4 address of this host's `interface`."""
    import psutil

    for entry in psutil.net_if_addrs().get(interface, []):
        if entry.family == socket.AF_INET:
            return str(entry.address)
    raise UserError(f"--interface {interface}: not on this host, or without an IPv4 address (`ip -br addr` lists them)")


def address_towards(address: str) -> str:
    """Return this host's own IPv4 address on the way to `address`."""
    try:
        return own_address_towards(address)
    except OSError as error:
        raise UserError(f"{address}, where rank 0 should be, cannot be reached: {error.strerror}") from None


def names(came: Sequence[Came]) -> list[str]:
    """Return the host name of every rank."""
    return [each.host for each in came for _ in range(each.ranks)]


def environment(rank: int, hosts: Sequence[str], address: str, port: int, interface: str) -> dict[str, str]:
    """Return what Horovod's launcher would have put into this rank's environment."""
    mine = place(rank, hosts)
    return {
        "HOROVOD_HOSTNAME": hosts[rank],
        "HOROVOD_RANK": str(rank),
        "HOROVOD_SIZE": str(len(hosts)),
        "HOROVOD_LOCAL_RANK": str(mine.local_rank),
        "HOROVOD_LOCAL_SIZE": str(mine.local_size),
        "HOROVOD_CROSS_RANK": str(mine.cross_rank),
        "HOROVOD_CROSS_SIZE": str(mine.cross_size),
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": address,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_IFACE": interface,
        "NCCL_SOCKET_IFNAME": os.environ.get("NCCL_SOCKET_IFNAME", interface),
    }


class Meeting:
    """One starter's part in it: `come`, then, once its ranks can begin, `wait`.

    number, size: of this starter, and how many there are. address: of the first one; port: where it listens (0: any, where
    it is alone). seconds: in which all must have come, and then in which all must be ready. say: takes a line about who is
    waited for.
    """

    def __init__(self, number: int, size: int, address: str, port: int, seconds: float,
                 say: Callable[[str], None] = lambda line: None):  # fmt: skip
        self.number, self.size, self.address, self.port = number, size, address, port
        self.seconds, self.say = seconds, say
        self.first = 0  # once all have met: the first rank of this starter
        self._deadline = time.monotonic() + seconds
        self._server: Rendezvous | None = None  # on the first starter
        self._reached = False  # the first starter has answered this one
        self._poll = max(POLL_SECONDS, size / 1000)  # seconds: a thousand requests a second in all

    def come(self, ranks: int) -> None:
        """Be there with so many ranks; the first starter begins to serve. Raises UserError."""
        mine = json.dumps(Came(socket.gethostname(), ranks)).encode()
        if self.number == 0:
            try:
                self._server = Rendezvous(self.address, self.port)
            except OSError as error:
                how = "set MASTER_PORT (or --port) to a free port above 1023, the same for every rank"
                raise UserError(f"cannot listen on {self.address}:{self.port} ({error.strerror}): {how}") from None
            self.port = self._server.port
            self._server.put("hosts", "0", mine)
        else:
            self._request("PUT", f"hosts/{self.number}", mine)

    def wait(self) -> list[str]:
        """Say that this starter's ranks can begin, and return the host name of every rank once all can.

        Raises UserError where not all come, Failure where a host failed meanwhile.
        """
        if self._server is None:
            self._request("PUT", f"ready/{self.number}")
            self._deadline = (
                time.monotonic() + 3 * self.seconds
            )  # the first starter gives up before, and says who is late
            came = json.loads(self._request("GET", "known/hosts"))
            self._request("PUT", f"met/{self.number}")
            return self._placed([Came(*each) for each in came])
        server, where = self._server, f"{self.address}:{self.port}"
        loopback = " (a loopback address: other hosts cannot reach it)" if where.startswith("127.") else ""
        self._all_in("hosts", lambda late: f"rank {listed(late)} did not connect to {where}{loopback}: "
                     f"were all {self.size} started?")  # fmt: skip
        came = [Came(*json.loads(server.get("hosts")[str(number)])) for number in range(self.size)]
        server.put("ready", "0", b"")
        self._deadline = time.monotonic() + self.seconds
        self._all_in("ready", lambda late: f"still importing: {listed([came[number].host for number in late])}; "
                     f"--wait gives more than {self.seconds:.0f} s")  # fmt: skip
        server.expect(names(came))
        server.put("known", "hosts", json.dumps(came).encode())
        server.put("met", "0", b"")
        # This process may be done before a slower starter has asked, and the server with it.
        self._all_in(
            "met", lambda late: f"{listed([came[number].host for number in late])} connected, then stopped answering"
        )
        return self._placed(came)

    def _placed(self, came: list[Came]) -> list[str]:
        self.first = sum(each.ranks for each in came[: self.number])
        return names(came)

    def fail(self, reason: str) -> None:
        """Tell the other starters that this one's ranks have failed, as far as they still can be told."""
        line = f"{socket.gethostname()}: {reason}".encode()
        if self._server is not None:
            self._server.put("failed", "any", line)
        elif self._reached:
            with contextlib.suppress(OSError):
                self._once("PUT", "failed/any", line)

    def linger(self) -> None:
        """On the first starter, which is about to end: stay until the others have heard that its ranks have failed."""
        if self._server is not None and self.size > 1 and self.failure():
            time.sleep(FAILURE_SECONDS + 1.0)

    def failure(self) -> str | None:
        """Return which other host's ranks have failed, and how; None where none are known to have."""
        if self._server is not None:
            told = self._server.get("failed").get("any")
            return None if told is None else told.decode(errors="replace")
        with contextlib.suppress(OSError):  # none is known, or the first starter has ended
            return self._once("GET", "failed/any").decode(errors="replace")
        return None

    def _all_in(self, scope: str, complaint: Callable[[list[int]], str]) -> None:
        """On the first starter: return once every starter's number is a key of `scope`."""
        assert self._server is not None
        began = said = time.monotonic()
        while late := [number for number in range(self.size) if str(number) not in self._server.get(scope)]:
            now = time.monotonic()
            if failed := self.failure():
                raise Failure(failed)
            if now > self._deadline:
                raise UserError(complaint(late))
            if now - said > SAY_SECONDS:
                said = now
                self.say(f"waits for {len(late)} of {self.size} since {now - began:.0f} s: {complaint(late)}")
            time.sleep(self._poll)

    def _request(self, method: str, path: str, data: bytes | None = None) -> bytes:
        """Return the first starter's answer, once it has one."""
        gone = 0
        while True:
            try:
                return self._once(method, path, data)
            except OSError as error:  # HTTPError too
                missing = getattr(error, "code", 0) == 404
                said = "not every rank came" if missing else getattr(error, "reason", error)
                gone = 0 if missing or not self._reached else gone + 1
                if time.monotonic() > self._deadline or gone > GONE_AFTER:
                    raise UserError(f"no meeting at rank 0's {self.address}:{self.port}: {said}") from None
            if self._reached and (failed := self.failure()):
                raise Failure(failed)
            time.sleep(self._poll)

    def _once(self, method: str, path: str, data: bytes | None = None) -> bytes:
        """Raises OSError where the first starter cannot be reached, or has no such key."""
        body = data if data is not None or method == "GET" else b""
        what = urllib.request.Request(f"http://{self.address}:{self.port}/{path}", data=body, method=method)
        try:
            with DIRECT.open(what, timeout=5) as response:
                self._reached = True
                return bytes(response.read())
        except urllib.error.HTTPError:
            self._reached = True
            raise


def listed(late: Sequence[object]) -> str:
    """Return the first few, in words."""
    more = len(late) - MOST_NAMED
    return ", ".join(map(str, late[:MOST_NAMED])) + (f" and {more} more" if more > 0 else "")
