"""Tells a process that is at work, or has no core to work on, from one that hangs."""

import os
import threading
import time
from collections.abc import Iterator

from hvdtrain.launching import processes

LEAST_SHARE = 0.05  # of a core; a loop that only polls uses less
MOST_TURNS = 20.0  # time slices per second: a thread that gets more is not starved


class Work:
    """Evidence of work by this process since the last call of `seen`.

    Counted are the program's threads (Python's, without daemons: those of Horovod, MPI and ours run while the program
    hangs) and its child processes.
    """

    def __init__(self) -> None:
        self._before: dict[str, tuple[float, int]] = {}  # CPU seconds, bytes read and written
        self._at = time.monotonic()

    def seen(self) -> bool:
        """Return whether anything used at least a twentieth of a core, read or wrote, or the main thread waits for a
        disk."""
        now, at = {which: used(which) for which in threads_and_children()}, time.monotonic()
        seconds, transferred = 0.0, False
        for which, (cpu, count) in now.items():
            cpu_before, count_before = self._before.get(which, (0.0, 0))
            seconds += max(0.0, cpu - cpu_before)
            transferred = transferred or count > count_before
        enough = seconds >= LEAST_SHARE * (at - self._at)
        self._before, self._at = now, at
        return transferred or (enough and seconds > 0) or waits_for_disk()


def waits_for_disk() -> bool:
    """Return whether the main thread is in a call that only a device can end, such as fsync."""
    thread = processes.stat(f"self/task/{os.getpid()}")
    return thread is not None and thread.state == "D"


def threads_and_children() -> Iterator[str]:
    """Yield the program's threads and child processes, as `processes.stat` takes them."""
    for thread in threading.enumerate():
        if not thread.daemon and thread.native_id is not None:
            yield f"self/task/{thread.native_id}"
    yield from map(str, processes.descendants(os.getpid()))


def used(which: str) -> tuple[float, int]:
    """Return the CPU seconds of a process or thread, and the bytes that it has read and written; 0 for what is unknown."""
    process = processes.stat(which)
    return process.cpu_seconds if process else 0.0, processes.bytes_transferred(which)


class Starvation:
    """Adds up for how long threads of this process were ready to run but had no core: such a rank is starved, not hung.

    Call `seconds` about once a second, always from the same thread, which is itself not counted.
    """

    def __init__(self) -> None:
        self._seconds = 0.0
        self._counted_at = time.monotonic()
        self._turns: dict[int, processes.Turns] = {}  # at that time

    def reset(self) -> None:
        """Set the sum to 0."""
        self._seconds = 0.0

    def seconds(self) -> float:
        """Return the time since `reset`, in seconds, summed over threads.

        A thread counts if it is ready to run and gets few time slices. MPI's busy-wait loops do not count: there may be more
        of them than cores, but each yields and soon runs again.
        """
        now, mine = time.monotonic(), threading.get_native_id()
        elapsed = now - self._counted_at
        turns = {
            thread: turns for thread in processes.threads() if thread != mine and (turns := processes.turns(thread))
        }
        for thread, (running, _, slices) in turns.items():
            before, state = self._turns.get(thread), processes.stat(f"self/task/{thread}")
            if before and state and state.state == "R" and 0 < slices < before.slices + MOST_TURNS * elapsed:
                self._seconds += elapsed - (running - before.cpu_seconds)
        self._counted_at, self._turns = now, turns
        return max(0.0, self._seconds)
