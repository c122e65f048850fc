"""The watchdog for a script that does not use hvdtrain. Its Horovod calls and DataLoaders report progress."""

import contextlib
import sys
import threading
from collections.abc import Iterator

from hvdtrain.engines.base import Engine
from hvdtrain.engines.errors import UserError
from hvdtrain.engines.lines import put_line
from hvdtrain.guards.connection import Fail
from hvdtrain.guards.judge import HangTimeouts
from hvdtrain.guards.watch import Watch, watch_ranks


class ScriptWatchdog:
    """Ends the job if a rank hangs. seconds: see `HangTimeouts`. `engines/foreign.py` calls its methods.

    Collectives and batches count as progress. Until the first step of an optimizer, the longer limit of start-up applies.
    Without `seconds`, a rank at work has an hour: nothing tells us of an evaluation, a checkpoint or a download.
    """

    def __init__(self, seconds: float | None):
        self._timeouts = HangTimeouts(seconds, patient=seconds is None)
        self.watch: Watch | None = None
        self.steps = 0

    def started(self, engine: Engine) -> None:
        """Called after `hvd.init()` on every rank. Collectives are allowed here."""
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
