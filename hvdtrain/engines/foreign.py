"""The Horovod of a script that does not use hvdtrain: observed and, where asked, changed, right after its import.

All that a script does with Horovod passes through a few places in `horovod.torch`, whichever of its names the script has
imported: one for the start, one for the end, one where every collective waits, one in each step of an optimizer.
"""

import os
import sys
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NoReturn

import torch

from hvdtrain.engines import program
from hvdtrain.engines.base import Engine
from hvdtrain.engines.errors import UserError
from hvdtrain.engines.exit_codes import say
from hvdtrain.engines.horovod import HorovodEngine, buckets
from hvdtrain.engines.launchers import Announced, remedy

program.HIDDEN.add(__file__)


class ForeignEngine(HorovodEngine):
    """A script's own Horovod, after its `hvd.init()`. It is the script that shuts it down."""

    def __init__(self, hvd: ModuleType):
        Engine.__init__(self, tuning=True, rank=hvd.rank(), size=hvd.size(), launcher="")
        self.hvd = hvd
        self.local_rank, self.local_size = hvd.local_rank(), hvd.local_size()
        self.description = f"horovod over {'MPI' if hvd.mpi_enabled() else 'Gloo'}"
        self.device = torch.device("cpu")  # of our own messages

    def shutdown(self) -> None:
        pass


class Listener:
    """What is told of a script's Horovod; each method is called in the thread in which it happens."""

    def started(self, engine: ForeignEngine) -> None:
        """`hvd.init()` is over. Every rank comes here, so that collectives are allowed."""

    def waits(self) -> None:
        """A collective is about to be waited for."""

    def waited(self, began: float, ended: float) -> None:
        """The collective is over. `time.perf_counter` of both."""

    def stepped(self, optimizer: Any) -> None:
        """A DistributedOptimizer of all ranks has taken a step."""

    def loaded(self, began: float, ended: float, batch: object) -> None:
        """A DataLoader has given a batch."""

    def left(self) -> None:
        """`hvd.shutdown()` is about to begin."""

    def hung(self, headline: str) -> None:
        """The job is about to be ended because a rank does not come; in the watchdog's thread, on rank 0."""

    def end(self, error: BaseException | None, exit_code: object) -> None:
        """The script is over: by `error`, or else with `exit_code`."""


def attach(hvd: ModuleType, told: Announced, listeners: Sequence[Listener], *, repeatable: bool) -> None:
    """Have `listeners` told of the Horovod that a script has just imported, and give its optimizers fixed buckets."""
    if not hasattr(hvd, "mpi_ops"):  # built without its extension, as it says itself
        return
    check_ranks(hvd, told)
    if listeners:
        hear(hvd, listeners)
    if repeatable:
        repeat(hvd)


def leave(error: UserError) -> NoReturn:
    """End this process in the middle of the script, with one line.

    At once: after a `hvd.shutdown` on the way out, the other ranks would be told of errors of their own, and speak first.
    """
    say(error, "hvdtrain.tuned")
    sys.stdout.flush()
    os._exit(error.exit_code)


def check_ranks(hvd: Any, told: Announced) -> None:
    """End with one line where Horovod sees another number of ranks than were started: each would train alone."""
    basics = hvd.mpi_ops._basics
    init = basics.init

    def checked(*args: Any, **kwargs: Any) -> None:
        init(*args, **kwargs)
        whole = not args and not kwargs.get("comm") and os.environ.get("HOROVOD_ELASTIC") != "1"
        if whole and told.launcher != "none" and hvd.size() != told.size:
            how = remedy(told.launcher, "horovod")
            size = hvd.size()
            basics.shutdown()  # this rank is alone: no other waits for it, and MPI removes its files
            said = f"{told.launcher} announced {told.size} ranks, but {ForeignEngine.name} sees {size}: {how}"
            leave(UserError(said, everywhere=True))

    basics.init = checked


def hear(hvd: Any, listeners: Sequence[Listener]) -> None:
    """Tell `listeners`. Functions called `marked` are left out of the stacks that the watchdog shows."""
    ops, optimizers = hvd.mpi_ops, sys.modules["horovod.torch.optimizer"]
    set_up, shutdown, wait = ops._setup_process_sets, ops._basics.shutdown, ops.mpi_lib.horovod_torch_wait_and_clear

    def started(basics: Any) -> None:  # `hvd.init` calls it last, whatever the name by which the script has it
        set_up(basics)
        engine = ForeignEngine(hvd)
        try:
            for listener in listeners:
                listener.started(engine)
        except UserError as error:
            leave(error)

    def left() -> None:
        if ops._basics.is_initialized():
            for listener in listeners:
                listener.left()
        shutdown()

    def marked(handle: int) -> None:
        began = time.perf_counter()
        for listener in listeners:
            listener.waits()
        try:
            wait(handle)
        finally:
            ended = time.perf_counter()
            for listener in listeners:
                listener.waited(began, ended)

    ops._setup_process_sets, ops._basics.shutdown, ops.mpi_lib.horovod_torch_wait_and_clear = started, left, marked
    for kind in (optimizers._DistributedOptimizer, optimizers._DistributedAdasumOptimizer):
        kind.step = telling(kind.step, listeners)

    loaders = sys.modules["torch.utils.data.dataloader"]
    following = loaders._BaseDataLoaderIter.__next__

    def load(self: Any) -> object:
        began = time.perf_counter()
        batch = following(self)
        ended = time.perf_counter()
        for listener in listeners:
            listener.loaded(began, ended, batch)
        return batch

    loaders._BaseDataLoaderIter.__next__ = load


def telling(step: Callable, listeners: Sequence[Listener]) -> Callable:
    # A function of its own: Horovod copies it into a class that it makes for each optimizer.
    def marked(self: Any, closure: Any = None) -> Any:
        result = step(self, closure)
        if getattr(self, "process_set", None) is None or self.process_set.process_set_id == 0:
            for listener in listeners:
                listener.stepped(self)
        return result

    return marked


def repeat(hvd: Any) -> None:
    """Give every DistributedOptimizer that has no groups of its own the buckets that our engine uses."""
    optimizer = sys.modules["horovod.torch.optimizer"]._DistributedOptimizer
    make, reduce = optimizer.__init__, optimizer._grouped_allreduce_grad_async

    def make_with_buckets(
        self: Any, params: Any, named_parameters: Any, compression: Any, backward_passes_per_step: int, op: int,
        gradient_predivide_factor: float, groups: Any, *rest: Any,
    ) -> None:  # fmt: skip
        if groups is None:
            groups = buckets([parameter for group in params for parameter in group["params"]])
        make(
            self, params, named_parameters, compression, backward_passes_per_step, op, gradient_predivide_factor, groups,
            *rest,
        )  # fmt: skip

    def reduce_dense(self: Any, parameters: Any) -> Any:
        if any(parameter.grad is not None and parameter.grad.is_sparse for parameter in parameters):
            leave(UserError("--repeatable has no buckets for sparse gradients: leave it out", everywhere=True))
        return reduce(self, parameters)

    def join(*_: Any) -> None:
        said = "--repeatable, but the script calls hvd.join, which fixed buckets break: leave it out"
        leave(UserError(said))  # ranks join one after the other

    optimizer.__init__, optimizer._grouped_allreduce_grad_async = make_with_buckets, reduce_dense
    hvd.mpi_ops.mpi_lib.horovod_torch_join = join
