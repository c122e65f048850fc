"""Measures how long threads of this process were ready to run but had no core: such a rank is starved, not hung."""

import contextlib
import threading
import time
from pathlib import Path
from typing import NamedTuple

TURNS = 20.0  # time slices per second: a thread that gets more is not starved


class Running(NamedTuple):
    """Scheduling state of a thread. turns: number of time slices so far."""

    ready: bool  # running, or ready to run
    cpu_seconds: float
    turns: int


class Starvation:
    """Adds up the starved time since `reset`. Call `seconds` about once a second, always from the same thread, which is
    itself not counted."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._counted_at = time.monotonic()
        self._threads: dict[int, Running] = {}  # state at that time

    def reset(self) -> None:
        """Set the sum to 0."""
        self._seconds = 0.0

    def seconds(self) -> float:
        """Return the time in seconds for which threads were ready to run but had no core, summed over threads.

        A thread counts if it is ready to run and gets few time slices. MPI's busy-wait loops do not count: there may be more
        of them than cores, but each yields and soon runs again.
        """
        now, threads = time.monotonic(), other_threads()
        elapsed = now - self._counted_at
        for thread, running in threads.items():
            before = self._threads.get(thread)
            if before and running.ready and running.turns - before.turns < TURNS * elapsed:
                self._seconds += elapsed - (running.cpu_seconds - before.cpu_seconds)
        self._counted_at, self._threads = now, threads
        return max(0.0, self._seconds)


def other_threads(tasks: Path = Path("/proc/self/task")) -> dict[int, Running]:
    """Return the state of all other threads of this process, by thread ID; empty if the kernel does not count time slices.

    Source: stat and schedstat in /proc/PID/task/TID. (schedstat also has the time spent waiting for a core, but is updated
    only after the wait.)
    """
    threads = {}
    for task in tasks.glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):  # the thread has just ended, or an unknown format
            state = (task / "stat").read_text().rpartition(")")[2].split()[0]
            nanoseconds, _, turns = map(int, (task / "schedstat").read_text().split())
            if turns:  # 0: the kernel does not count, because every thread has run at least once
                threads[int(task.name)] = Running(state == "R", nanoseconds / 1e9, turns)
    threads.pop(threading.get_native_id(), None)
    return threads
