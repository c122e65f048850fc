"""Stop signals, received even if the main thread is busy: C writes their number to a socket, which the watchdog reads."""

import contextlib
import os
import signal
import socket

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class StopSignals:
    """From `listen` to `restore`, signals have no other effect than to stand in `received`. Both by the main thread."""

    def __init__(self) -> None:
        self.socket, self._wake = socket.socketpair()
        self.socket.setblocking(False)
        self._wake.setblocking(False)
        self._handlers: dict = {}

    def listen(self) -> None:
        signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        self._handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
        for number, handler in self._handlers.items():
            if handler != signal.SIG_IGN:  # as nohup has it: not ours to change
                signal.signal(number, lambda number, frame: None)
        # A forked child (a loader's worker) must not report its own signals as ours, nor survive them.
        os.register_at_fork(after_in_child=self.restore)

    def restore(self) -> None:
        if self._handlers:
            signal.set_wakeup_fd(-1)
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
            self._handlers = {}

    def received(self) -> list[signal.Signals]:
        """Return the stop signals that have come; a wake-up among them is none."""
        with contextlib.suppress(BlockingIOError):
            return [signal.Signals(number) for number in self.socket.recv(4096) if number in STOP_SIGNALS]
        return []

    def wake(self) -> None:
        """Wake the thread that waits for `socket`; from any thread."""
        with contextlib.suppress(OSError):
            self._wake.send(b"\0")

    def close(self) -> None:
        self.restore()
        self.socket.close()
        self._wake.close()
