"""Flood every TCP port that listens in this network namespace, as soon as it does: only for a namespace of one's own.

python tests/chaos/flood.py MODE SECONDS
"""

import contextlib
import random
import socket
import struct
import sys
import time
from pathlib import Path

MOST_OPEN, MOST_PER_PORT = 900, 3000  # connections
LISTENS = "0A"  # state in /proc/net/tcp
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close without a word
REQUESTS = (
    b"GET /global/0 HTTP/1.0\r\n\r\n",
    b"PUT /x/y HTTP/1.1\r\nContent-Length: 60000000\r\n\r\n",
    b"PUT /a/b HTTP/1.0\r\nContent-Length: -5\r\n\r\nxxx",
    b"DELETE / HTTP/1.0\r\n\r\n",
    b"POST /../.. HTTP/9\r\n\r\n",
    b"GET " + b"/" * 20_000,
)
AT_A_TIME = {"garbage": 3, "halfopen": 20, "slow": 5, "many": 40, "requests": 4, "reset": 10, "hello": 2}
dice = random.Random(1)


def listening() -> list[tuple[str, int]]:
    """Return the IPv4 address and the port of every socket that listens."""
    found = []
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        words = line.split()
        address, _, port = words[1].partition(":")
        if words[3] == LISTENS:
            ip = socket.inet_ntoa(struct.pack("<I", int(address, 16)))
            found.append(("127.0.0.1" if ip == "0.0.0.0" else ip, int(port, 16)))
    return found


def call(where: tuple[str, int], mode: str) -> socket.socket | None:
    """Connect, and do what the mode says. Return the connection if it stays open. Raises OSError."""
    connection = socket.create_connection(where, 1)
    if mode == "garbage":
        connection.sendall(dice.randbytes(dice.choice((1, 68, 4096, 65536))))
    elif mode == "requests":
        connection.sendall(dice.choice(REQUESTS))
    elif mode == "hello":  # as long as the watchdog's answer
        connection.sendall(struct.pack("!I", 1) + dice.randbytes(64))
    elif mode == "reset":
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    if mode in ("garbage", "many", "reset"):
        connection.close()
        return None
    connection.setblocking(False)
    return connection


def flood(mode: str, seconds: float) -> None:
    """Flood for so long."""
    until = time.monotonic() + seconds
    calls: dict[tuple[str, int], int] = {}
    connected: list[socket.socket] = []
    while time.monotonic() < until:
        for where in listening():
            for _ in range(AT_A_TIME[mode] if calls.get(where, 0) < MOST_PER_PORT else 0):
                calls[where] = calls.get(where, 0) + 1
                with contextlib.suppress(OSError):
                    if (connection := call(where, mode)) is not None:
                        connected.append(connection)
        while len(connected) > MOST_OPEN:
            connected.pop(0).close()
        for connection in connected if mode == "slow" else ():
            with contextlib.suppress(OSError):
                connection.send(b"G")
        time.sleep(0.05)


if __name__ == "__main__":
    flood(sys.argv[1], float(sys.argv[2]))
