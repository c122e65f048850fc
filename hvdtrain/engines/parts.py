"""Some of a run's ranks as an engine of their own: those that average their gradients in every step with --sync-every.

Within a host, DDP does that for both engines, over Gloo or NCCL. Horovod's process sets would do it, too, but their
reductions wait for the network between hosts: before each one, Horovod's background thread agrees with all ranks of the
run on what is ready (`RunLoopOnce`, 0.28.1).
"""

import socket
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from hvdtrain.engines.base import Engine, Reduction
from hvdtrain.engines.ddp import COLLECTIVES_TIMEOUT, DdpEngine, create_group, join, serve_store
from hvdtrain.engines.errors import UserError
from hvdtrain.engines.single import SerialEngine
from hvdtrain.launching.processes import boot_id


def host() -> str:
    """Return what tells this host from others: also from another of the same name."""
    return f"{socket.gethostname()} {boot_id()}"


class OneRank(SerialEngine):
    """This rank alone."""

    def __init__(self, whole: Engine):
        super().__init__(tuning=whole.tuning, rank=whole.rank, size=1, launcher="")
        self._numbers = [whole.rank]
        self.of_all_ranks = whole.size == 1
        self.device, self.activity = whole.device, whole.activity

    def ranks(self) -> Sequence[int]:
        return self._numbers


class RanksOfHost(DdpEngine):
    """The ranks of this host. It lasts until `whole` is left, or until the next one is created."""

    def __init__(self, whole: Engine):
        """A collective of `whole`. Raises UserError on every rank."""
        whole.leave_parts()
        hosts = whole.all_gather_object(host(), "parts.hosts")
        self._numbers = [rank for rank, name in enumerate(hosts) if name == hosts[whole.rank]]
        rank, size = self._numbers.index(whole.rank), len(self._numbers)
        Engine.__init__(self, tuning=whole.tuning, rank=rank, size=size, launcher="")
        self.of_all_ranks = size == whole.size
        self.device, self.activity = whole.device, whole.activity
        self.local_rank, self.local_size = rank, size
        self._models = []
        if isinstance(whole, DdpEngine):
            for name in dict.fromkeys(hosts):  # every rank creates all groups, in the same order
                numbers = [number for number, other in enumerate(hosts) if other == name]
                group: Any = torch.distributed.new_group(numbers, timeout=COLLECTIVES_TIMEOUT)
                if whole.rank in numbers:
                    self._group, self._first = group, numbers[0]
        else:
            self._connect(whole, rank, size)
        whole.parts.append(self)
        self.hosts = len(set(hosts))

    def _connect(self, whole: Engine, rank: int, size: int) -> None:
        """Create a default group of torch.distributed with the ranks of this host, which Horovod does not use."""
        store: Any = None
        with whole.raising_together("parts"):
            if not torch.distributed.is_available():
                raise UserError("--sync-within host needs torch.distributed, which this torch was built without")
            store, address = serve_store("127.0.0.1", 0, size) if rank == 0 else (None, "")
        addresses = whole.all_gather_object(address, "parts.addresses")
        with whole.raising_together("parts"):
            try:
                if store is None:
                    store = join(addresses[self._numbers[0]], size)
                store.set_timeout(COLLECTIVES_TIMEOUT)
            except (RuntimeError, OSError) as error:
                first = str(error).splitlines()[0]
                name, remedy = socket.gethostname(), "let them reach 127.0.0.1, or leave --sync-within out"
                raise UserError(f"--sync-within host: the ranks of {name} did not meet: {first}: {remedy}") from error
        create_group(store, rank, size)

    def ranks(self) -> Sequence[int]:
        return self._numbers

    def distribute_model(self, model: nn.Module, reduction: Reduction) -> nn.Module:
        # --compression then means the weights, which local_steps.py exchanges between hosts.
        return super().distribute_model(model, reduction._replace(compression="none", predivide=1.0))
