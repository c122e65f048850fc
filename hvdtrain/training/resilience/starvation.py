"""How long threads of this process were ready to run without a core: a starved rank is not a hung one."""

import contextlib
import threading
import time
from pathlib import Path
from typing import NamedTuple

TURNS = 20.0  # a second on a core: who comes on more often is not kept from running


class Running(NamedTuple):
    """How a thread runs. turns: how often it has come on a core."""

    ready: bool  # it runs, or would if there were a core
    cpu_seconds: float
    turns: int


class Starvation:
    """Counts from `reset` on; to be asked every second or so, always by the same thread, whose own time is left out."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._counted_at = time.monotonic()
        self._threads: dict[int, Running] = {}  # as they were then

    def reset(self) -> None:
        self._seconds = 0.0

    def seconds(self) -> float:
        """Return for how many seconds threads wanted to run and had no core, added up.

        What a thread that is ready to run, and hardly comes on, has not run since. Not the loops in which MPI waits: there
        may be more of them than cores, but each yields, and comes on again.
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
    """Return the threads of this process other than the caller's, by number; empty where the kernel does not count turns.

    Source: stat and schedstat in /proc/PID/task/TID. (schedstat has the wait for a core, too, but only once it is over.)
    """
    threads = {}
    for task in tasks.glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):  # it may have ended just now; another kernel's words
            state = (task / "stat").read_text().rpartition(")")[2].split()[0]
            nanoseconds, _, turns = map(int, (task / "schedstat").read_text().split())
            if turns:  # else none are counted: a thread that exists has run once
                threads[int(task.name)] = Running(state == "R", nanoseconds / 1e9, turns)
    threads.pop(threading.get_native_id(), None)
    return threads
