"""DistributedDataParallel: torch's own data parallelism, over Gloo on CPUs and NCCL on GPUs.

Started by torchrun, which says where the ranks meet, or as Horovod is, by mpirun, horovodrun, srun or hvdtrain.starter:
there this file finds a meeting point.
"""

import contextlib
import gc
import importlib
import inspect
import itertools
import os
import socket
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hvdtrain.engines.base import Engine, Reduction, collective
from hvdtrain.engines.errors import UserError
from hvdtrain.engines.rendezvous import horovods_server, meeting_point, own_address_towards, put, wait_for

MEETING_SECONDS = 120.0  # how long ranks wait for each other at the start
MEETINGS = itertools.count()  # of this process, the same on every rank


class GradientHook:
    """DDP's communication hook: what happens to a bucket of gradients once this rank has computed it.

    Divides before it sums, in the gradients' own type, and only then casts to the wire's: DDP's own fp16 hook casts first,
    so that 100,000 becomes infinity.
    """

    def __init__(self, size: int, compression: str, predivide: float, reduction: str):
        self.wire_dtype = torch.float16 if compression == "fp16" else None
        self.predivide = predivide
        self.factor_after = predivide / size if reduction == "average" else predivide
        self.ready = 0.0  # time.perf_counter at which this rank's last gradient was there

    def reduce(self, state, bucket) -> torch.futures.Future[Tensor]:
        if bucket.is_last():
            self.ready = time.perf_counter()
        buffer = bucket.buffer()
        wire = buffer if self.predivide == 1.0 else buffer / self.predivide
        wire = wire if self.wire_dtype is None else wire.to(self.wire_dtype)
        future = torch.distributed.all_reduce(wire, async_op=True).get_future()

        def finish(done: torch.futures.Future) -> Tensor:
            return buffer.copy_(done.value()[0]).mul_(self.factor_after)

        return future.then(finish)


def give_gradients_the_weights_strides(model: nn.Module) -> None:
    """Write gradients' strides as the weights have them, where one place in memory has two spellings.

    A convolution of one channel on images in channels_last gives its gradient [16, 1, 5, 5] the strides (25, 1, 5, 1),
    where the weight has (25, 25, 5, 1): the same bytes. DDP compares the numbers, and each rank would warn of copies.
    """
    for parameter in model.parameters():
        if parameter.requires_grad and 1 in parameter.shape and parameter.is_contiguous():
            shape, strides = parameter.shape, parameter.stride()

            def same_strides(gradient: Tensor, shape=shape, strides=strides) -> Tensor:
                return gradient.as_strided(shape, strides) if gradient.is_contiguous() else gradient

            parameter.register_hook(same_strides)


class DdpEngine(Engine):
    name = "ddp"
    reductions = ("sum", "average", "min", "max", "product")
    lacks: ClassVar[dict[str, tuple | None]] = {"reduction": ("adasum",)}

    def __init__(self, *, tuning: bool, rank: int, size: int, launcher: str):
        super().__init__(tuning=tuning, rank=rank, size=size, launcher=launcher)
        dist = torch.distributed
        if not dist.is_available():
            raise UserError("this torch was built without torch.distributed: use --engine horovod or serial")
        nccl = torch.cuda.is_available() and dist.is_nccl_available()
        # Optimizers import it. Imported later, its functions would hold the group in their default arguments for ever, and
        # `shutdown` could not end the group's threads.
        importlib.import_module("torch.distributed.nn.functional")
        try:
            dist.init_process_group(
                # Gloo carries what lives on the CPU (counts, messages), whatever carries the gradients.
                "cpu:gloo,cuda:nccl" if nccl else "gloo",
                store=self._meet(rank, size, launcher),
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=MEETING_SECONDS),
            )
        except (RuntimeError, ValueError, OSError) as error:
            first = str(error).splitlines()[0]
            raise UserError(
                f"the ranks did not meet: {first}: check MASTER_ADDR, MASTER_PORT and the network"
            ) from error
        hosts = self.all_gather_object(socket.gethostname(), "hosts")
        self.local_rank = Counter(hosts[:rank])[hosts[rank]]
        self.local_size = Counter(hosts)[hosts[rank]]
        self.description = "ddp over Gloo"
        self._hooks: list[GradientHook] = []  # one for each model

    @staticmethod
    def _meet(rank: int, size: int, launcher: str):
        """Return the key-value store at which the ranks find each other; rank 0 serves it."""
        dist = torch.distributed
        if size == 1:
            return dist.HashStore()
        if "MASTER_ADDR" in os.environ and "MASTER_PORT" in os.environ:
            host, port = meeting_point(os.environ, launcher)
            if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # torchrun serves it itself
                return dist.PrefixStore("hvdtrain", dist.TCPStore(host, port, size, is_master=False))
        elif launcher.startswith("mpirun"):
            return DdpEngine._meet_over_mpi(rank, size)
        elif server := horovods_server(os.environ):
            return DdpEngine._meet_over_rendezvous(rank, size, server)
        else:
            host, port = meeting_point(os.environ, launcher)
        if rank == 0:
            return serve(host, port, size, wait_for_workers=True)
        return dist.TCPStore(host, port, size, is_master=False, timeout=timedelta(seconds=MEETING_SECONDS))

    @staticmethod
    def _meet_over_mpi(rank: int, size: int):
        """Let the kernel choose a free port on rank 0, and tell the others over MPI, as text: nothing is pickled."""
        try:
            from mpi4py import MPI
        except ImportError as error:
            raise UserError(f"ddp under mpirun needs mpi4py ({error}): pip install mpi4py, or use torchrun") from error
        dist = torch.distributed
        timeout = timedelta(seconds=MEETING_SECONDS)
        engine = MPI.COMM_WORLD
        same_host = engine.Split_type(MPI.COMM_TYPE_SHARED).size == size
        message = bytearray(256)
        store = None
        if rank == 0:
            host = "127.0.0.1" if same_host else socket.gethostname()
            store = serve(host, 0, size, wait_for_workers=False)
            told = f"{host} {store.port}".encode()
            message[: len(told)] = told
        engine.Bcast(message, root=0)
        if store is None:
            host, port = message.rstrip(b"\0").decode().split()
            store = dist.TCPStore(host, int(port), size, is_master=False, timeout=timeout)
        return store

    @staticmethod
    def _meet_over_rendezvous(rank: int, size: int, server: tuple[str, int]):
        """Let the kernel choose a free port on rank 0, and tell the others through the server that Horovod would use."""
        dist = torch.distributed
        key = str(next(MEETINGS))
        if rank == 0:
            host = own_address_towards(server[0])
            store = serve(host, 0, size, wait_for_workers=False)
            put(server, "hvdtrain.ddp", key, f"{host} {store.port}".encode())
            return store
        host, port = wait_for(server, "hvdtrain.ddp", key, MEETING_SECONDS).decode().split()
        return dist.TCPStore(host, int(port), size, is_master=False, timeout=timedelta(seconds=MEETING_SECONDS))

    def choose_device(self, wanted: str) -> torch.device:
        gpus = torch.cuda.device_count() if wanted != "cpu" else 0
        if wanted == "cuda" and gpus == 0:
            raise UserError(self.NO_GPU)
        if not gpus:
            return torch.device("cpu")
        self.description = "ddp over NCCL"
        return self.gpu_of_local_rank(gpus)

    def distribute_model(self, model: nn.Module, how: Reduction) -> nn.Module:
        if not any(parameter.requires_grad for parameter in model.parameters()):  # DDP refuses it
            return model
        # Batch norm's running statistics are averaged before evaluation (`average_buffers`), not copied in every forward.
        known = inspect.signature(nn.parallel.DistributedDataParallel).parameters
        sync = (
            "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
        )  # renamed in torch 2.15
        options: dict[str, Any] = {sync: False, "find_unused_parameters": how.find_unused_parameters}
        if self.device.type == "cuda":
            options["device_ids"] = [self.device.index]
        give_gradients_the_weights_strides(model)
        replica = nn.parallel.DistributedDataParallel(model, **options)
        hook = GradientHook(self.size, how.compression, how.predivide, how.reduction)
        self._hooks.append(hook)
        replica.register_comm_hook(None, hook.reduce)
        return replica

    @contextlib.contextmanager
    def micro_batch(
        self, models: Sequence[Any], optimizers: Sequence[torch.optim.Optimizer], number: int, count: int
    ) -> Iterator[None]:
        for hook in self._hooks:
            hook.ready = 0.0
        with contextlib.ExitStack() as stack:
            if number < count - 1:  # gradients travel with the last one only
                for model in models:
                    if isinstance(model, nn.parallel.DistributedDataParallel):
                        stack.enter_context(model.no_sync())
            yield

    def waits(self) -> bool:
        return any(hook.ready > 0.0 for hook in self._hooks)

    def gradients_ready(self) -> float:
        # By the time backward() returns, DDP has waited for the others: what came after the last bucket was that wait.
        return max((hook.ready for hook in self._hooks), default=0.0) or time.perf_counter()

    @collective
    def all_reduce_(self, tensor: Tensor, op: str, name: str) -> None:
        ops = torch.distributed.ReduceOp
        kind = {"sum": ops.SUM, "average": ops.SUM, "min": ops.MIN, "max": ops.MAX, "product": ops.PRODUCT}[op]
        torch.distributed.all_reduce(tensor, op=kind)
        if op == "average":  # Gloo has none of its own
            exact = tensor.is_floating_point() or tensor.is_complex()
            tensor.div_(self.size) if exact else tensor.floor_divide_(self.size)

    @collective
    def all_gather(self, tensor: Tensor, name: str) -> Tensor:
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        torch.distributed.all_gather(parts, tensor)
        return torch.stack(parts)

    @collective
    def broadcast_(self, tensor: Tensor, name: str) -> None:
        torch.distributed.broadcast(tensor, src=0)

    def shutdown(self) -> None:
        # Trap: Gloo's threads let go of tensors and callbacks only after they have reported a sum as done. One that does so
        # while Python is being torn down aborts the process. They are joined with the last reference to the group: DDP holds
        # some in cycles.
        self._hooks = []
        gc.collect()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def serve(host: str, port: int, size: int, *, wait_for_workers: bool):
    """Return a key-value store served at `host`'s address; port 0: a free one. Raises OSError where it cannot be had.

    The store has no authentication, and would listen on every interface; so it is given a socket that listens on one.
    """
    listener = socket.create_server((host, port))
    return torch.distributed.TCPStore(
        host,
        listener.getsockname()[1],
        size,
        is_master=True,
        wait_for_workers=wait_for_workers,
        timeout=timedelta(seconds=MEETING_SECONDS),
        master_listen_fd=listener.detach(),
    )
