"""Hooks into Horovod for a script that does not use hvdtrain, installed right after its import, and the watch they tell.

All calls of a script pass through a few functions of `horovod.torch`, whichever names the script imports: initialization,
shutdown, the wait of every collective, and the step of each optimizer.
"""

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NoReturn

import torch

from hvdtrain.engines.base import Engine
from hvdtrain.engines.buckets import buckets, use_buckets
from hvdtrain.engines.errors import UserError
from hvdtrain.engines.horovod import HorovodEngine
from hvdtrain.engines.launchers import Announced, remedy
from hvdtrain.engines.lines import WRITE_SECONDS, put_line, within
from hvdtrain.guards.connection import Fail
from hvdtrain.guards.judge import HangTimeouts
from hvdtrain.guards.watch import Watch, watch_ranks
from hvdtrain.launching.exit_codes import say_error


class ForeignEngine(HorovodEngine):
    """The Horovod instance of a script, after its `hvd.init()`. The script shuts it down itself."""

    def __init__(self, hvd: ModuleType):
        Engine.__init__(self, tuning=True, rank=hvd.rank(), size=hvd.size(), launcher="")
        self.hvd = hvd
        self.local_rank, self.local_size = hvd.local_rank(), hvd.local_size()
        self.description = f"horovod over {'MPI' if hvd.mpi_enabled() else 'Gloo'}"
        self.device = torch.device("cpu")  # for our own messages

    def shutdown(self) -> None:
        pass


class ScriptWatchdog:
    """Ends the job if a rank hangs. seconds: see `HangTimeouts`. `hear` has its methods called.

    Collectives and batches count as progress. Until the first step of an optimizer, the longer limit of start-up applies.
    Without `seconds`, a rank at work has an hour: nothing tells us of an evaluation, a checkpoint or a download.
    """

    def __init__(self, seconds: float | None):
        self._timeouts = HangTimeouts(seconds, patient=seconds is None)
        self.watch: Watch | None = None
        self.steps = 0

    def started(self, engine: Engine) -> None:
        """Called after `hvd.init()` on every rank. Collectives are allowed here."""
        if self.watch is not None:  # a second call, which begins nothing: the watch of the first would see no progress
            return
        self.engine = engine
        self.watch = watch_ranks(engine, self._timeouts, guest=True)
        if self.watch.warning is not None and engine.rank == 0:
            put_line(sys.stderr, self.watch.warning + "\n")

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Context manager for the script's wait for a collective."""
        main = self.watch is not None and threading.current_thread() is threading.main_thread()
        if main:
            self.engine.activity.compute()
            self.engine.activity.collective = "synchronize"
        try:
            yield
        finally:
            if main:
                self.engine.activity.collective = None
            self.progressed()

    def progressed(self) -> None:
        """Called after a collective, and after a DataLoader has returned a batch."""
        if self.watch is not None:
            self.engine.activity.heartbeat()
            self.engine.activity.compute()

    def stepped(self) -> None:
        """Called after a step of a DistributedOptimizer over all ranks."""
        self.steps += 1
        if self.watch is not None:
            self.engine.activity.finish_step(self.steps)
            self.engine.activity.update()

    def end(self, error: BaseException | None = None, exit_code: object = 0) -> None:
        """Called before `hvd.shutdown()` and at the end of the script. error: the exception that ended it, if any."""
        failure = Fail(f"it ended with exit code {exit_code}") if exit_code else None
        if error is not None:
            failure = Fail(f"{type(error).__name__}: {error}", isinstance(error, UserError))
        watch, self.watch = self.watch, None
        if watch is not None:
            with contextlib.suppress(OSError):
                watch.close(failure)
            watch.make_leaving().start()


def attach(hvd: ModuleType, place: Announced, watchdog: ScriptWatchdog | None, *, repeatable: bool) -> None:
    """Install the hooks in the Horovod module that a script has just imported.

    watchdog: told of each event. repeatable: use fixed gradient buckets in all optimizers.
    """
    if not hasattr(hvd, "mpi_ops"):  # built without its PyTorch extension; Horovod reports that itself
        return
    check_ranks(hvd, place)
    if watchdog is not None:
        hear(hvd, watchdog)
    if repeatable:
        repeat(hvd)


def leave(error: UserError) -> NoReturn:
    """Print `error` and exit at once, in the middle of the script."""
    say_error(error, "hvdtrain.tuned")
    within(WRITE_SECONDS, lambda: sys.stdout.flush())  # it may be None
    # A normal exit calls `hvd.shutdown`: the other ranks would fail of it, and print their errors first.
    os._exit(error.exit_code)


def check_ranks(hvd: Any, place: Announced) -> None:
    """Exit with an error if Horovod sees fewer ranks than the launcher started: each rank would train alone."""
    basics = hvd.mpi_ops._basics
    init = basics.init

    def checked(*args: Any, **kwargs: Any) -> None:
        init(*args, **kwargs)
        # With a communicator of the script's own, or elastic, fewer ranks are meant.
        whole = not args and not kwargs.get("comm") and os.environ.get("HOROVOD_ELASTIC") != "1"
        if whole and place.launcher != "none" and hvd.size() != place.size:
            advice = remedy(place.launcher, "horovod")
            size = hvd.size()
            basics.shutdown()  # this rank is alone, so no other rank waits for it; MPI removes its files
            message = f"{place.launcher} announced {place.size} ranks, but {ForeignEngine.name} sees {size}: {advice}"
            leave(UserError(message, everywhere=True))

    basics.init = checked


def hear(hvd: Any, watchdog: ScriptWatchdog) -> None:
    """Tell `watchdog` of each event, in the thread in which it happens."""
    ops, optimizers = hvd.mpi_ops, sys.modules["horovod.torch.optimizer"]
    set_up, shutdown, wait = ops._setup_process_sets, ops._basics.shutdown, ops.mpi_lib.horovod_torch_wait_and_clear

    def started(basics: Any) -> None:  # `hvd.init` calls this last, under whatever name the script imported it
        set_up(basics)
        try:
            watchdog.started(ForeignEngine(hvd))
        except UserError as error:
            leave(error)

    def left() -> None:
        if ops._basics.is_initialized():
            watchdog.end()
        shutdown()

    def wait_and_tell(handle: int) -> None:
        with watchdog.waiting():
            wait(handle)

    ops._setup_process_sets, ops._basics.shutdown, ops.mpi_lib.horovod_torch_wait_and_clear = (
        started,
        left,
        wait_and_tell,
    )
    for kind in (optimizers._DistributedOptimizer, optimizers._DistributedAdasumOptimizer):
        kind.step = telling(kind.step, watchdog)

    loaders = sys.modules["torch.utils.data.dataloader"]
    following = loaders._BaseDataLoaderIter.__next__

    def load(self: Any) -> object:
        batch = following(self)
        watchdog.progressed()
        return batch

    loaders._BaseDataLoaderIter.__next__ = load


def telling(step: Callable[..., Any], watchdog: ScriptWatchdog) -> Callable[..., Any]:
    """Return `step`, wrapped so that the watchdog is told after each step over all ranks."""

    # A plain function: Horovod copies it into a class that it creates for each optimizer.
    def step_and_tell(self: Any, closure: Any = None) -> Any:
        result = step(self, closure)
        if getattr(self, "process_set", None) is None or self.process_set.process_set_id == 0:
            watchdog.stepped()
        return result

    return step_and_tell


def repeat(hvd: Any) -> None:
    """Use the buckets of HorovodEngine in every DistributedOptimizer that was created without `groups`."""
    optimizer = sys.modules["horovod.torch.optimizer"]._DistributedOptimizer
    make, reduce = optimizer.__init__, optimizer._grouped_allreduce_grad_async

    def make_with_buckets(
        self: Any, params: Any, named_parameters: Any, compression: Any, backward_passes_per_step: int, op: int,
        gradient_predivide_factor: float, groups: Any, *rest: Any,
    ) -> None:  # fmt: skip
        make(
            self, params, named_parameters, compression, backward_passes_per_step, op, gradient_predivide_factor, groups,
            *rest,
        )  # fmt: skip
        if self._requires_update:  # there are other ranks
            parameters = [parameter for group in self.param_groups for parameter in group["params"]]
            try:
                use_buckets(self, list(self._group_counts) or buckets(parameters))
            except UserError as error:
                leave(error)

    def reduce_dense(self: Any, parameters: Any) -> Any:
        if any(parameter.grad is not None and parameter.grad.is_sparse for parameter in parameters):
            leave(UserError("--repeatable has no buckets for sparse gradients: leave it out", everywhere=True))
        return reduce(self, parameters)

    def join(*_: Any) -> None:
        message = "--repeatable, but the script calls hvd.join, which fixed buckets break: leave it out"
        leave(UserError(message))  # not `everywhere`: ranks call join at different times

    optimizer.__init__, optimizer._grouped_allreduce_grad_async = make_with_buckets, reduce_dense
    hvd.mpi_ops.mpi_lib.horovod_torch_join = join
