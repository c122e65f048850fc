"""Rank 0 of many, simulated in one process: what it receives and writes, and how long that takes, by the number of ranks.

python -m tests.bench.simulated 8 64 512     ResNet-50 on small images: a start, a quiet, a logged and a saving step
"""

import collections
import contextlib
import itertools
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor, nn

from hvdtrain import training
from hvdtrain.engines.single import SerialEngine
from hvdtrain.guards.connection import say_hello

MIB = 2**20
FLAGS = "--engine serial --no-progress --threads 1 --check-steps 0 --log-steps 3 --checkpoint-steps 4 --output-dir"
STEPS = 9
SHOWN = {2: "quiet step", 3: "logged step", 8: "saving step"}  # not the first save, which is read back
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

    def same_on_all(self, content: bytes, name: str) -> bool:
        return super().same_on_all(content, name) and HOST not in content

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


@contextlib.contextmanager
def simulated(ranks: int) -> Iterator[None]:
    """Context manager in which the engine that is started is rank 0 of so many."""
    kind = type("RankZeroOfMany", (RankZero,), {"ranks": ranks})
    with (
        mock.patch("hvdtrain.engines.choice.engine_class", return_value=kind),
        mock.patch.object(socket, "gethostname", HOST.decode),
        mock.patch("hvdtrain.guards.connection.own_address_towards", return_value="127.0.0.1"),
    ):
        yield


def measure(ranks: int, net: nn.Module, out: Path) -> dict[str, tuple[float, float]]:
    """Return seconds and bytes received, of a start and of the steps to be shown."""
    flags = training.parser("simulated", None, epochs=1, batch_size=2).parse([*FLAGS.split(), str(out)])
    points = [(time.perf_counter(), 0)]
    with simulated(ranks), training.start(flags) as run:
        engine: RankZero = run.engine
        note = lambda: points.append((time.perf_counter(), sum(engine.received.values())))  # noqa: E731
        model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.0))
        note()
        for _ in run.epochs(1):
            for step in run.steps(STEPS * 2 * ranks):
                note()
                for _ in step.batches():
                    step.backward(model(torch.ones(2, 3, 32, 32)).square().mean())
                step.update()
            note()
    differences = [tuple(b - a for a, b in zip(*pair, strict=True)) for pair in itertools.pairwise(points)]
    return {"start": differences[0]} | {name: differences[number + 1] for number, name in SHOWN.items()}


def main() -> None:
    from torchvision.models import resnet50

    print("| ranks | " + " | ".join(["start", *SHOWN.values()]) + " | checkpoint |")
    for ranks in map(int, sys.argv[1:]):
        with tempfile.TemporaryDirectory() as folder:
            parts = measure(ranks, resnet50(), Path(folder))
            size = max(path.stat().st_size for path in Path(folder).rglob("*.safetensors"))
        cells = [f"{seconds:.2f} s, {received / MIB:,.3f} MiB" for seconds, received in parts.values()]
        print(f"| {ranks} | {' | '.join(cells)} | {size / MIB:,.1f} MiB |", flush=True)


if __name__ == "__main__":
    main()
