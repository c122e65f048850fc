"""How much other work a machine did while something was measured: whoever reads the figures must know that it was busy."""

import os
import statistics
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

BUSY = 0.1  # of the cores: from there on, other work is said


class Look(NamedTuple):
    """at: monotonic seconds. busy: seconds that the cores have worked, for anybody; None where the kernel does not say."""

    at: float
    busy: float | None


def look(proc: Path = Path("/proc"), cores: Collection[int] | None = None) -> Look:
    """Return what `cores` (default: those on which this process may run) have done since the machine started.

    Source: stat in proc(5). Time in which a hypervisor ran others ("steal") counts as work; waiting for a disk does not.
    """
    cores = os.sched_getaffinity(0) if cores is None else cores
    names = {f"cpu{core}" for core in cores}
    try:
        lines = [line.split() for line in (proc / "stat").read_text().splitlines()]
        rows = [[int(ticks) for ticks in line[1:9]] for line in lines if line and line[0] in names]
    except (OSError, ValueError):
        rows = []
    if not rows or not any(map(sum, rows)):  # some sandboxes have the file, and nothing in it
        return Look(time.monotonic(), None)
    # user, nice, system, idle, iowait, irq, softirq, steal; guests are in user already
    busy = sum(sum(row) - sum(row[3:5]) for row in rows)
    return Look(time.monotonic(), busy / os.sysconf("SC_CLK_TCK"))


def other_cores(before: Look, after: Look, own_seconds: float) -> float | None:
    """Return how many cores other work took on average between two looks. own_seconds: CPU time of what was measured."""
    if before.busy is None or after.busy is None or after.at <= before.at:
        return None
    return max(0.0, after.busy - before.busy - own_seconds) / (after.at - before.at)


def said(others: Sequence[float | None], cores: int) -> tuple[str, ...]:
    """Return what a picture and a table must say of other work; nothing where there was hardly any, or nobody knows."""
    known = [value for value in others if value is not None]
    if not known or max(known) < BUSY * cores:
        return ()
    more = f", at most {max(known):.1f}" if len(known) > 1 else ""
    return (f"busy machine: other work took {statistics.median(known):.1f} of {cores} cores{more}",)
