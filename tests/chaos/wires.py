"""Hosts on a wire of our own: each host's `eth0` is a TAP, and this process hands every packet on, or does not.

    python -m tests.chaos.wires a,b COMMAND ...      COMMAND on both, with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT

The file `rules.json` in the working directory, which may be replaced at any time, says what happens to packets: see `Rules`.
It takes the place of what a kernel may lack (netem, a packet filter): packets are lost, late, repeated or reordered, one
direction or one port is cut.
Output is that of the first host, the others' goes to NAME.log; the exit code is the highest of theirs. Needs root.
"""

import argparse
import contextlib
import ctypes
import fcntl
import heapq
import json
import os
import random
import select
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.cluster import Cluster, why_not

CLONE_NEWNET = 0x40000000
TUN = Path("/dev/net/tun")
TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000  # linux/if_tun.h
LARGEST_FRAME = 65536  # bytes
IPV4, TCP, UDP = b"\x08\x00", 6, 17
LATE_SECONDS = 0.02  # of a reordered packet
LOOK_SECONDS = 0.05  # between two looks at the rules
MASTER_PORT = 9000


@dataclass(frozen=True)
class Rules:
    """What happens to packets.

    cut: pairs of hosts by number, (from, to). ports: what is sent from or to them is lost. watchdog, engine: what the
    watchdog's connection carries is lost, or what all others but the rendezvous' do: it is the one with the fewest bytes.
    """

    cut: Sequence[Sequence[int]] = ()
    ports: Sequence[int] = ()
    watchdog: bool = False
    engine: bool = False
    largest: int = LARGEST_FRAME  # bytes of a frame; larger ones are lost
    loss: float = 0.0  # probability
    duplicate: float = 0.0
    reorder: float = 0.0


def ports(frame: bytes) -> tuple[int, int] | None:
    """Return source and destination port of an Ethernet frame; None if it has none."""
    if frame[12:14] != IPV4 or frame[23] not in (TCP, UDP):
        return None
    source, target = struct.unpack_from("!HH", frame, 14 + (frame[14] & 15) * 4)
    return source, target


def deliveries(frame: bytes, source: int, target: int, rules: Rules, dice: random.Random) -> list[float]:
    """Return after how many seconds `frame` of host `source` arrives at `target`: once, more than once, or never."""
    if [source, target] in [list(pair) for pair in rules.cut]:
        return []
    if any(port in rules.ports for port in ports(frame) or ()):
        return []
    if len(frame) > rules.largest or dice.random() < rules.loss:
        return []
    late = LATE_SECONDS if dice.random() < rules.reorder else 0.0
    return [late, late] if dice.random() < rules.duplicate else [late]


class Relay(threading.Thread):
    """Hands frames on between `taps`, file descriptors by number of host, until the process ends."""

    def __init__(self, taps: Sequence[int], file: Path):
        super().__init__(daemon=True)
        self.rules = Rules()
        self._taps, self._file, self._known = taps, file, ""
        self._dice = random.Random(1)
        self._queue: list[tuple[float, int, int, bytes]] = []  # when, a number for the order, tap, frame
        self._count = 0
        self._bytes: dict[frozenset[int], int] = {}  # by the two ports of a connection

    def run(self) -> None:
        look = 0.0
        while True:
            if time.monotonic() > look:
                self._read_rules()
                look = time.monotonic() + LOOK_SECONDS
            wait = max(0.0, min(look, self._queue[0][0] if self._queue else look) - time.monotonic())
            ready = select.select(self._taps, [], [], wait)[0]
            for source, tap in enumerate(self._taps):
                with contextlib.suppress(BlockingIOError):
                    while tap in ready:
                        self._receive(os.read(tap, LARGEST_FRAME), source)
            while self._queue and self._queue[0][0] <= time.monotonic():
                _, _, tap, frame = heapq.heappop(self._queue)
                with contextlib.suppress(OSError):  # the interface is down, or its queue full: lost
                    os.write(tap, frame)

    def _read_rules(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # not there, or not whole
            text = self._file.read_text()
            if text != self._known:
                rules, self._known = Rules(**json.loads(text)), text
                quiet = min(self._bytes, key=lambda pair: self._bytes[pair], default=frozenset[int]())
                others = {port for pair in self._bytes if pair != quiet for port in pair} - quiet
                more = [*quiet] * rules.watchdog + [*others] * rules.engine
                self.rules = Rules(**json.loads(text) | {"ports": [*rules.ports, *more]})

    def _receive(self, frame: bytes, source: int) -> None:
        now = time.monotonic()
        if (pair := ports(frame)) and frame[23] == TCP and MASTER_PORT not in pair:
            self._bytes[frozenset(pair)] = self._bytes.get(frozenset(pair), 0) + len(frame)
        for target, tap in enumerate(self._taps):
            for late in deliveries(frame, source, target, self.rules, self._dice) if target != source else ():
                self._count += 1
                heapq.heappush(self._queue, (now + late, self._count, tap, frame))


def tap_in(namespace: Path, name: str = "eth0") -> int:
    """Return the file descriptor of a new TAP in a network namespace. Raises OSError."""
    made: list[int | OSError] = []

    def make() -> None:
        try:
            with namespace.open() as file:
                if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), f"setns {namespace}")
            tap = os.open(TUN, os.O_RDWR | os.O_NONBLOCK)
            fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TAP | IFF_NO_PI))
            made.append(tap)
        except OSError as error:
            made.append(error)

    thread = threading.Thread(target=make)  # setns moves one thread, which ends
    thread.start()
    thread.join()
    if isinstance(made[0], OSError):
        raise made[0]
    return made[0]


class Wired(Cluster):
    """Hosts that are joined by a `Relay` in this process, in place of a bridge."""

    def attached(self, name: str, command: list[str], **extra: str) -> subprocess.Popen:
        """Start a command on host `name`, whose output is this process's, or that of NAME.log."""
        here = ["sh", "-c", 'cd "$0" && exec "$@"', str(Path.cwd())]  # nsenter begins in the root directory
        if name == self.names[0]:
            return self._popen(name, [*here, *command], extra)
        with Path(f"{name}.log").open("a") as log:
            return self._popen(name, [*here, *command], extra, stdout=log, stderr=log)

    def _build(self) -> None:
        hosts = self.directory / "hosts"
        lines = [f"{self.address(name)} {name}\n" for name in self.names]
        hosts.write_text("".join(["127.0.0.1 localhost\n", *lines]))
        for name in self.names:
            self._first[name] = self._hold(name)
        Relay([tap_in(Path(self.network(name))) for name in self.names], Path("rules.json")).start()
        for name in self.names:
            self.sh(
                name,
                f"hostname {name} && ip link set dev lo up && ip addr add {self.address(name)}/24 dev eth0 && "
                f"ip link set dev eth0 up && mount --bind '{hosts}' /etc/hosts && mount -t tmpfs tmpfs /dev/shm",
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("hosts", help="their names, joined by commas")
    parser.add_argument("--late", type=float, default=0.0, help="seconds after which all but the first begin")
    parser.add_argument("--only", type=int, help="start only the first N")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    flags = parser.parse_args()
    if why := why_not():
        sys.exit(why)
    names = flags.hosts.split(",")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with tempfile.TemporaryDirectory() as own, Wired(Path(own), names) as cluster:
        jobs = []
        for number, name in enumerate(names[: flags.only]):
            if number == 1:
                time.sleep(flags.late)
            told = dict(
                RANK=str(number), WORLD_SIZE=str(len(names)), MASTER_ADDR=names[0], MASTER_PORT=str(MASTER_PORT)
            )
            own = {key: value for key, value in told.items() if key not in os.environ}
            jobs.append(cluster.attached(name, flags.command, **own))
        codes = [job.wait() for job in jobs]
    print(f"exit codes: {' '.join(map(str, codes))}", flush=True)
    return max(128 - code if code < 0 else code for code in codes)


if __name__ == "__main__":
    sys.exit(main())
