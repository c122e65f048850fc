"""A time limit for a rank's end, after training: the lines after the block, threads that are no daemons, exit handlers.

Other ranks may have ended by then, so each rank watches itself. A program may work on as long as it likes: only time without
work counts (work.py). Exit handlers and the engine's shutdown have the same limit, whatever they do: a rank that fails while
its GPU waits for another one may spin in the shutdown for ever. `run.heartbeat()` begins it anew.
"""

import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator

from hvdtrain.engines.lines import WRITE_SECONDS, say_within, within
from hvdtrain.guards.stacks import main_stack, stack_of, where, worth_printing
from hvdtrain.guards.work import Work

LOOK_SECONDS = 1.0  # between two checks


class Leaving:
    """The limit in seconds of a rank's end.

    leave: exits the process. guest: the program does not use hvdtrain: hide our frames. killed: mpirun kills the job.
    """

    def __init__(
        self,
        name: str,
        limit: float,
        leave: Callable[[int], None] = os._exit,
        guest: bool = False,
        killed: bool = False,
    ):
        self.name, self.limit, self.leave, self.guest, self.killed = name, limit, leave, guest, killed
        self.idle = self.exiting = 0.0  # seconds without work; seconds in exit handlers or in the engine's shutdown
        self.disconnects = False  # it is in the engine's shutdown
        self.suspended = False  # it waits until other ranks are at their end, too
        self._work = Work()
        self._over = threading.Event()

    def start(self) -> None:
        """Watch this process from now on, in a thread."""
        global _current
        stop()
        _current = self
        interactive = hasattr(sys, "ps1") or sys.flags.interactive  # waits for the next line of a person
        if self.limit == float("inf") or interactive:
            return
        with contextlib.suppress(RuntimeError):  # this user may have no more threads
            threading.Thread(target=self._run, name="leaving", daemon=True).start()

    def stop(self) -> None:
        """Watch no longer."""
        self._over.set()

    def heartbeat(self) -> None:
        """Report progress: the time limit restarts."""
        self.idle = 0.0

    def look(self, elapsed: float) -> None:
        """Check this process, `elapsed` seconds after the last time. Ends it if its time is over."""
        self.idle = 0.0 if self._work.seen() or self.suspended else self.idle + elapsed
        exits = not threading.main_thread().is_alive() and not others()
        counts = (exits or self.disconnects) and not self.suspended
        self.exiting = self.exiting + elapsed if counts else 0.0
        if max(self.idle, self.exiting) >= self.limit:
            self._end(exits)

    def _run(self) -> None:
        before = time.monotonic()
        while not self._over.wait(LOOK_SECONDS):
            now = time.monotonic()
            elapsed, before = min(now - before, 2 * LOOK_SECONDS), now  # not the time for which it was suspended
            self.look(elapsed)

    def _end(self, exits: bool) -> None:
        stack = main_stack()
        does = f"is at {where(stack)}"
        if exits:
            does = "runs its exit handlers" + (f", at {where(stack)}" if stack else "")  # none: one written in C
        elif threads := others():
            stack = stack_of(threads[0].ident)
            does = f"waits for its thread {threads[0].name}, which is no daemon, at {where(stack)}"
        message = (
            f"hvdtrain: error: {self.name} does not end after training: it {does}, for {self.limit:.0f} s without work"
        )
        say_within("".join([message + "\n", *traceback.format_list(worth_printing(stack, self.guest))]))
        within(WRITE_SECONDS, lambda: sys.stdout.flush())  # it may be None
        self.leave(1)


_current: Leaving | None = None  # that of the last training in this process


def others() -> list[threading.Thread]:
    """Return the threads, other than the main thread, for which the interpreter waits at its exit."""
    main = threading.main_thread()
    return [thread for thread in threading.enumerate() if not thread.daemon and thread is not main]


def heartbeat() -> None:
    """Report progress of a program that works on after training."""
    if _current is not None:
        _current.heartbeat()


def killed() -> bool:
    """Return whether mpirun was killing the job when training ended."""
    return _current is not None and _current.killed


@contextlib.contextmanager
def ending(*, suspended: bool = False) -> Iterator[None]:
    """Context manager for the engine's shutdown. suspended: it waits for ranks that may work on, without a time limit."""
    if (leaving := _current) is None:
        yield
        return
    leaving.disconnects, leaving.suspended = True, suspended
    try:
        yield
    finally:
        leaving.disconnects = leaving.suspended = False


def stop() -> None:
    """Watch this process no longer: another training begins in it."""
    global _current
    if _current is not None:
        _current.stop()
    _current = None
