"""Signals that a loop over sockets hears, also while the main thread is in a call that does not return."""

import contextlib
import signal
import socket
from collections.abc import Callable, Iterable
from types import FrameType

Handler = Callable[[int, FrameType | None], object] | int | None  # what signal.signal takes and returns


class SignalSocket:
    """Between `listen` and `restore`, signals only write their numbers to `socket`. Call both from the main thread."""

    def __init__(self) -> None:
        self.socket, self._end = socket.socketpair()
        self.socket.setblocking(False)
        self._end.setblocking(False)
        self._handlers: dict[int, Handler] | None = None  # those before `listen`

    def listen(self, numbers: Iterable[int]) -> None:
        """Install the signal handlers."""
        signal.set_wakeup_fd(self._end.fileno(), warn_on_full_buffer=False)
        self._handlers = {number: signal.signal(number, lambda number, frame: None) for number in numbers}

    def restore(self) -> None:
        """Restore the previous signal handlers. Idempotent."""
        if self._handlers is not None:
            signal.set_wakeup_fd(-1)
            for number, handler in self._handlers.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: a library's own
            self._handlers = None

    def received(self) -> bytes:
        """Return the numbers of the signals received since the last call, and of `wake`."""
        with contextlib.suppress(BlockingIOError):
            return self.socket.recv(4096)
        return b""

    def wake(self, number: int = 0) -> None:
        """Wake up the loop, as a signal of this number does. Thread-safe."""
        with contextlib.suppress(OSError):
            self._end.send(bytes([number]))

    def close(self) -> None:
        """Restore the signal handlers and close the sockets."""
        self.restore()
        self.socket.close()
        self._end.close()
