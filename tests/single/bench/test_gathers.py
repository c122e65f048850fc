"""Rank 0 of many, simulated: what it receives at start-up grows with the ranks, and no collective is added unnoticed."""

import collections
import socket
import threading

import torch
from torch import Tensor, nn

from hvdtrain import training
from hvdtrain.engines.single import SerialEngine
from hvdtrain.guards.connection import say_hello

RANKS_PER_HOST = 8
HOST = b"node-0000"  # of rank 0; all have as many letters, so that one rank's bytes are as long as another's


class RankZero(SerialEngine):
    """Rank 0 of many. A collective returns at once what the others would have sent: rank 0's bytes, with their host's name.

    The watchdog's connections are real, each from a thread of this process.
    """

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
        for rank in range(self.size if place >= 0 else 0):
            host = HOST[:-4] + b"%04d" % (rank // RANKS_PER_HOST)
            everyone[rank, place : place + len(HOST)] = torch.tensor(list(host), dtype=torch.uint8)
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
            address = ("127.0.0.1", next(iter(value.values()))[1])
            threading.Thread(target=self._connect, args=(address,), daemon=True).start()
        return super().broadcast_object(value, name)

    def _connect(self, address: tuple[str, int]) -> None:
        self.others.extend(say_hello(address, self.key, rank) for rank in range(1, self.size))


def started(ranks: int, monkeypatch) -> RankZero:
    """Return the engine, which has counted, after `training.start` and `run.prepare`."""
    kind = type("RankZeroOfMany", (RankZero,), {"ranks": ranks})
    monkeypatch.setattr("hvdtrain.engines.start.engine_class", lambda *_: kind)
    monkeypatch.setattr(socket, "gethostname", HOST.decode)
    monkeypatch.setattr("hvdtrain.guards.connection.own_address_towards", lambda *_: "127.0.0.1")
    net = nn.Linear(10, 10)
    with training.start(training.parser("gathers", None).parse(["--engine", "serial", "--no-progress"])) as run:
        run.prepare(net, torch.optim.Adam(net.parameters()))
    return run.engine


def test_start_up_takes_a_fixed_number_of_collectives_and_bytes_in_proportion_to_the_ranks(monkeypatch):
    few, many = started(9, monkeypatch), started(65, monkeypatch)
    assert few.calls == many.calls <= 33
    assert (len(few.others), len(many.others)) == (8, 64)  # the watchdog's
    for name, size in few.received.items():
        assert name == "barrier" or many.received[name] / size < 1.3 * 64 / 8, name
