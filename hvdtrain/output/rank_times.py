"""What a rank's clock has measured, and how the measurements of all ranks are added up."""

import contextlib
import os
import resource
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from hvdtrain.output.metric_names import PHASES


class RankTimes(NamedTuple):
    """One rank's seconds by phase and in total (the rest is reporting), and its peak memory."""

    loading: float
    compute: float
    communication: float
    elapsed: float
    without_core: float  # seconds, within `elapsed`, in which the main thread was ready to run but had no core
    resident_bytes: float
    cuda_bytes: float

    def fields(self) -> dict[str, float]:
        """Return the values under their names in a record."""
        return {name if name.endswith("bytes") else f"{name}_seconds": value for name, value in self._asdict().items()}


class Window(NamedTuple):
    """The measurements between two reports."""

    steps: int
    ranks: list[RankTimes]
    rates: dict[str, float]  # `Clock.rates` of this rank, and each phase's share of the time of all ranks


def peak_memory(device: torch.device) -> tuple[int, int]:
    """Return the peak memory of this process in bytes: resident, and allocated by torch on the GPU."""
    cuda = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, cuda  # Linux counts in KiB


def shares(ranks: Sequence[RankTimes]) -> dict[str, float]:
    """Return the share (0 to 1) of each phase in the time of all ranks, as `loading_share`. The rest is reporting."""
    elapsed = sum(rank.elapsed for rank in ranks)
    return {f"{phase}_share": sum(getattr(rank, phase) for rank in ranks) / max(elapsed, 1e-9) for phase in PHASES}


def added(before: list[RankTimes], since: list[RankTimes]) -> list[RankTimes]:
    """Return the sum of the seconds of two windows by rank, and the memory of the later one."""
    if not before:
        return since
    return [
        RankTimes._make([a + b for a, b in zip(old[:5], new[:5], strict=True)] + [*new[5:]])
        for old, new in zip(before, since, strict=True)
    ]


def by_rank(ranks: Sequence[RankTimes]) -> dict[str, list[float]]:
    """Return each quantity under its name in a record, as a list over ranks."""
    rows = [rank.fields() for rank in ranks]
    return {name: [round(row[name], 6) for row in rows] for name in (rows[0] if rows else {})}


def seconds_without_core(tasks: Path = Path("/proc/self/task")) -> float:
    """Return how long the main thread was ready to run but had no core, in seconds; 0 if the kernel does not say."""
    with contextlib.suppress(OSError, ValueError):
        _, waiting, _ = map(int, (tasks / str(os.getpid()) / "schedstat").read_text().split())
        return waiting / 1e9
    return 0.0
