"""A time limit for a rank's end, after training: the lines after the block, threads that are no daemons, exit handlers.

Other ranks may have ended by then, so each rank watches itself. A program may work on as long as it likes: only time without
work counts (work.py). Exit handlers and the engine's shutdown have the same limit, whatever they do: a rank that fails while
its GPU waits for another one may spin in the shutdown for ever. `run.heartbeat()` begins it anew.
"""

import atexit
import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator

from hvdtrain.engines.lines import WRITE_SECONDS, say_within, within
from hvdtrain.hangs.stacks import stack_of, where, worth_printing
from hvdtrain.hangs.work import Work

LOOK_SECONDS = 1.0  # between two checks
ALARM_SECONDS = 5.0  # from the limit to the alarm, for a process whose Python cannot run any more
current: list["Leaving"] = []  # that of the last training in this process


class Leaving:
    """The limit in seconds of a rank's end. watched: the main thread. leave: exits the process. guest: the program
    does not use hvdtrain: hide our frames."""

    def __init__(
        self, name: str, limit: float, watched: int | None, leave: Callable[[int], None] = os._exit, guest: bool = False
    ):
        self.name, self.watched, self.leave, self.guest = name, watched, leave, guest
        interactive = hasattr(sys, "ps1") or sys.flags.interactive  # waits for the next line of a person
        self.limit = float("inf") if interactive else limit
        self.idle = self.exiting = 0.0  # seconds without work; seconds in exit handlers or in the engine's shutdown
        self.disconnects = False  # it is in the engine's shutdown
        self._work = Work()
        self._over = threading.Event()
        self._pid = os.getpid()

    def start(self) -> None:
        """Watch this process from now on, in a thread."""
        if self.limit == float("inf"):
            return
        current.append(self)
        atexit.register(self._set_alarm)
        with contextlib.suppress(RuntimeError):  # this user may have no more threads
            threading.Thread(target=self._run, name="leaving", daemon=True).start()

    def stop(self) -> None:
        """Watch no longer: another training begins in this process."""
        self._over.set()
        atexit.unregister(self._set_alarm)

    def heartbeat(self) -> None:
        """Report progress: the time limit restarts."""
        self.idle = 0.0

    def look(self, elapsed: float) -> None:
        """Check this process, `elapsed` seconds after the last time. Ends it if its time is over."""
        self.idle = 0.0 if self._work.seen() else self.idle + elapsed
        exits = not threading.main_thread().is_alive() and not others()
        self.exiting = self.exiting + elapsed if exits or self.disconnects else 0.0
        if max(self.idle, self.exiting) >= self.limit:
            self._end(exits)

    def _run(self) -> None:
        before = time.monotonic()
        while not self._over.wait(LOOK_SECONDS):
            now = time.monotonic()
            elapsed, before = min(now - before, 2 * LOOK_SECONDS), now  # not the time for which it was suspended
            self.look(elapsed)

    def _end(self, exits: bool) -> None:
        stack = stack_of(self.watched)
        does = f"is at {where(stack)}"
        if exits:
            does = "runs its exit handlers" + (f", at {where(stack)}" if stack else "")  # none: one written in C
        elif threads := others():
            stack = stack_of(threads[0].ident)
            does = f"waits for its thread {threads[0].name}, which is no daemon, at {where(stack)}"
        said = (
            f"hvdtrain: error: {self.name} does not end after training: it {does}, for {self.limit:.0f} s without work"
        )
        say_within("".join([said + "\n", *traceback.format_list(worth_printing(stack, self.guest))]))
        within(WRITE_SECONDS, sys.stdout.flush)
        self.leave(1)

    def _set_alarm(self) -> None:
        """At exit: have the kernel end this process, for the time in which none of its threads can run Python."""
        if os.getpid() == self._pid and signal.getsignal(signal.SIGALRM) == signal.SIG_DFL:
            with contextlib.suppress(OSError, OverflowError, ValueError):
                signal.setitimer(signal.ITIMER_REAL, self.limit + ALARM_SECONDS)


def others() -> list[threading.Thread]:
    """Return the threads, other than the main thread, for which the interpreter waits at its exit."""
    main = threading.main_thread()
    return [thread for thread in threading.enumerate() if not thread.daemon and thread is not main]


def heartbeat() -> None:
    """Report progress of a program that works on after training."""
    for leaving in current:
        leaving.heartbeat()


@contextlib.contextmanager
def disconnecting() -> Iterator[None]:
    """Context manager for the engine's shutdown."""
    watching = list(current)
    for leaving in watching:
        leaving.disconnects = True
    try:
        yield
    finally:
        for leaving in watching:
            leaving.disconnects = False


@contextlib.contextmanager
def suspended() -> Iterator[None]:
    """Context manager for waiting until other ranks are at their end, too: it has no time limit."""
    limits = [(leaving, leaving.limit) for leaving in current]
    for leaving, _ in limits:
        leaving.limit = float("inf")
    try:
        yield
    finally:
        for leaving, limit in limits:
            leaving.idle = leaving.exiting = 0.0
            leaving.limit = limit


def stop() -> None:
    """Watch this process no longer: another training begins in it."""
    while current:
        current.pop().stop()
