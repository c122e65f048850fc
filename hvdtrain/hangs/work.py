"""Tells a process that is at work from one that sleeps: CPU time, reads and writes, from /proc."""

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

LEAST_SHARE = 0.05  # of a core; a loop that only polls uses less
TICK_SECONDS = 1.0 / os.sysconf("SC_CLK_TCK")


class Work:
    """Evidence of work by this process since the last call of `seen`.

    Counted are the program's threads (Python's, without daemons: those of Horovod, MPI and ours run while the program
    hangs) and its child processes.
    """

    def __init__(self) -> None:
        self._before: dict[Path, tuple[float, int]] = {}  # by directory in /proc: CPU seconds, bytes read and written
        self._at = time.monotonic()

    def seen(self) -> bool:
        """Return whether anything used at least a twentieth of a core, read or wrote."""
        now, at = {place: used(place) for place in places()}, time.monotonic()
        seconds, transferred = 0.0, False
        for place, (cpu, count) in now.items():
            cpu_before, count_before = self._before.get(place, (0.0, 0))
            seconds += max(0.0, cpu - cpu_before)
            transferred = transferred or count > count_before
        enough = seconds >= LEAST_SHARE * (at - self._at)
        self._before, self._at = now, at
        return transferred or (enough and seconds > 0)


def places() -> Iterator[Path]:
    """Yield the directory in /proc of each of the program's threads and child processes."""
    for thread in threading.enumerate():
        if not thread.daemon and thread.native_id is not None:
            yield Path(f"/proc/self/task/{thread.native_id}")
    found = [os.getpid()]
    while found:
        children = [child for task in Path(f"/proc/{found.pop()}/task").glob("*/children") for child in numbers(task)]
        yield from (Path(f"/proc/{child}") for child in children)
        found += children


def numbers(path: Path) -> list[int]:
    """Return the numbers in a file; none if it is gone."""
    with contextlib.suppress(OSError, ValueError):
        return [int(word) for word in path.read_text().split()]
    return []


def used(place: Path) -> tuple[float, int]:
    """Return the CPU seconds of a process or thread, and the bytes that it has read and written; 0 for what is unknown."""
    seconds, count = 0.0, 0
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = (place / "stat").read_text().rpartition(")")[2].split()
        seconds = (int(fields[11]) + int(fields[12])) * TICK_SECONDS
    with contextlib.suppress(OSError, ValueError, IndexError):
        lines = (place / "io").read_text().splitlines()
        count = sum(int(line.split()[1]) for line in lines[:2])  # rchar, wchar
    return seconds, count
