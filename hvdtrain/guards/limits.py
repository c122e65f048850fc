"""Time limits of a rank's start, before the ranks are connected, and of its end, after training.

At the start, ranks cannot exchange messages yet; at the end, others may have ended. So each rank watches itself, and says
where it is.

At its end, a program may work on as long as it likes: only time without work counts (evidence.py). Exit handlers and the
engine's shutdown have the same limit, whatever they do. `run.heartbeat()` begins it anew.
"""

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from hvdtrain.engines.base import Engine
from hvdtrain.engines.errors import UserError
from hvdtrain.engines.launchers import announced
from hvdtrain.engines.lines import WRITE_SECONDS, say_within, within
from hvdtrain.guards.evidence import PACKAGE_PATH, Work, main_stack, shown_frames, stack_of, where
from hvdtrain.guards.judge import HangTimeouts
from hvdtrain.launching.exit_codes import STOPPED
from hvdtrain.launching.signal_socket import SignalSocket
from hvdtrain.launching.startup import UNSAVED

WAITING_LINE_SECONDS = 60.0  # of start-up; after this time, each rank prints what it is waiting for
LIMIT_CHECK_SECONDS = 1.0  # between two checks
RANK_ZERO_LEAD = 2.0  # seconds; the launcher ends the job at the first exit, so let rank 0 print first


# ---------------------------------------------------------------------------------------------- the start


class Starting:
    """The state of start-up. engine: set once it is running."""

    def __init__(self) -> None:
        self.engine: Engine | None = None
        self.thread = threading.current_thread().ident or 0

    def where(self) -> str:
        """Return what the starting thread is doing, as text."""
        stack = stack_of(self.thread)
        ours = [frame for frame in stack if frame.filename.startswith(PACKAGE_PATH)] or stack
        at = f"at {Path(ours[-1].filename).name}:{ours[-1].lineno}, {ours[-1].name}" if ours else "nowhere"
        if self.engine is None:
            return f"waits for the other ranks to start the engine, {at}"
        collective = self.engine.activity.collective
        return f"waits for the other ranks in {collective}" if collective else f"is {at}"


@contextlib.contextmanager
def limited_start(timeouts: HangTimeouts, leave: Callable[[int], None] = os._exit) -> Iterator[Starting]:
    """Context manager that ends this process if the block exceeds the time limit of start-up, or SIGUSR1 asks it to stop.
    Prints a warning before."""
    stop()  # of a training before this one
    starting, over = Starting(), threading.Event()
    limit = timeouts.start_up()
    _heard.append(signals := SignalSocket())  # the main thread may be in a call that does not return
    if signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL:
        signals.listen([signal.SIGUSR1])

    def count() -> None:
        try:
            rank = announced().rank
        except UserError:  # the main thread will raise the same
            rank = 0
        me, seconds, said = f"rank {rank} on {socket.gethostname()}", 0.0, False
        while not over.wait(LIMIT_CHECK_SECONDS):
            with contextlib.suppress(OSError):  # the watch hears them by now
                if signals.received():
                    say_within(UNSAVED.format("SIGUSR1"))
                    leave(STOPPED)
            # Counted by turns of this loop, not by a clock: time for which the process was suspended is none.
            seconds += LIMIT_CHECK_SECONDS
            if seconds >= limit + RANK_ZERO_LEAD * (rank > 0):
                say_within(f"hvdtrain: error: {me} {starting.where()}; start-up did not finish within {limit:.0f} s\n")
                leave(1)
                return
            if seconds >= WAITING_LINE_SECONDS and not said:
                said = True
                say_within(f"warning: {me} {starting.where()}, for {seconds:.0f} s\n")

    threading.Thread(target=count, name="start-up", daemon=True).start()
    try:
        yield starting
    finally:
        over.set()
        _hear_no_more()


_heard: list[SignalSocket] = []  # that of a start, until the watch hears stop signals


def _hear_no_more() -> None:
    while _heard:
        _heard.pop().close()


# ---------------------------------------------------------------------------------------------- the end


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
        self.over = threading.Event()

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

    def heartbeat(self) -> None:
        """Report progress: the time limit restarts."""
        self.idle = 0.0

    def look(self, elapsed: float) -> None:
        """Check this process, `elapsed` seconds after the last time. Ends it if its time is over."""
        self.idle = 0.0 if self._work.seen() or self.suspended else self.idle + elapsed
        # The interpreter marks the main thread as ended before it waits for other threads and runs its exit handlers.
        exits = not threading.main_thread().is_alive() and not others()
        counts = (exits or self.disconnects) and not self.suspended
        # Limited whatever they do: a rank that fails while its GPU
        # waits for another one may spin in the shutdown for ever.
        self.exiting = self.exiting + elapsed if counts else 0.0
        if max(self.idle, self.exiting) >= self.limit:
            self._end(exits)

    def _run(self) -> None:
        before = time.monotonic()
        while not self.over.wait(LIMIT_CHECK_SECONDS):
            now = time.monotonic()
            elapsed, before = min(now - before, 2 * LIMIT_CHECK_SECONDS), now  # not the time for which it was suspended
            self.look(elapsed)

    def _end(self, exits: bool) -> None:
        stack = main_stack()
        does = f"is at {where(stack)}"
        if exits:
            does = "runs its exit handlers" + (f", at {where(stack)}" if stack else "")  # none: one written in C
        elif threads := others():
            stack = stack_of(threads[0].ident)
            does = f"waits for its thread {threads[0].name}, which is no daemon, at {where(stack)}"
        message = f"{self.name} does not end after training: it {does}, for {self.limit:.0f} s without work"
        say_within(f"hvdtrain: error: {message}\n{shown_frames(stack, self.guest)}")
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
    """Watch this process no longer: another training begins in it, or its watch."""
    global _current
    _hear_no_more()
    if _current is not None:
        _current.over.set()
    _current = None
