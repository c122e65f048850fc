"""The watchdog for a script that does not use hvdtrain. Its Horovod calls and DataLoaders report progress."""

import contextlib
import sys
import threading
from typing import Any

from hvdtrain.engines.foreign import ForeignEngine, Listener
from hvdtrain.hangs import leaving
from hvdtrain.training.resilience.watchdog import Watchdog


class Watch(Listener):
    """Ends the job if a rank hangs. seconds: see `step_timeout` of `Watchdog`.

    Collectives and batches count as progress. Until the first step of an optimizer, the longer limit of start-up applies.
    """

    def __init__(self, seconds: float | None, listeners: list[Listener]):
        self.seconds, self._listeners = seconds, listeners
        self.watchdog: Watchdog | None = None
        self.steps = 0

    def started(self, engine: ForeignEngine) -> None:
        self.engine = engine
        leaving.stop()  # a script that starts Horovod again
        self.watchdog = Watchdog(engine, self.seconds, self._failed, guest=True)
        if self.watchdog.off and engine.rank == 0:
            said = f"warning: hung ranks will not be noticed: the ranks cannot connect ({self.watchdog.off})"
            print(said, file=sys.stderr, flush=True)

    def _failed(self, headline: str) -> None:
        for listener in self._listeners:
            listener.hung(headline)

    def waits(self) -> None:
        if self.watchdog is not None and threading.current_thread() is threading.main_thread():
            self.engine.waiting_in = "synchronize"

    def waited(self, began: float, ended: float) -> None:
        if self.watchdog is not None:
            if threading.current_thread() is threading.main_thread():
                self.engine.waiting_in = None
            self.watchdog.heartbeat()
            self.watchdog.compute()

    def loaded(self, began: float, ended: float, batch: object) -> None:
        if self.watchdog is not None:
            self.watchdog.heartbeat()
            self.watchdog.compute()

    def stepped(self, optimizer: Any) -> None:
        self.steps += 1
        if self.watchdog is not None:
            self.watchdog.finish_step(self.steps)
            self.watchdog.update()

    def left(self) -> None:
        self._close(None)

    def end(self, error: BaseException | None, exit_code: object) -> None:
        failure = f"{type(error).__name__}: {error}" if error is not None else None
        self._close(failure or (f"it ended with exit code {exit_code}" if exit_code else None))

    def _close(self, failure: str | None) -> None:
        watchdog, self.watchdog = self.watchdog, None
        if watchdog is not None:
            with contextlib.suppress(OSError):
                watchdog.close(failure)
