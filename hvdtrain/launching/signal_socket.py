"""Signals that a loop over sockets hears, also while the main thread is in a call that does not return."""

import contextlib
import os
import signal
import socket
from collections.abc import Callable, Iterable
from types import FrameType

Handler = Callable[[int, FrameType | None], object] | int | None  # what signal.signal takes and returns
RESET = (signal.SIG_DFL, signal.default_int_handler)  # as asyncio's remove_signal_handler leaves a signal


class SignalSocket:
    """Between `listen` and `restore`, signals only write their numbers to `socket`. Call both from the main thread.

    Python's C handler writes them, to the one wakeup descriptor of the process. A program may take that, and the handlers:
    asyncio's add_signal_handler does, and its remove_signal_handler gives back neither. See `lost` and `regain`.
    """

    def __init__(self) -> None:
        self.socket, self._end = socket.socketpair()
        self.socket.setblocking(False)
        self._end.setblocking(False)
        self._handlers: dict[int, Handler] | None = None  # those before `listen`
        self._programs: set[int] = set()  # signals that the program has handled itself since then, as `regain` found
        self._before = -1  # the program's wakeup descriptor before `listen`

    def listen(self, numbers: Iterable[int]) -> None:
        """Install the signal handlers."""
        self._before = signal.set_wakeup_fd(self._end.fileno(), warn_on_full_buffer=False)
        self._handlers = {number: signal.signal(number, self._handle) for number in numbers}

    def lost(self) -> bool:
        """Return whether there is something for `regain` to do. Thread-safe."""
        found = {number: signal.getsignal(number) for number in self._handlers or ()}
        return any(
            handler != self._handle and (handler in RESET or number not in self._programs)
            for number, handler in found.items()
        )

    def regain(self) -> list[str]:
        """Install the handlers again that were reset, in the main thread. Return the names of the signals that the program
        has begun to handle itself, which are left to it."""
        before, self._programs = self._programs, set()
        for number in self._handlers or ():
            handler = signal.getsignal(number)
            if handler in RESET:
                signal.signal(number, self._handle)
            elif handler != self._handle:
                self._programs.add(number)
        if self._handlers is not None:
            self._take_wakeup()
        return sorted(signal.Signals(number).name for number in self._programs - before)

    def restore(self) -> None:
        """Restore the previous signal handlers, where the program has not installed others. Idempotent."""
        if self._handlers is not None:
            for number, handler in self._handlers.items():
                if signal.getsignal(number) == self._handle:
                    signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: a library's own
            if self._take_wakeup():
                signal.set_wakeup_fd(-1)
                with contextlib.suppress(OSError, ValueError):  # closed meanwhile
                    signal.set_wakeup_fd(self._before)
            self._handlers = None

    def received(self) -> bytes:
        """Return the numbers of the signals received since the last call, and of `wake`."""
        numbers = b""
        with contextlib.suppress(BlockingIOError):
            numbers = self.socket.recv(4096)
        if numbers and self._before >= 0:
            # An event loop of the program had the descriptor before, and waits for its own signals.
            with contextlib.suppress(OSError):  # an event loop, which is full or has ended
                os.write(self._before, numbers)
        return numbers

    def wake(self, number: int = 0) -> None:
        """Wake up the loop, as a signal of this number does. Thread-safe."""
        with contextlib.suppress(OSError):
            self._end.send(bytes([number]))

    def close(self) -> None:
        """Restore the signal handlers and close the sockets."""
        self.restore()
        self.socket.close()
        self._end.close()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """The handler, which Python calls in the main thread after the C handler has written to the wakeup descriptor."""
        if not self._take_wakeup():  # it was another, or none
            self.wake(number)

    def _take_wakeup(self) -> bool:
        """Take the wakeup descriptor, unless an event loop of the program has it. Return whether it was ours before."""
        mine = self._end.fileno()
        found = signal.set_wakeup_fd(mine, warn_on_full_buffer=False)
        if found not in (-1, mine):
            signal.set_wakeup_fd(found)
        return found == mine
