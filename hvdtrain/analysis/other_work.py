"""How much other work a machine did during a measurement, to mark the figures of a busy machine."""

import os
import statistics
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

BUSY = 0.1  # share of the cores from which other work is reported


class Look(NamedTuple):
    """A reading. at: monotonic seconds. busy: total busy seconds of the cores; None if the kernel does not report them."""

    at: float
    busy: float | None


def look(proc: Path = Path("/proc"), cores: Collection[int] | None = None) -> Look:
    """Return how long `cores` (default: those available to this process) have been busy since boot.

    Source: /proc/stat, see proc(5). Time stolen by a hypervisor counts as busy; waiting for a disk does not.
    """
    cores = os.sched_getaffinity(0) if cores is None else cores
    names = {f"cpu{core}" for core in cores}
    try:
        lines = [line.split() for line in (proc / "stat").read_text().splitlines()]
        rows = [[int(ticks) for ticks in line[1:9]] for line in lines if line and line[0] in names]
    except (OSError, ValueError):
        rows = []
    if not rows or not any(map(sum, rows)):  # in some sandboxes, the file has no values
        return Look(time.monotonic(), None)
    # user, nice, system, idle, iowait, irq, softirq, steal; user includes guests
    busy = sum(sum(row) - sum(row[3:5]) for row in rows)
    return Look(time.monotonic(), busy / os.sysconf("SC_CLK_TCK"))


def other_cores(before: Look, after: Look, own_seconds: float) -> float | None:
    """Return the average number of cores that other work used between two readings; None if it is not known.

    own_seconds: CPU time of the measured processes.
    """
    if before.busy is None or after.busy is None or after.at <= before.at:
        return None
    return max(0.0, after.busy - before.busy - own_seconds) / (after.at - before.at)


def said(others: Sequence[float | None], cores: int) -> tuple[str, ...]:
    """Return the note on other work for tables and plots; () if there was little of it, or if it is not known."""
    known = [value for value in others if value is not None]
    if not known or max(known) < BUSY * cores:
        return ()
    more = f", at most {max(known):.1f}" if len(known) > 1 else ""
    return (f"busy machine: other work took {statistics.median(known):.1f} of {cores} cores{more}",)
