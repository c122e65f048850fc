"""The cores available to a rank: its affinity, the other ranks on the host, its control group. Does not import torch."""

import os
from pathlib import Path


def threads_for(rank: int, cores: list[tuple[str, list[int]]], quota: float) -> int:
    """Return how many threads `rank` should use: its share of the cores that it may run on, and at least one.

    `cores`: per rank its host and the cores it may run on, which other ranks of the host may share or not.
    `quota`: cores' worth of time that the container may use (`cpu_quota`).
    """
    host, mine = cores[rank]
    neighbours = [set(theirs) for where, theirs in cores if where == host]
    share = sum(1 / sum(core in theirs for theirs in neighbours) for core in mine)
    return max(1, int(min(share, quota / len(neighbours)) + 1e-6))


def share_of_host(ranks: int, quota: float, parent: int | None = None) -> tuple[int, float]:
    """Return how many threads this rank should use, before any rank has met another, and the cores of them all.

    ranks: how many of them are on this host. quota: see `cpu_quota`. parent: the process number of what started this rank.
    What started the ranks may run on all of the job's cores; a rank that may run on fewer was bound to its own.
    """
    mine = len(os.sched_getaffinity(0))
    try:
        job = max(mine, len(os.sched_getaffinity(os.getppid() if parent is None else parent)))
    except OSError:  # it has ended, or is hidden
        job = mine
    cores = min(job, quota)
    return max(1, int(min(mine, cores / ranks) + 1e-6)), cores


def cpu_quota(root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> float:
    """Return the cores' worth of time that this process's control group (version 2) allows; inf where it sets no limit."""
    try:
        own = next(line[4:] for line in membership.read_text().splitlines() if line.startswith("0::/"))
    except (OSError, StopIteration):
        return float("inf")
    quota = float("inf")
    for directory in [root, *(root / part for part in _prefixes(own))]:
        try:
            limit, period = (directory / "cpu.max").read_text().split()
            cores = float(limit) / float(period) if limit != "max" else quota
        except (OSError, ValueError, ZeroDivisionError):
            continue
        quota = min(quota, cores) if cores > 0 else quota
    return quota


def seconds_without_core(tasks: Path = Path("/proc/self/task")) -> float:
    """Return for how long the main thread of this process has been ready to run and had no core, so far; 0 where the kernel
    does not count it (`schedstat`: nanoseconds on a core, nanoseconds waiting for one, turns)."""
    try:
        return int((tasks / str(os.getpid()) / "schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def _prefixes(path: str) -> list[str]:
    parts = [part for part in path.split("/") if part]
    return ["/".join(parts[: depth + 1]) for depth in range(len(parts))]
