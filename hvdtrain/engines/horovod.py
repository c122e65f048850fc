"""The `horovod` engine, in the order of Horovod's documentation. Read this file to learn the pattern:

1. tune      (added here: environment variables that Horovod and MPI read once, at the start; tuning.py)
2. hvd.init()
3. one device per local rank
4. hvd.DistributedOptimizer: gradients are averaged between backward() and step() (buckets.py groups them)
5. hvd.broadcast_parameters: every rank starts from rank 0's weights

Comments that begin with "Trap" describe behavior observed with Horovod 0.28.1.
"""

import atexit
import contextlib
import ctypes
import operator
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from hvdtrain.engines import gpu
from hvdtrain.engines.base import WIRE_DTYPES, Engine, Reduction, Setting
from hvdtrain.engines.buckets import buckets, use_buckets
from hvdtrain.engines.compression import (
    GradientCompressor,
    as_carried,
    by_horovod,
    carries_bf16,
    send_buckets_together,
    writable,
)
from hvdtrain.engines.errors import UserError
from hvdtrain.engines.library_settings import FAST, FIXED_SUMS, ON_GPUS, prepare_environment, tuned_environment
from hvdtrain.engines.modules import all_tensors
from hvdtrain.guards import limits
from hvdtrain.guards.activity import collective

# For MPI's own part of its end, which takes 5 ms, and goes on beside Python's, which takes 30. It removes the rank's file in
# /dev/shm.
END_SECONDS = 0.02
BUILD_REMEDY = "run `make setup`, or `python launch/build_horovod.py` to build it into this environment"


class HorovodEngine(Engine):
    """Trains with Horovod over MPI, Gloo or NCCL. Raises UserError if Horovod cannot be imported."""

    name = "horovod"
    tells_missing_gradients = True
    _starts_mpi = False  # whether MPI was started by Horovod, in this process

    def __init__(self, *, tuning: bool, rank: int, size: int, launcher: str):
        super().__init__(tuning=tuning, rank=rank, size=size, launcher=launcher)
        if tuning:
            # One of them is HOROVOD_DISABLE_GROUP_FUSION, for reproducible sums. Trap: it is not safe with `hvd.join()`
            # (engines/library_settings.py). This engine never calls it: uneven last batches are weighted
            # (`sharding.PlannedBatch`).
            self._set(FAST | FIXED_SUMS)

        try:
            # Imported only here: the other engines must work without Horovod.
            import horovod.torch as hvd
        except ImportError as error:
            raise UserError(f"Horovod cannot be imported ({error}): {BUILD_REMEDY}") from error
        self.hvd = hvd
        # Trap: of a build without launch/patches/optional/caller-waits.patch, a stream may read sums before they are there.
        waits = hasattr(hvd.mpi_ops.mpi_lib, "horovod_torch_caller_waits")
        if tuning and waits and hvd.nccl_built() and torch.cuda.device_count():
            self._set(ON_GPUS)
        self._hows: dict[Any, Reduction] = {}  # by optimizer
        self._named: dict[Any, list[nn.Parameter]] = {}  # its parameters, in the order of the model
        self._trained: dict[Any, list[nn.Parameter]] = {}  # those of them that its groups hold: not frozen
        self._hooked: dict[Any, list[nn.Parameter]] = {}  # those that Horovod has given a hook

        self.notes += prepare_environment(size, launcher, gloo_built=hvd.gloo_built())
        # Else Horovod uses the MPI that is there, and leaves it running.
        HorovodEngine._starts_mpi = HorovodEngine._starts_mpi or "mpi4py.MPI" not in sys.modules
        hvd.init()
        self.rank, self.size = hvd.rank(), hvd.size()
        self.local_rank, self.local_size = hvd.local_rank(), hvd.local_size()
        self.reduces_after_backward = self.size > 1
        self.description = f"horovod over {'MPI' if hvd.mpi_enabled() else 'Gloo'}"

    def _set(self, wanted: Mapping[str, str]) -> None:
        """Set variables of Horovod and MPI that the user has not set."""
        settings = tuned_environment(os.environ, wanted)
        os.environ.update(settings)
        self.notes += [Setting(f"{name}={value}") for name, value in settings.items()]

    def choose_device(self, wanted: str) -> torch.device:
        gpus = gpu.usable_gpus(wanted)
        if not gpus:
            return torch.device("cpu")
        if torch.version.hip and not self.hvd.rocm_built():
            raise UserError(
                f"{gpu.gpus(gpus)}, but this Horovod was built without ROCm: use --engine ddp, or --device cpu"
            )
        if not self.hvd.nccl_built():
            remedy = "run `make setup SETUP=--gpu`, or train on the CPU with --device cpu"
            raise UserError(f"{gpu.gpus(gpus)} would be left idle: this Horovod was built without NCCL: {remedy}")
        self.description = "horovod over NCCL"
        return gpu.of_local_rank(self.local_rank, gpus)

    def distribute_optimizer(
        self, optimizer: torch.optim.Optimizer, named: Sequence[tuple[str, nn.Parameter]], reduction: Reduction
    ) -> torch.optim.Optimizer:
        own = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        named = [(name, parameter) for name, parameter in named if parameter in own]
        distributed = distributed_optimizer(self.hvd, optimizer, named, reduction, self.size)
        if self.tuning and self.size > 1:
            with self.raising_together("buckets"):  # hosts may have different environments
                use_buckets(distributed, buckets([parameter for _, parameter in named]))
        self._hows[distributed] = reduction
        self._named[distributed] = [parameter for _, parameter in named]
        self._trained[distributed] = self._hooked[distributed] = [
            p for p in self._named[distributed] if p.requires_grad
        ]
        return distributed

    def refuse_compression(self, kind: str) -> None:
        if kind == "bf16":
            with self.raising_together("compression"):  # hosts may have different builds
                if not carries_bf16():
                    remedy = "run `make setup`, or use --compression fp16"
                    raise UserError(f"--compression bf16: this Horovod was built without bfloat16: {remedy}")

    def micro_batch(
        self, models: Sequence[nn.Module], optimizers: Sequence[Any], number: int, count: int
    ) -> contextlib.AbstractContextManager[None]:
        if number == 0:
            for optimizer in optimizers:
                self._follow_freezing(optimizer)
                if optimizer.backward_passes_per_step != count:  # the last step of an epoch may have fewer passes
                    optimizer.set_backward_passes_per_step(count)
        return contextlib.nullcontext()

    def _follow_freezing(self, optimizer: Any) -> None:
        """Take in which parameters are trained by now, the same on all ranks.

        Horovod gives hooks to those that were trained when the optimizer was made.
        """
        trained = [parameter for parameter in self._named[optimizer] if parameter.requires_grad]
        before = self._trained[optimizer]
        if self.size == 1 or (len(trained) == len(before) and all(map(operator.is_, trained, before))):
            return
        self._trained[optimizer] = trained
        # Trap: of a parameter that was frozen since, Horovod reduces a gradient of zero.
        # Momentum and weight decay then change the weight.
        optimizer._requires_update = set(trained)
        if optimizer._groups is not None:
            use_buckets(optimizer, buckets(trained))
        hooked = set(self._hooked[optimizer])
        for parameter in trained:
            if parameter not in hooked:
                # The node that accumulates a leaf's gradient is only reached through an operation on it.
                # It lives as long as `_grad_accs` has it.
                accumulate: Any = parameter.expand_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr] # it has one
                accumulate.register_hook(optimizer._make_hook(parameter))
                optimizer._grad_accs.append(accumulate)
        self._hooked[optimizer] = [*self._hooked[optimizer], *(p for p in trained if p not in hooked)]

    @collective
    def broadcast_model(self, model: nn.Module) -> None:
        # Optimizer state is broadcast by `Engine.broadcast_optimizer_state`. Trap: Horovod's function of that name takes a
        # real step if the state is empty, and weight decay changes the weights.
        with contextlib.ExitStack() as stack:
            tensors = {
                name: stack.enter_context(writable(tensor, by_horovod(tensor.dtype)))
                for name, tensor in all_tensors(model)
            }
            self.hvd.broadcast_parameters(tensors, root_rank=0)

    @collective
    def synchronize(self, optimizer: Any) -> None:
        if self.size == 1:
            optimizer.synchronize()
            return
        # Trap: a bucket that is complete on one rank, and not on another, is never reduced.
        unused = self._complete(optimizer)
        optimizer.synchronize()
        if self._hows[optimizer].find_unused_parameters:
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            # Trap: over NCCL, Horovod takes no bool.
            used = torch.tensor([parameter not in unused for parameter in parameters], dtype=torch.int32)
            self.all_reduce_(used, "max", "used_parameters")
            for parameter, anywhere in zip(parameters, used.tolist(), strict=True):
                if not anywhere:  # as in a single process, the optimizer skips this parameter
                    parameter.grad = None

    def _complete(self, optimizer: Any) -> set[nn.Parameter]:
        """Run the hooks of parameters that got no gradient in backward. Return the parameters without a gradient."""
        unused = set()
        expected = not self._hows[optimizer].find_unused_parameters
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                left = optimizer._allreduce_delay.get(parameter, 0) if parameter.requires_grad else 0
                if left == 0:
                    continue
                if parameter.grad is None:
                    unused.add(parameter)
                    # As NaN, every rank notices a missing gradient in this step, without an extra message.
                    parameter.grad = torch.full_like(parameter, float("nan") if expected else 0.0)
                hook = optimizer._make_hook(parameter)
                for _ in range(left):
                    hook()
        return unused

    def stepping(self, optimizer: Any) -> contextlib.AbstractContextManager[None]:
        return optimizer.skip_synchronize()  # type: ignore[no-any-return] # of Horovod

    @collective
    def all_reduce_(self, tensor: Tensor, op: str, name: str) -> None:
        hvd = self.hvd
        ops = {"sum": hvd.Sum, "average": hvd.Average, "min": hvd.Min, "max": hvd.Max, "product": hvd.Product}
        hvd.allreduce_(tensor, op=ops[op], name=name)

    @collective
    def all_gather(self, tensor: Tensor, name: str) -> Tensor:
        gathered: Tensor = self.hvd.allgather(
            as_carried(tensor.contiguous(), by_horovod(tensor.dtype)).unsqueeze(0), name=name
        )
        return gathered.reshape(-1).view(tensor.dtype).reshape(self.size, *tensor.shape)

    def begin(self, kind: str, tensor: Tensor, lengths: Sequence[int], name: str) -> Callable[[], Tensor]:
        hvd, sent = self.hvd, as_carried(tensor, by_horovod(tensor.dtype))
        if kind == "sum":
            handle = hvd.allreduce_async_(tensor, op=hvd.Sum, name=name)
        else:
            handle = (hvd.allgather_async if kind == "all" else hvd.alltoall_async)(sent, name=name)

        def received() -> Tensor:
            result = hvd.synchronize(handle)  # of alltoall, with the lengths
            tensors: Tensor = result[0] if isinstance(result, tuple) else result
            return tensors.view(tensor.dtype)

        return received

    @collective
    def broadcast_(self, tensor: Tensor, name: str) -> None:
        with writable(tensor, by_horovod(tensor.dtype)) as sent:
            self.hvd.broadcast_(sent, root_rank=0, name=name)

    def ending_calls(self) -> list[tuple[ModuleType, str]]:
        return [(self.hvd, "shutdown")]

    def shutdown(self) -> None:
        self.hvd.shutdown()

    def leave(self) -> None:
        if not (self.hvd.mpi_enabled() and self._starts_mpi):
            self.shutdown()
            return
        # Not before the process ends: the program may train again, for instance on the next fold.
        shut_down_at_exit(self.hvd, killed=limits.killed())


def distributed_optimizer(
    hvd: ModuleType, optimizer: torch.optim.Optimizer, named: Sequence[tuple[str, nn.Parameter]], reduction: Reduction,
    size: int,
) -> torch.optim.Optimizer:  # fmt: skip
    """Return Horovod's optimizer for `optimizer`. Raises UserError on every rank.

    named: its parameters. size: the number of ranks.
    """
    op = {"average": hvd.Average, "sum": hvd.Sum}[reduction.reduction]
    wire_dtype, predivide, factor_after = WIRE_DTYPES[reduction.compression], 1.0, 1.0
    if reduction.compression != "none" or reduction.predivide != 1.0:
        op, predivide = hvd.Sum, reduction.predivide
        factor_after = predivide / size if reduction.reduction == "average" else predivide
    if complex_ := next((name for name, parameter in named if parameter.is_complex()), None):
        raise UserError(f"{complex_} is complex, which Horovod does not reduce: use --engine ddp", everywhere=True)
    compressor: Any = GradientCompressor(wire_dtype, predivide, factor_after)
    plain = wire_dtype is None and predivide == factor_after == 1.0
    if plain and all(parameter.is_contiguous() for _, parameter in named):
        compressor = hvd.Compression.none
    options: dict[str, Any] = dict(
        named_parameters=named,
        compression=compressor,
        op=op,
        # Horovod sums the micro-batches; the weights of `sharding.PlannedBatch` turn the sum into a mean.
        backward_passes_per_step=reduction.accumulate,
    )
    try:
        distributed: torch.optim.Optimizer = hvd.DistributedOptimizer(optimizer, **options)
    except TypeError as error:
        message = f"{type(optimizer).__name__} cannot be made from parameters alone, as Horovod does ({error})"
        raise UserError(f"{message}: give its arguments defaults, or use --engine ddp", everywhere=True) from error
    except Exception as error:  # whatever the author's class raises, such as one around another optimizer
        message = f"{type(optimizer).__name__} cannot be made from parameters alone, as Horovod does"
        raise UserError(f"{message}: use --engine ddp", everywhere=True) from error
    # Trap: it is another object of the class, made from `param_groups` alone: without the other arguments of the script,
    # hooks, and state that is not empty at the beginning.
    vars(distributed).update({name: value for name, value in vars(optimizer).items() if name != "param_groups"})
    kind: Any = type(distributed)

    def step(self: Any, *closure: Any) -> Any:
        """As Horovod's, which hands on `None` as the closure, and a step of the script's own may take none."""
        if self._should_synchronize:
            self.synchronize()
        self._synchronized = False
        return super(kind, self).step(*closure)

    # torch puts the hooks of an optimizer around the step of each class that is not marked as `hooked`. This step calls that
    # of the script's class, which has them.
    step.hooked = True  # type: ignore[attr-defined] # of a function
    kind.step = step
    if isinstance(compressor, GradientCompressor):
        send_buckets_together(kind, hvd, compressor)
    return distributed


# ---- the end


def shut_down_at_exit(hvd: Any, *, killed: bool) -> None:
    """Shut down `hvd`, the module horovod.torch, when this process ends: all ranks come to the end of MPI together.

    MPI cannot be started again in a process that has shut it down, and the program may train again, for instance on the
    next fold. `hvd.init` then does nothing. Trap: shutting MPI down waits for ranks that work on after training.

    killed: Open MPI's mpirun kills the job, by SIGKILL a second later.
    """
    atexit.unregister(_shut_down)
    atexit.unregister(_shut_down_unanswered)
    # Open MPI's mpirun, as it kills a job, does not answer the last
    # question of MPI_Finalize: the rank would wait until SIGKILL.
    if killed and hasattr(ctypes.CDLL(None), "on_exit"):
        ends = threading.Event()
        thread = threading.Thread(target=lambda: ends.wait() and hvd.shutdown(), name="end of MPI", daemon=True)
        with contextlib.suppress(RuntimeError):  # this user may have no more threads
            thread.start()  # here: since Python 3.12, exit handlers can start none
        atexit.register(_shut_down_unanswered, hvd, ends, thread)
    else:
        atexit.register(_shut_down, hvd)


def _shut_down(hvd: Any) -> None:
    with limits.ending(suspended=True):
        hvd.shutdown()


def _shut_down_unanswered(hvd: Any, ends: threading.Event, thread: threading.Thread) -> None:
    # A rank that has ended interrupts mpirun's second, and SIGKILL follows: wait here for those that work on after training.
    with limits.ending(suspended=True), contextlib.suppress(Exception):  # the program has shut Horovod down itself
        hvd.barrier()
    ends.set()
    with contextlib.suppress(RuntimeError):  # it was not started: Horovod's own exit handler follows
        thread.join(END_SECONDS)
    if thread.is_alive():
        atexit.unregister(hvd.mpi_ops._basics.shutdown)  # Horovod's own exit handler would wait, too
        libc = ctypes.CDLL(None)
        libc.fflush(None)
        # And so would the destructors of its library. After Python's own end, leave with the exit code, before they run.
        libc.on_exit(libc._exit, None)
