"""The watchdog for a script that does not use hvdtrain. Its Horovod calls and DataLoaders report progress."""

import contextlib
import sys
import threading
from typing import Any

from hvdtrain.engines.errors import UserError
from hvdtrain.engines.foreign import ForeignEngine, Listener
from hvdtrain.engines.lines import put
from hvdtrain.hangs.messages import Fail
from hvdtrain.hangs.monitor import Monitor, monitor_ranks
from hvdtrain.hangs.timeouts import HangTimeouts


class ScriptWatchdog(Listener):
    """Ends the job if a rank hangs. seconds: see `HangTimeouts`.

    Collectives and batches count as progress. Until the first step of an optimizer, the longer limit of start-up applies.
    Without `seconds`, a rank at work has an hour: nothing tells us of an evaluation, a checkpoint or a download.
    """

    def __init__(self, seconds: float | None, listeners: list[Listener]):
        self._timeouts, self._listeners = HangTimeouts(seconds, patient=seconds is None), listeners
        self.monitor: Monitor | None = None
        self.steps = 0

    def started(self, engine: ForeignEngine) -> None:
        self.engine = engine
        self.monitor = monitor_ranks(engine, self._timeouts, self._failed, guest=True)
        if self.monitor.warning is not None and engine.rank == 0:
            put(sys.stderr, self.monitor.warning + "\n")

    def _failed(self, headline: str) -> None:
        for listener in self._listeners:
            listener.hung(headline)

    def waits(self) -> None:
        if self.monitor is not None and threading.current_thread() is threading.main_thread():
            self.engine.activity.compute()
            self.engine.activity.collective = "synchronize"

    def waited(self, began: float, ended: float) -> None:
        if self.monitor is not None:
            if threading.current_thread() is threading.main_thread():
                self.engine.activity.collective = None
            self.engine.activity.heartbeat()
            self.engine.activity.compute()

    def loaded(self, began: float, ended: float, batch: object) -> None:
        if self.monitor is not None:
            self.engine.activity.heartbeat()
            self.engine.activity.compute()

    def stepped(self, optimizer: Any) -> None:
        self.steps += 1
        if self.monitor is not None:
            self.engine.activity.finish_step(self.steps)
            self.engine.activity.update()

    def left(self) -> None:
        self._close(None)

    def end(self, error: BaseException | None, exit_code: object) -> None:
        if error is not None:
            self._close(Fail(f"{type(error).__name__}: {error}", isinstance(error, UserError)))
        else:
            self._close(Fail(f"it ended with exit code {exit_code}") if exit_code else None)

    def _close(self, failure: Fail | None) -> None:
        monitor, self.monitor = self.monitor, None
        if monitor is not None:
            with contextlib.suppress(OSError):
                monitor.close(failure)
            monitor.make_leaving().start()
