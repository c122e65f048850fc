"""The `ddp` engine: torch's DistributedDataParallel, over Gloo on CPUs and NCCL on GPUs.

torchrun tells the ranks where to rendezvous. Under mpirun, horovodrun, srun or hvdtrain.starter, this file sets up the
rendezvous itself.
"""

import contextlib
import gc
import importlib
import inspect
import itertools
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from hvdtrain.engines import gpu
from hvdtrain.engines.base import WIRE_DTYPES, Engine, Reduction
from hvdtrain.engines.compression import as_carried, writable
from hvdtrain.engines.errors import UserError
from hvdtrain.engines.launchers import remedy
from hvdtrain.guards.activity import Activity, collective
from hvdtrain.guards.evidence import record_collectives
from hvdtrain.launching.rendezvous import (
    first_few,
    horovods_server,
    meeting_point,
    own_address_towards,
    put_value,
    require_free_ports,
    wait_for,
)

MEETING_SECONDS = 120.0  # how long ranks wait for each other at the start
COLLECTIVES_TIMEOUT = timedelta(days=30)  # none: guards/timeouts.py says how long a rank may keep the others waiting
MEETINGS = itertools.count()  # number of rendezvous in this process; the same on every rank


class GradientHook:
    """A DDP communication hook: reduces a bucket of gradients over all ranks once this rank has computed it.

    It divides the gradients in their own type first, then casts them to the network type.
    """

    def __init__(
        self, size: int, compression: str, predivide: float, reduction: str, activity: Activity, group: Any = None,
        of_all_ranks: bool = True,
    ):  # fmt: skip
        """group: of torch.distributed; None: the default one. of_all_ranks: see `Engine`."""
        self.activity, self.group, self.of_all_ranks = activity, group, of_all_ranks
        self.wire_dtype = WIRE_DTYPES[compression]
        self.predivide = predivide
        self.factor_after = predivide / size if reduction == "average" else predivide
        self.ready = 0.0  # when this rank's last gradient was computed (time.perf_counter)

    # DDP accepts no other annotation of `bucket` than torch.distributed.GradBucket, which a torch without it lacks.
    def reduce(self, state: object, bucket) -> torch.futures.Future[Tensor]:  # type: ignore[no-untyped-def]
        """Start the all-reduce of `bucket`. Return a future of the reduced buffer."""
        if bucket.is_last():
            self.ready = time.perf_counter()
            # This rank's part is done. The step resets `collective` after backward.
            self.activity.call("backward", self.of_all_ranks)
        buffer: Tensor = bucket.buffer()
        # Divided before the cast: of float16, DDP's own hook makes infinity of a gradient of 100,000.
        wire = buffer if self.predivide == 1.0 else buffer / self.predivide
        wire = wire if self.wire_dtype is None else wire.to(self.wire_dtype)
        future = torch.distributed.all_reduce(wire, group=self.group, async_op=True).get_future()

        def finish(done: torch.futures.Future[list[Tensor]]) -> Tensor:
            return buffer.copy_(done.value()[0]).mul_(self.factor_after)

        return future.then(finish)


def give_gradients_the_weights_strides(model: nn.Module) -> None:
    """Give each gradient the strides of its weight where both describe the same memory layout.

    With one input channel and channels_last images, the gradient of a convolution weight [16, 1, 5, 5] has the strides
    (25, 1, 5, 1), the weight (25, 25, 5, 1): the same layout.
    """
    for parameter in model.parameters():
        if parameter.requires_grad and 1 in parameter.shape and parameter.is_contiguous():
            shape, strides = parameter.shape, parameter.stride()

            def same_strides(gradient: Tensor, shape: torch.Size = shape, strides: tuple[int, ...] = strides) -> Tensor:
                return gradient.as_strided(shape, strides) if gradient.is_contiguous() else gradient

            # DDP compares strides as numbers, and would warn on each rank.
            parameter.register_hook(same_strides)


def settle_buckets(replica: nn.parallel.DistributedDataParallel) -> None:
    """Let DDP assign gradients to buckets now, not after the first step. A collective.

    In the first step of a process, DDP has one bucket; then it assigns gradients to others, in the order in which they were
    ready. Here the first backward pass has gradients of zero.
    """
    trained = [parameter for parameter in replica.module.parameters() if parameter.requires_grad]
    with torch.enable_grad():
        replica.reducer.prepare_for_backward([])
        # The last ones are ready first, as in the backward pass of most models.
        nothing = [parameter.flatten()[:0].sum() for parameter in trained]
        torch.autograd.backward(nothing, [torch.ones_like(each) for each in nothing])
    # The sum over three or more ranks is rounded differently at each place of a bucket.
    # Else the first step after a restart differs.
    replica.reducer._rebuild_buckets()
    for parameter in trained:
        parameter.grad = None


class ReducedModel:
    """A model whose gradients DDP's reducer sums. The script calls the model itself, in any way: a method, a layer of it.

    DDP's own forward pass only tells its reducer that a backward pass will follow. Here, `begin` does.
    """

    def __init__(self, model: nn.Module, options: dict[str, Any], hook: GradientHook):
        self._model, self._options, self.hook = model, options, hook
        self.parameters = list(model.parameters())
        give_gradients_the_weights_strides(model)
        self._wrap()

    def holds(self, model: nn.Module) -> bool:
        return self._model is model

    def overlaps(self, model: nn.Module) -> bool:
        """Return whether one of the two is a part of the other: each gradient would be reduced twice."""
        return model in self._model.modules() or self._model in model.modules()

    def _wrap(self) -> None:
        self._trained = [parameter.requires_grad for parameter in self.parameters]
        self._replica: nn.parallel.DistributedDataParallel | None = None
        if any(self._trained):  # DDP rejects others
            self._replica = nn.parallel.DistributedDataParallel(self._model, **self._options)
            self._replica.register_comm_hook(None, self.hook.reduce)
            if not self._options["find_unused_parameters"]:  # else DDP keeps its first buckets
                settle_buckets(self._replica)

    def follow_freezing(self) -> None:
        """Take in which parameters are trained by now. A collective if that has changed, as on all ranks."""
        if [parameter.requires_grad for parameter in self.parameters] != self._trained and any(
            parameter.requires_grad for parameter in self.parameters
        ):
            self._replica = None
            gc.collect()  # the old reducer's buckets
            self._wrap()

    def begin(self) -> None:
        """Expect a backward pass, which then reduces the gradients."""
        if self._replica is not None and not self._options["find_unused_parameters"]:
            self._replica.reducer.prepare_for_backward([])

    def begin_again(self, loss: Tensor) -> None:
        """The same, right before the backward pass of `loss`: where it may use some of the parameters only, and where the
        script has called another `backward` before."""
        if self._replica is not None and (self._options["find_unused_parameters"] or self.hook.ready):
            self._replica.reducer.prepare_for_backward([loss] if self._options["find_unused_parameters"] else [])

    def reduce_nothing(self) -> None:
        """Take part in the reduction where no loss of this rank depends on the model: the other ranks wait for it."""
        if self._replica is not None and self._options["find_unused_parameters"]:
            trained = [parameter for parameter in self.parameters if parameter.requires_grad]
            # DDP's reducer begins with the gradient of one parameter, here zero. The others stay unused on this rank.
            nothing = trained[-1].flatten()[:0].sum()
            self._replica.reducer.prepare_for_backward([nothing])
            nothing.backward()

    def leave(self) -> None:
        self._replica = None


def create_group(store: "torch.distributed.Store", rank: int, size: int) -> None:
    """Create torch's default group. Its ranks meet at `store`."""
    dist = torch.distributed
    # Optimizers import this module. If it is imported after the group is created, its functions keep a reference to the
    # group in their default arguments, and `shutdown` cannot end the group's threads.
    importlib.import_module("torch.distributed.nn.functional")
    nccl = torch.cuda.is_available() and dist.is_nccl_available()
    if nccl:
        # torch's own monitor of NCCL ends a process whose thread has not run for eight minutes, so also one that was
        # suspended as long. Hung ranks are found by guards/watch.py.
        os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")
        record_collectives()
    # Gloo always transfers CPU tensors (counts, messages); NCCL transfers gradients on GPUs.
    backend = "cpu:gloo,cuda:nccl" if nccl else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=COLLECTIVES_TIMEOUT)


class DdpEngine(Engine):
    """Trains with `torch.nn.parallel.DistributedDataParallel`. Raises UserError if the ranks cannot connect."""

    name = "ddp"
    _group: Any = None  # of torch.distributed; None: the default one
    _of_objects: Any = None  # group in which ranks begin to exchange objects; None: the same
    _first = 0  # its first rank, by its number in the default group
    _reduces = False  # whether the current micro-batch is the step's last one
    _has_loss = False  # whether that has had a loss

    def __init__(self, *, tuning: bool, rank: int, size: int, launcher: str):
        super().__init__(tuning=tuning, rank=rank, size=size, launcher=launcher)
        dist = torch.distributed
        if not dist.is_available():
            raise UserError("this torch was built without torch.distributed: use --engine horovod or serial")
        if dist.is_initialized():
            raise UserError("the program has called dist.init_process_group: leave it out, training.start does it")
        if size > 1:
            require_free_ports()
        try:
            store = self._meet(rank, size, launcher)
            wait_for_all(store, rank, size)
            # NCCL connects in the first collective on GPUs: ranks wait there, at the store, for one that still reads data.
            store.set_timeout(COLLECTIVES_TIMEOUT)
            create_group(store, rank, size)
            # Gloo aborts the process where one rank is in a collective of another size. So what one rank may call alone
            # begins in a group of its own, where all messages have one size.
            self._of_objects = dist.new_group(backend="gloo", timeout=COLLECTIVES_TIMEOUT)
        except (RuntimeError, ValueError, OSError) as error:
            first = str(error).splitlines()[0]
            names = ["GLOO_SOCKET_IFNAME"] * ("Unable to find address for" in first) or ["MASTER_ADDR", "MASTER_PORT"]
            remedy = f"check {', '.join(names)} and the network"
            if "open files" in first:
                remedy = "let a process open more files (ulimit -n)"
            raise UserError(f"the ranks did not meet: {first}: {remedy}") from error
        hosts = self.all_gather_object(socket.gethostname(), "hosts")
        self.local_rank = Counter(hosts[:rank])[hosts[rank]]
        self.local_size = Counter(hosts)[hosts[rank]]
        self.description = "ddp over Gloo"
        self._models: list[ReducedModel] = []

    @staticmethod
    def _meet(rank: int, size: int, launcher: str) -> "torch.distributed.Store":
        """Return the key-value store that the ranks use to find each other. Rank 0 serves it, or torchrun."""
        if size == 1:
            return torch.distributed.HashStore()
        if launcher == "horovodrun" and (server := horovods_server(os.environ)):  # also of hvdtrain.starter
            # First: MASTER_PORT, by which starters meet on several hosts, is taken by this server.
            group, key = "hvdtrain.ddp", str(next(MEETINGS))
            if rank:
                return join(wait_for(server, group, key, MEETING_SECONDS).decode(), size)
            store, address = serve_store(own_address_towards(server.host), 0, size)
            put_value(server, group, key, address.encode())
            return store
        if launcher.startswith("mpirun") and not {"MASTER_ADDR", "MASTER_PORT"} <= set(os.environ):
            try:
                from mpi4py import MPI
            except ImportError as error:
                advice = "pip install mpi4py, or use torchrun"
                raise UserError(f"ddp under mpirun needs mpi4py ({error}): {advice}") from error
            ranks = MPI.COMM_WORLD
            if ranks.size != size:
                message = f"{launcher} announced {size} ranks, but mpi4py sees {ranks.size}: {remedy(launcher, 'ddp')}"
                raise UserError(message, everywhere=True)
            same_host = ranks.Split_type(MPI.COMM_TYPE_SHARED).size == size
            if rank:
                return join(ranks.bcast(None), size)
            store, address = serve_store("127.0.0.1" if same_host else socket.gethostname(), 0, size)
            ranks.bcast(address)
            return store
        host, port = meeting_point(os.environ, launcher)
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # torchrun serves the store
            # The store outlives this engine; its keys must not meet those of an earlier one, also before a restart.
            meeting = f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}.{next(MEETINGS)}"
            return torch.distributed.PrefixStore(f"hvdtrain.{meeting}", join(f"{host} {port}", size))
        return join(f"{host} {port}", size) if rank else serve_store(host, port, size)[0]

    def choose_device(self, wanted: str) -> torch.device:
        gpus = gpu.usable_gpus(wanted)
        if not gpus:
            return torch.device("cpu")
        self.description = "ddp over NCCL"
        if torch.version.hip:
            self.notes.append("an AMD GPU (ROCm): expected to train as others do, but never tried")
        return gpu.of_local_rank(self.local_rank, gpus)

    def distribute_model(self, model: nn.Module, reduction: Reduction) -> nn.Module:
        if any(one.overlaps(model) for one in self._models) and self.size > 1:
            remedy = "give run.prepare() the outer one, whose weights are saved with it"
            kind = type(model).__name__
            raise UserError(
                f"run.prepare() got a {kind} beside a model that holds it, or is in it: {remedy}", everywhere=True
            )
        # Buffers are made the same on all ranks before an evaluation (`SharedBuffers`), not in every forward pass. The
        # option was renamed in torch 2.15. Trap: `init_sync` fails for buffers of types that Gloo does not know, such as
        # uint16. `broadcast_model` sends them as bytes.
        known = inspect.signature(nn.parallel.DistributedDataParallel).parameters
        sync = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
        options: dict[str, Any] = {sync: False, "find_unused_parameters": reduction.find_unused_parameters}
        options |= {"process_group": self._group, "gradient_as_bucket_view": True}  # else each gradient is copied back
        if "init_sync" in known:
            options["init_sync"] = False
        if self.device.type == "cuda":
            options["device_ids"] = [self.device.index]
        hook = GradientHook(
            self.size,
            reduction.compression,
            reduction.predivide,
            reduction.reduction,
            self.activity,
            self._group,
            self.of_all_ranks,
        )
        self._models.append(ReducedModel(model, options, hook))
        return model

    @contextlib.contextmanager
    def micro_batch(
        self, models: Sequence[Any], optimizers: Sequence[torch.optim.Optimizer], number: int, count: int
    ) -> Iterator[None]:
        self._has_loss = False
        for model in self._models:
            model.hook.ready = 0.0
            if number == 0:
                model.follow_freezing()
        self._reduces = number == count - 1  # only the last micro-batch reduces gradients
        if self._reduces:
            for model in self._models:
                model.begin()
        yield
        if self._reduces and self._has_loss and len(models) == 1:  # of several, the other ranks' choice is not known
            for model in self._models:
                if model.holds(models[0]) and not model.hook.ready:
                    model.reduce_nothing()
        # backward() returns after DDP has waited for the other ranks; the time after the last bucket is waiting.
        self.gradients_ready_at = max((model.hook.ready for model in self._models), default=0.0) or None

    def begin_backward(self, loss: Tensor, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._has_loss = True
        if self._reduces:
            for model in self._models:
                model.begin_again(loss)

    def synchronize(self, optimizer: torch.optim.Optimizer) -> None:
        for model in self._models:
            if model.hook.ready:
                continue
            own = {parameter for group in optimizer.param_groups for parameter in group["params"]}
            if any(parameter in own and parameter.grad is not None for parameter in model.parameters):
                remedy = (
                    "give run.prepare() its parts as models of their own, or leave the optimizer out of step.backward()"
                )
                raise UserError(f"under --engine ddp, the gradients of a part of a model are not reduced: {remedy}")

    @collective
    def all_reduce_(self, tensor: Tensor, op: str, name: str) -> None:
        self._reduce(tensor, op, self._group)
        if op == "average":  # Gloo does not support it
            exact = tensor.is_floating_point() or tensor.is_complex()
            tensor.div_(self.size) if exact else tensor.floor_divide_(self.size)

    @collective
    def all_reduce_first_(self, tensor: Tensor, op: str, name: str) -> None:
        self._reduce(tensor, op, self._of_objects or self._group)

    @staticmethod
    def _reduce(tensor: Tensor, op: str, group: Any) -> None:
        ops = torch.distributed.ReduceOp
        kind = {"sum": ops.SUM, "average": ops.SUM, "min": ops.MIN, "max": ops.MAX, "product": ops.PRODUCT}[op]
        torch.distributed.all_reduce(tensor, op=kind, group=group)

    @collective
    def all_gather(self, tensor: Tensor, name: str) -> Tensor:
        return self._gathered(tensor, self._group)

    @collective
    def all_gather_first(self, tensor: Tensor, name: str) -> Tensor:
        return self._gathered(tensor, self._of_objects or self._group)

    def _gathered(self, tensor: Tensor, group: Any) -> Tensor:
        sent = as_carried(tensor.contiguous())
        parts = [torch.empty_like(sent) for _ in range(self.size)]
        torch.distributed.all_gather(parts, sent, group=group)
        return torch.stack(parts).reshape(-1).view(tensor.dtype).reshape(self.size, *tensor.shape)

    def begin(self, kind: str, tensor: Tensor, lengths: Sequence[int], name: str) -> Callable[[], Tensor]:
        dist, how = torch.distributed, {"group": self._group, "async_op": True}
        if kind == "sum":
            result, work = tensor, dist.all_reduce(tensor, **how)
        else:
            lengths = lengths if kind == "parts" else [len(tensor)] * self.size
            result, sent = tensor.new_empty(sum(lengths)), as_carried(tensor)
            width = len(sent) // len(tensor)  # of a number, in elements that are carried
            splits = [width * length for length in lengths]
            if kind == "all":
                work = dist.all_gather(list(as_carried(result).split(splits)), sent, **how)
            else:
                each = [len(sent) // self.size] * self.size
                work = dist.all_to_all_single(as_carried(result), sent, splits, each, **how)

        def received() -> Tensor:
            work.wait()
            return result

        return received

    @collective
    def broadcast_(self, tensor: Tensor, name: str) -> None:
        with writable(tensor) as sent:
            torch.distributed.broadcast(sent, src=self._first, group=self._group)

    def ending_calls(self) -> list[tuple[ModuleType, str]]:
        return [(torch.distributed, "destroy_process_group")]

    def shutdown(self) -> None:
        # Trap: Gloo's threads release tensors and callbacks only after they have reported a reduction as done. If that
        # happens during interpreter shutdown, the process aborts. The threads are joined when the last reference to the
        # group is dropped; DDP holds references in cycles, so collect them first.
        while self._models:
            self._models.pop().leave()
        self._of_objects = None
        gc.collect()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group(self._group)


def wait_for_all(store: "torch.distributed.Store", rank: int, size: int) -> None:
    """Return once all ranks have called this. Raises TimeoutError with those that have not in time."""
    store.set(f"hvdtrain.{rank}", "")
    if store.add("hvdtrain.arrived", 1) >= size:
        store.set("hvdtrain.all", "")
    try:
        # Not for each rank's key: the questions of all ranks would be the square of their number.
        store.wait(["hvdtrain.all"], timedelta(seconds=MEETING_SECONDS))
    except RuntimeError as error:
        if late := [other for other in range(size) if not store.check([f"hvdtrain.{other}"])]:
            raise TimeoutError(f"rank {first_few(late)} did not connect within {MEETING_SECONDS:.0f} s") from error


def serve_store(host: str, port: int, size: int) -> tuple["torch.distributed.TCPStore", str]:
    """Return a TCPStore that listens on `host` and `port` (0: any free port), and its address, as `join` takes it.

    Raises OSError if the port is not available.
    """
    # TCPStore has no authentication, and listens on all interfaces by default. This socket is bound to one address.
    listener = socket.create_server((host, port))
    port, limit = listener.getsockname()[1], timedelta(seconds=MEETING_SECONDS)
    store = torch.distributed.TCPStore(
        host, port, size, is_master=True, wait_for_workers=False, timeout=limit, master_listen_fd=listener.detach()
    )
    return store, f"{host} {port}"


def join(address: str, size: int) -> "torch.distributed.TCPStore":
    """Return the TCPStore that another rank serves at `address`: "HOST PORT".

    Raises UserError, TimeoutError, RuntimeError.
    """
    host, _, port = address.partition(" ")
    if not port.isdecimal():
        raise UserError(
            f"{address[:80]!r} is not where rank 0 listens: another program uses the port of the rendezvous"
        )
    until = time.monotonic() + MEETING_SECONDS
    # Trap: where nothing listens, torch tries for longer than it is told.
    while not listens(host, int(port)):
        if time.monotonic() > until:
            raise TimeoutError(f"rank 0 did not listen at {host}:{port} within {MEETING_SECONDS:.0f} s")
        time.sleep(0.1)
    limit = timedelta(seconds=MEETING_SECONDS)
    results: list[torch.distributed.TCPStore | Exception] = []

    def connect() -> None:
        try:
            results.append(torch.distributed.TCPStore(host, int(port), size, is_master=False, timeout=limit))
        except Exception as error:
            results.append(error)

    # Trap: torch waits without a limit for the first answer, which another program at this port may never give.
    thread = threading.Thread(target=connect, name="join", daemon=True)
    thread.start()
    thread.join(MEETING_SECONDS)
    if not results:
        raise TimeoutError(f"what listens at {host}:{port} does not answer")
    if isinstance(results[0], Exception):
        raise results[0]
    return results[0]


def listens(host: str, port: int) -> bool:
    """Return whether a program accepts connections at this address."""
    try:
        socket.create_connection((host, port), timeout=5.0).close()
    except OSError:
        return False
    return True
