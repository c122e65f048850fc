"""How long a job's ranks need to learn each other's addresses from our rendezvous server, with simulated ranks.

    python -m tests.bench.rendezvous                            100, 1,000 and 4,000 ranks, as Horovod with patch 27 asks
    python -m tests.bench.rendezvous --ranks 100 --asks each    as without it: for the addresses of each other rank, twice

A rank is a coroutine that sends what Gloo's context of all ranks sends, over TCP on this host: its own addresses, then its
questions, then that it has finished. The server is that of hvdtrain.starter, in a process of its own. Not measured: the
connections between the ranks, the contexts of a host's ranks, and a network.
"""

import argparse
import asyncio
import multiprocessing
import resource
import time
from multiprocessing.connection import Connection

from hvdtrain.launching.rendezvous_server import Rendezvous

ADDRESS = 136  # bytes: a sockaddr_storage and a sequence number, in Gloo's TCP transport
AT_ONCE = 1_000  # connections of the simulated ranks at a time, where a rank makes one after the other


def serve(answer: Connection) -> None:
    """Run the server until the other end is closed, then send its CPU seconds."""
    answer.send(Rendezvous("127.0.0.1", 0).port)
    answer.recv()
    used = resource.getrusage(resource.RUSAGE_SELF)
    answer.send((used.ru_utime + used.ru_stime, used.ru_maxrss * 1024))


async def ask(port: int, method: str, path: str, body: bytes = b"") -> bytes:
    """Return the answer's body; b"" if there is no such key."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(f"{method} {path} HTTP/1.1\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        await writer.drain()
        return (await reader.read()).partition(b"\r\n\r\n")[2]
    finally:
        writer.close()


async def rank(port: int, number: int, size: int, asks: str, gate: asyncio.Semaphore) -> int:
    """Do what one rank does. Return the number of bytes received."""
    async with gate:
        await ask(port, "PUT", f"/global/{number}", bytes(ADDRESS * (size - 1)))
    received = 0
    if asks == "own":
        while not (body := await ask(port, "GET", f"/global/addresses_of_{number}_of_{size}")):
            pass
        assert len(body) == ADDRESS * (size - 1)
        received = len(body)
    else:
        for other in range(size):
            if other != number:
                for _ in range(2):  # Gloo's `wait`, then its `get`
                    async with gate:
                        while not (body := await ask(port, "GET", f"/global/{other}")):
                            await asyncio.sleep(0.01)
                    received += len(body)
    return received


async def finish(port: int, number: int, gate: asyncio.Semaphore) -> None:
    """Say that this rank is done. Horovod does so after a barrier of all ranks."""
    async with gate:
        await ask(port, "DELETE", f"/global/{number}")


async def ranks(port: int, size: int, asks: str) -> int:
    gate = asyncio.Semaphore(AT_ONCE)
    received = await asyncio.gather(*(rank(port, number, size, asks, gate) for number in range(size)))
    await asyncio.gather(*(finish(port, number, gate) for number in range(size)))
    return sum(received)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="100,1000,4000", help="(default: %(default)s)")
    parser.add_argument("--asks", choices=("own", "each"), default="own")
    flags = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    for size in map(int, flags.ranks.split(",")):
        here, there = multiprocessing.Pipe()
        server = multiprocessing.get_context("spawn").Process(target=serve, args=(there,), daemon=True)
        server.start()
        port = here.recv()
        began = time.perf_counter()
        received = asyncio.run(ranks(port, size, flags.asks))
        seconds = time.perf_counter() - began
        here.send(None)
        cpu, memory = here.recv()
        print(
            f"{size:5d} ranks: {seconds:7.2f} s, {received / 1e6:9.1f} MB to the ranks; "
            f"server: {cpu:.2f} s of CPU, {memory / 2**20:.0f} MiB",
            flush=True,
        )
        server.join()


if __name__ == "__main__":
    main()
