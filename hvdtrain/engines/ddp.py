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
from hvdtrain.engines.base import Engine, Reduction
from hvdtrain.engines.compression import as_carried, writable
from hvdtrain.engines.errors import UserError
from hvdtrain.engines.launchers import remedy
from hvdtrain.engines.reducer import GradientHook, ReducedModel, reduce_in_order
from hvdtrain.guards.activity import collective
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
COLLECTIVES_TIMEOUT = timedelta(days=30)  # none: guards/judge.py says how long a rank may keep the others waiting
MEETINGS = itertools.count()  # number of rendezvous in this process; the same on every rank


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
    _of_run: Sequence[ReducedModel] = ()
    _optimizers: Sequence[torch.optim.Optimizer] = ()  # of the run
    _expected: ReducedModel | None = None  # whose reducer takes part in the current backward pass
    _apart: Sequence[torch.optim.Optimizer] = ()  # whose gradients are reduced after it

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
        self._of_run = [model for model in self._models if any(map(model.holds, models))]
        self._optimizers, self._expected, self._apart = optimizers, None, ()
        for model in self._models:
            model.hook.ready = 0.0
            if number == 0:
                model.follow_freezing()
        self._reduces = number == count - 1  # only the last micro-batch reduces gradients
        if self._reduces and self._is_simple and not self._of_run[0].may_lack_gradients:
            self._of_run[0].begin()  # also of a backward pass that is not by `Step`
        yield
        self._end_backward()
        # backward() returns after DDP has waited for the other ranks; the time after the last bucket is waiting.
        self.gradients_ready_at = max((model.hook.ready for model in self._models), default=0.0) or None

    @property
    def _is_simple(self) -> bool:
        return len(self._of_run) == 1 and len(self._optimizers) <= 1

    def begin_backward(self, loss: Tensor, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        if not self._reduces:
            return
        self._end_backward()  # that of other optimizers
        chosen = set[nn.Parameter]()
        for optimizer in optimizers if not self._is_simple else ():
            chosen.update(parameter for group in optimizer.param_groups for parameter in group["params"])
        model, *others = [one for one in self._of_run if self._is_simple or not chosen.isdisjoint(one.parameters)]
        is_whole = len(optimizers) == len(self._optimizers) or chosen.issuperset(model.trained())
        if not others and is_whole:
            self._expected = model
            if model.may_lack_gradients or not self._is_simple or model.hook.ready:
                model.hook.ready = 0.0
                model.begin(loss)
            return
        # DDP's reducer takes the gradients of one whole model. Those of several would be reduced in the order of this
        # rank's backward pass, and another rank's may use the models in another order, or not all of them.
        self._apart = optimizers
        loss.register_hook(lambda _: torch.autograd.Variable._execution_engine.queue_callback(self._end_backward))

    def _end_backward(self) -> None:
        """Reduce what was not reduced in the backward pass. A collective."""
        model, self._expected = self._expected, None
        if model is not None and not model.hook.ready:
            model.reduce_nothing()
        apart, self._apart = self._apart, ()
        for optimizer in apart:
            trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
            model = self._of_run[0]
            reduce_in_order(trained, model.hook, may_lack_gradients=model.may_lack_gradients)

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
