"""Receives stop signals even if the main thread is busy: Python's C handler writes to a socket that the watchdog reads."""

import contextlib
import os
import signal
import socket
from collections.abc import Callable
from types import FrameType

Handler = Callable[[int, FrameType | None], object] | int | None  # what signal.signal takes and returns

# A closed terminal sends SIGHUP, a batch system's limit on processor time SIGXCPU.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP, signal.SIGXCPU)
_ignored: set[signal.Signals] = set()  # from the start, such as SIGHUP by nohup


def remember_ignored() -> None:
    """Note which stop signals this process ignores. Call it before Horovod is imported, whose library handles SIGHUP."""
    _ignored.update(number for number in STOP_SIGNALS if signal.getsignal(number) == signal.SIG_IGN)


class StopSignals:
    """Between `listen` and `restore`, stop signals only appear in `received`. Call both from the main thread."""

    def __init__(self) -> None:
        self.socket, self._wake = socket.socketpair()
        self.socket.setblocking(False)
        self._wake.setblocking(False)
        self._handlers: dict[signal.Signals, Handler] = {}

    def listen(self) -> None:
        """Install the signal handlers."""
        signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        self._handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
        for number, handler in self._handlers.items():
            if handler != signal.SIG_IGN and number not in _ignored:
                signal.signal(number, lambda number, frame: None)
        # A forked child (a DataLoader worker) must not report its signals to this process, nor ignore them.
        os.register_at_fork(after_in_child=self.restore)

    def restore(self) -> None:
        """Restore the previous signal handlers. Idempotent."""
        if self._handlers:
            signal.set_wakeup_fd(-1)
            for number, handler in self._handlers.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: a library's own
            self._handlers = {}

    def received(self) -> list[signal.Signals]:
        """Return the stop signals received since the last call."""
        with contextlib.suppress(BlockingIOError):
            return [signal.Signals(number) for number in self.socket.recv(4096) if number in STOP_SIGNALS]
        return []

    def wake(self) -> None:
        """Wake up the thread that waits for `socket`. Thread-safe."""
        with contextlib.suppress(OSError):
            self._wake.send(b"\0")

    def close(self) -> None:
        """Restore the signal handlers and close the sockets."""
        self.restore()
        self.socket.close()
        self._wake.close()
