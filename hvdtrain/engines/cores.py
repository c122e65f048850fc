"""The CPU cores available to a rank: its affinity, the other ranks on the host, its control group (cgroup).

Does not import torch.
"""

import contextlib
import math
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from hvdtrain.engines.errors import UserError
from hvdtrain.engines.launchers import Announced, cores_of_job
from hvdtrain.launching import processes


def threads_asked(environ: Mapping[str, str]) -> int | None:
    """Return the number of threads that OMP_NUM_THREADS gives; None if it is not set, or only torchrun has set it, to 1."""
    asked = environ.get("OMP_NUM_THREADS", "")
    of_torchrun = asked == "1" and "TORCHELASTIC_RUN_ID" in environ and environ.get("LOCAL_WORLD_SIZE") != "1"
    return int(asked) if asked.isdecimal() and int(asked) > 0 and not of_torchrun else None


def share_of_cores(rank: int, cores: Sequence[tuple[str, Collection[int]]], quota: float) -> float:
    """Return the share of `rank` of the cores that it may run on.

    cores: for each rank, its host and the cores it may run on. Ranks on the same host may share cores, each other ones.
    quota: see `cpu_quota`.
    """
    host, mine = cores[rank]
    neighbours = [set(theirs) for where, theirs in cores if where == host]
    # With an odd number of ranks on two sockets, one of them has a socket of its own:
    # cores are shared by different numbers.
    share = sum(1 / sum(core in theirs for theirs in neighbours) for core in mine)
    # Ten tenths of a core may add up to a little less than one.
    return min(share, quota / len(neighbours)) + 1e-6


def threads_for(rank: int, cores: Sequence[tuple[str, Collection[int]]], quota: float) -> int:
    """Return how many threads `rank` should use: as `share_of_cores`, at least one."""
    return max(1, int(share_of_cores(rank, cores, quota)))


def share_of_host(ranks: int, quota: float) -> tuple[int, float]:
    """Return how many threads this rank should use, and the number of cores for all ranks, before the ranks can communicate.

    ranks: number of ranks on this host. quota: see `cpu_quota`.
    """
    mine = job = len(os.sched_getaffinity(0))
    # The launcher may run on all of the job's cores.
    # A rank with fewer was bound to its own, or a script or container around it.
    for parent in processes.parents():
        with contextlib.suppress(OSError):  # it has exited, or is not visible
            job = max(job, len(os.sched_getaffinity(parent)))
    cores = min(job, quota)
    return max(1, int(min(mine, cores / ranks) + 1e-6)), cores


def turn_on(rank: int, cores: Sequence[tuple[str, Collection[int]]]) -> int | None:
    """Return the core that `rank` takes turns on, where a host has more ranks than cores: as many ranks on each core.

    cores: as in `share_of_cores`. None where there are cores enough, or the ranks cannot be divided evenly, or a launcher
    has bound some of them.
    """
    host, mine = cores[rank]
    neighbours = [number for number, (where, _) in enumerate(cores) if where == host]
    # Trap: the kernel takes a rank that waits in MPI for one that works,
    # and leaves other cores with more ranks that do.
    alike = all(set(cores[number][1]) == set(mine) for number in neighbours)
    if not alike or len(neighbours) <= len(mine) or len(neighbours) % len(mine):
        return None
    return sorted(mine)[neighbours.index(rank) * len(mine) // len(neighbours)]


def stay_on(core: int) -> None:
    """Keep this process on a core, with all threads that it has. Does nothing where there is no /proc."""
    with contextlib.suppress(OSError):
        for thread in processes.own_threads():
            with contextlib.suppress(OSError):  # it has ended
                os.sched_setaffinity(thread, {core})


def near_gpu(
    address: str, mine: Collection[int], on_host: int, devices: Path = Path("/sys/bus/pci/devices")
) -> set[int]:
    """Return the cores of `mine` that are next to the GPU at a PCI address ("0000:65:00.0"): those of its NUMA node.

    Empty where the kernel does not say, where all are, and where this rank may not run on all cores of the host, because its
    launcher has chosen. on_host: number of the host's cores.
    """
    if len(mine) < on_host:
        return set()
    try:
        near = set(listed_cores((devices / address / "local_cpulist").read_text())) & set(mine)
    except (OSError, ValueError):
        return set()
    return near if len(near) < len(mine) else set()


def listed_cores(text: str) -> list[int]:
    """Return the numbers in "0-3,8", as the kernel lists cores. Raises ValueError."""
    spans = (part.partition("-") for part in text.strip().split(",") if part)
    return [number for first, _, last in spans for number in range(int(first), int(last or first) + 1)]


def cpu_quota(root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> float:
    """Return the CPU time limit of this process's control group (version 2), in cores; inf if there is no limit."""
    try:
        own = next(line[4:] for line in membership.read_text().splitlines() if line.startswith("0::/"))
    except (OSError, StopIteration):
        return float("inf")
    quota = float("inf")
    # A limit of any group above this one holds, too.
    for directory in [root, *(root / part for part in _prefixes(own))]:
        try:
            limit, period = (directory / "cpu.max").read_text().split()
            cores = float(limit) / float(period) if limit != "max" else quota
        except (OSError, ValueError, ZeroDivisionError):
            continue
        quota = min(quota, cores) if cores > 0 else quota
    return quota


def _prefixes(path: str) -> list[str]:
    parts = [part for part in path.split("/") if part]
    return ["/".join(parts[: depth + 1]) for depth in range(len(parts))]


def cores_here(environment: Mapping[str, str], place: Announced) -> int:
    """Return how many cores this process may use according to its affinity, its control group and Slurm."""
    return math.ceil(min(len(os.sched_getaffinity(0)), cpu_quota(), cores_of_job(environment, place)))


def refuse_too_many_for_cores(ranks: int, cores: int, launcher: str) -> None:
    """Raise UserError if there are more ranks than cores."""
    if ranks > cores:
        slurm = f"give the task more (srun --cpus-per-task={ranks}), " if launcher == "Slurm" else ""
        remedy = f"{slurm}use --local-ranks {cores}, or add --oversubscribe"
        raise UserError(f"--local-ranks {ranks}, but {cores} core{'s'[: cores > 1]} here: {remedy}", everywhere=True)
