"""A time limit for start-up, before the ranks are connected: starting the engine, first collectives, finding a checkpoint.

A thread on each rank measures the time. Ranks cannot exchange messages yet, so each prints its own state.
"""

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from hvdtrain.engines.base import Engine
from hvdtrain.engines.errors import UserError
from hvdtrain.engines.launchers import announced
from hvdtrain.engines.lines import say_within
from hvdtrain.guards import leaving
from hvdtrain.guards.stacks import PACKAGE, stack_of
from hvdtrain.guards.timeouts import HangTimeouts

SAY_SECONDS = 60.0  # after this time, each rank prints what it is waiting for
LOOK_SECONDS = 1.0  # between two checks
RANK_ZERO_FIRST = 2.0  # seconds; the launcher ends the job at the first exit, so let rank 0 print first


class Starting:
    """The state of start-up. engine: set once it is running."""

    def __init__(self) -> None:
        self.engine: Engine | None = None
        self.thread = threading.current_thread().ident or 0

    def where(self) -> str:
        """Return what the starting thread is doing, as text."""
        stack = stack_of(self.thread)
        ours = [frame for frame in stack if frame.filename.startswith(PACKAGE)] or stack
        at = f"at {Path(ours[-1].filename).name}:{ours[-1].lineno}, {ours[-1].name}" if ours else "nowhere"
        if self.engine is None:
            return f"waits for the other ranks to start the engine, {at}"
        collective = self.engine.activity.collective
        return f"waits for the other ranks in {collective}" if collective else f"is {at}"


@contextlib.contextmanager
def limited_start(timeouts: HangTimeouts, leave: Callable[[int], None] = os._exit) -> Iterator[Starting]:
    """Context manager that ends this process if the block exceeds the time limit of start-up. Prints a warning before.

    Time for which the process was suspended does not count.
    """
    leaving.stop()  # of a training before this one
    starting, over = Starting(), threading.Event()
    limit = timeouts.start_up()

    def count() -> None:
        try:
            rank = announced().rank
        except UserError:  # the main thread will raise the same
            rank = 0
        me, seconds, message = f"rank {rank} on {socket.gethostname()}", 0.0, False
        while not over.wait(LOOK_SECONDS):
            seconds += LOOK_SECONDS
            if seconds >= limit + RANK_ZERO_FIRST * (rank > 0):
                say_within(f"hvdtrain: error: {me} {starting.where()}; start-up did not finish within {limit:.0f} s\n")
                leave(1)
                return
            if seconds >= SAY_SECONDS and not message:
                message = True
                say_within(f"warning: {me} {starting.where()}, for {seconds:.0f} s\n")

    threading.Thread(target=count, name="start-up", daemon=True).start()
    try:
        yield starting
    finally:
        over.set()
