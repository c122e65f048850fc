"""What the meeting of many ranks over Gloo costs the starter's rendezvous server: connections, bytes, seconds.

python -m tests.bench.rendezvous --ranks 8,24,100,1000

For each context (all ranks; the ranks of a host; those of one local rank) each rank puts its host name and its sockets, asks
for the names of the ranks before it, asks twice for the sockets of every other rank (once to see whether they are there),
and says when it has finished. Here as many processes as there are cores make these requests and do nothing else; of more
than --most only so many are made, and the seconds are scaled up.
"""

import argparse
import itertools
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

from hvdtrain.launching.rendezvous import Rendezvous

BYTES_OF_A_SOCKET = 136  # that a rank puts for each other rank


def requests(ranks: int) -> int:
    """Return how many requests one context of so many ranks makes, where nobody has to ask a third time."""
    return ranks * 2 + ranks * (ranks - 1) // 2 + 2 * ranks * (ranks - 1) + ranks


def answered(ranks: int) -> int:
    """Return how many bytes the server sends for one context of so many ranks, headers left out."""
    return 2 * ranks * (ranks - 1) * (ranks - 1) * BYTES_OF_A_SOCKET


def asked(ranks: int) -> Iterator[bytes]:
    """Yield requests of one context at random, in the shares that Gloo has."""
    while True:
        other = random.randrange(ranks)
        key = f"rank_{other}" if random.random() < 0.2 else str(other)
        yield f"GET /global/{key} HTTP/1.1\r\nHost: here\r\nContent-Length: 0\r\n\r\n".encode()


def ask(port: int, ranks: int, count: int) -> None:
    for request in itertools.islice(asked(ranks), count):
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(request)
            while connection.recv(2**20):
                pass


def measure(ranks: int, most: int) -> tuple[float, float]:
    """Return the seconds that the requests of one context take, and the server's own share of them."""
    server = Rendezvous("127.0.0.1", 0)
    for rank in range(ranks):
        server.put("global", f"rank_{rank}", b"host")
        server.put("global", str(rank), bytes(BYTES_OF_A_SOCKET * (ranks - 1)))
    callers, count = os.cpu_count() or 1, min(requests(ranks), most)
    words = [
        sys.executable,
        "-m",
        "tests.bench.rendezvous",
        "--ask",
        str(server.port),
        str(ranks),
        str(count // callers),
    ]
    cpu, began = time.process_time(), time.monotonic()
    for process in [subprocess.Popen(words) for _ in range(callers)]:
        if process.wait() != 0:
            raise SystemExit("a caller failed")
    scale = requests(ranks) / (count // callers * callers)
    return (time.monotonic() - began) * scale, (time.process_time() - cpu) * scale


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="tests.bench.rendezvous", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", default="8,24,100,1000", help="default: %(default)s")
    parser.add_argument("--most", type=int, default=20_000, help="requests to make (default: 20000)")
    parser.add_argument("--ask", nargs=3, type=int, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.ask:
        ask(*flags.ask)
        return 0
    print("| ranks | connections | MB sent | seconds | the server's own |\n|---:|---:|---:|---:|---:|")
    for ranks in map(int, flags.ranks.split(",")):
        seconds, own = measure(ranks, flags.most)
        print(f"| {ranks:,} | {requests(ranks):,} | {answered(ranks) / 1e6:,.1f} | {seconds:,.2f} | {own:,.2f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
