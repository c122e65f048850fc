"""What rank 0 of a large job receives, and how long it computes, before the first step: start-up gathers simulated.

python -m tests.bench.gathers --ranks 8,100,1000

One process is rank 0 of so many ranks, eight to a host. It starts as any program does (`training.start`, `run.prepare`):
flags, cores, places, checkpoint, watchdog. Each collective returns at once what the others would have sent: rank 0's own
bytes, with the name of another host. The watchdog's connections are real, each from a thread of this process.
Not simulated: the transport itself, and the launcher's own meeting (`tests.bench.rendezvous`).
"""

import argparse
import collections
import contextlib
import io
import socket
import sys
import threading
import time
from collections.abc import Iterator
from unittest import mock

import torch
from torch import Tensor, nn

from hvdtrain import training
from hvdtrain.engines.files import allow_open_files
from hvdtrain.engines.single import SerialEngine
from hvdtrain.guards.channel import say_hello

RANKS_PER_HOST = 8
HOST = b"node-0000"  # of rank 0; all have as many letters, so that one rank's bytes are as long as another's


class RankZero(SerialEngine):
    """Rank 0 of `ranks` ranks, of which the others are made up. Counts what it receives, by the collective's name."""

    ranks = 1

    def __init__(self, **where: object) -> None:
        super().__init__(tuning=True, rank=0, size=1, launcher="none")
        self.size, self.local_size = self.ranks, RANKS_PER_HOST
        self.received: collections.Counter[str] = collections.Counter()
        self.calls = 0
        self.key = b""
        self.others: list[object] = []

    def all_gather(self, tensor: Tensor, name: str) -> Tensor:
        self.calls += 1
        self.received[name.removesuffix(".length")] += (self.size - 1) * tensor.numel() * tensor.element_size()
        everyone = tensor.unsqueeze(0).repeat(self.size, *[1] * tensor.dim())
        place = bytes(tensor.tolist()).find(HOST) if tensor.dtype == torch.uint8 else -1
        if place >= 0:
            for rank in range(self.size):
                name_of_host = HOST[:-4] + b"%04d" % (rank // RANKS_PER_HOST)
                everyone[rank, place : place + len(HOST)] = torch.tensor(list(name_of_host), dtype=torch.uint8)
        return everyone

    def all_reduce_(self, tensor: Tensor, op: str, name: str) -> None:
        self.calls += 1
        self.received[name] += 2 * tensor.numel() * tensor.element_size()  # a ring: reduce-scatter and all-gather
        if op == "sum":
            tensor *= self.size

    def broadcast_(self, tensor: Tensor, name: str) -> None:
        self.calls += 1

    def broadcast_object(self, value: object, name: str) -> object:
        if name == "hangs.secret":
            self.key = bytes.fromhex(str(value))
        if name == "hangs.where" and isinstance(value, dict):
            address = next(iter(value.values()))
            threading.Thread(target=self._connect, args=(("127.0.0.1", address[1]),), daemon=True).start()
        return super().broadcast_object(value, name)

    def _connect(self, address: tuple[str, int]) -> None:
        for rank in range(1, self.size):
            self.others.append(say_hello(address, self.key, rank))


@contextlib.contextmanager
def as_rank_zero(ranks: int) -> Iterator[None]:
    kind = type("RankZeroOfMany", (RankZero,), {"ranks": ranks})
    with (
        mock.patch("hvdtrain.engines.start.engine_class", return_value=kind),
        mock.patch.object(socket, "gethostname", return_value=HOST.decode()),
        mock.patch("hvdtrain.guards.channel.own_address_towards", return_value="127.0.0.1"),
    ):
        yield


def measure(ranks: int) -> tuple[float, RankZero]:
    """Return the seconds from `training.start` to what follows `run.prepare`, and the engine, which has counted."""
    parser = training.parser("gathers", __doc__)
    flags = parser.parse(["--engine", "serial", "--no-progress"])
    net = nn.Linear(10, 10)
    began = time.monotonic()
    with as_rank_zero(ranks), contextlib.redirect_stdout(io.StringIO()), training.start(flags) as run:
        run.prepare(net, torch.optim.Adam(net.parameters()))
        seconds = time.monotonic() - began
    assert isinstance(run.engine, RankZero)
    assert len(run.engine.others) == ranks - 1, "the watchdog's connections failed"
    return seconds, run.engine


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.gathers", description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", default="8,100,1000", help="numbers of ranks (default: %(default)s)")
    parser.add_argument("--by-name", action="store_true", help="also list the collectives by bytes")
    flags = parser.parse_args()
    measure(2)  # what is imported at first use
    print(
        "| ranks | collectives | kB received by rank 0 | watchdog connections | seconds |\n|---:|---:|---:|---:|---:|"
    )
    for ranks in [int(word) for word in flags.ranks.split(",")]:
        allow_open_files(2 * ranks + 1000)
        seconds, engine = measure(ranks)
        received = sum(engine.received.values()) / 1e3
        print(f"| {ranks:,} | {engine.calls} | {received:,.1f} | {len(engine.others):,} | {seconds:.2f} |", flush=True)
        if flags.by_name:
            for name, size in engine.received.most_common():
                print(f"    {name:30} {size:10,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
