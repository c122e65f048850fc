"""A limit for what comes before the ranks watch each other: the engine's start-up, first collectives, finding a checkpoint.

A thread on each rank counts; no rank can ask another one yet. So each says for itself where it stands.
"""

import contextlib
import os
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from hvdtrain.engines.base import Engine
from hvdtrain.engines.errors import UserError
from hvdtrain.engines.launchers import announced
from hvdtrain.training.resilience.progress import PHASE_SECONDS, TIMES_STEP

PACKAGE = str(Path(__file__).resolve().parents[2])
SAY_SECONDS = 60.0  # after which each rank says what it waits for
LOOK_SECONDS = 1.0
RANK_ZERO_FIRST = 2.0  # seconds: a launcher ends a job at the first rank that fails, and rank 0 knows no less


class Starting:
    """What the thread looks at. engine: once it is made."""

    def __init__(self) -> None:
        self.engine: Engine | None = None
        self.thread = threading.current_thread().ident or 0

    def where(self) -> str:
        """Return where the thread that starts everything stands."""
        stack = traceback.extract_stack(sys._current_frames().get(self.thread))
        ours = [frame for frame in stack if frame.filename.startswith(PACKAGE)] or stack
        at = f"at {Path(ours[-1].filename).name}:{ours[-1].lineno}, {ours[-1].name}" if ours else "nowhere"
        if self.engine is None:
            return f"waits for the other ranks to start the engine, {at}"
        return f"waits for the other ranks in {self.engine.waiting_in}" if self.engine.waiting_in else f"is {at}"


@contextlib.contextmanager
def limited_start(step_timeout: float | None, leave: Callable[[int], None] = os._exit) -> Iterator[Starting]:
    """End this process with a line where the block takes longer than start-up may take; before, say who waits for what.

    step_timeout: as for the watchdog; 0: no limit. Time for which the process was suspended does not count.
    """
    starting, over = Starting(), threading.Event()
    limit = max(PHASE_SECONDS["start-up"], TIMES_STEP * (step_timeout or 0.0)) if step_timeout != 0 else float("inf")

    def count() -> None:
        try:
            rank = announced().rank
        except UserError:  # which the main thread is about to raise
            rank = 0
        me, seconds, said = f"rank {rank} on {socket.gethostname()}", 0.0, False
        while not over.wait(LOOK_SECONDS):
            seconds += LOOK_SECONDS
            if seconds >= limit + RANK_ZERO_FIRST * (rank > 0):
                sys.stderr.write(
                    f"hvdtrain: error: {me} {starting.where()}; start-up was not over after {limit:.0f} s\n"
                )
                sys.stderr.flush()
                leave(1)
                return
            if seconds >= SAY_SECONDS and not said:
                said = True
                sys.stderr.write(f"warning: {me} {starting.where()}, since {seconds:.0f} s\n")

    threading.Thread(target=count, name="start-up", daemon=True).start()
    try:
        yield starting
    finally:
        over.set()
