"""Measures the time that each rank spends in each phase of training."""

import resource
import time
from collections import defaultdict
from typing import NamedTuple

import torch

from hvdtrain.engines.base import Engine
from hvdtrain.engines.cores import seconds_without_core


class RankTimes(NamedTuple):
    """One rank's seconds by phase and in total (the rest is reporting), and its peak memory."""

    loading: float
    compute: float
    communication: float
    elapsed: float
    resident_bytes: int
    cuda_bytes: int
    without_core: float = 0.0  # seconds, within `elapsed`, in which the main thread was ready to run but had no core


class Window(NamedTuple):
    """The measurements between two reports."""

    steps: int
    ranks: list[RankTimes]
    rates: dict[str, float]  # `Clock.rates` of this rank, and each phase's share of the time of all ranks


class Clock:
    """Measures this rank's time by phase. Each `mark` adds the time since the previous mark to a phase.

    Times are measured on the host: CUDA work counts for the phase in which the host waits for it.
    """

    PHASES = ("loading", "compute", "communication")

    def __init__(self) -> None:
        self.spans: list[tuple[str, float, float]] | None = (
            None  # if a list, records (phase, start, end) in perf_counter time
        )
        self.restart()

    def restart(self) -> None:
        """Reset the clock at the beginning of an epoch."""
        self._began = self._marked = time.perf_counter()
        self.totals: list[RankTimes] = []  # sums over all windows since `restart`, by rank
        self._open_window()

    def _open_window(self) -> None:
        self._window_began = time.perf_counter()
        self._seconds: dict[str, float] = defaultdict(float)
        self._steps = self._samples = self._local_samples = 0
        self._without_core = seconds_without_core()

    def mark(self, phase: str, at: float | None = None) -> None:
        """Add the time since the previous mark to `phase`. at: end of the phase (`time.perf_counter`; default: now)."""
        at = time.perf_counter() if at is None else at
        self._seconds[phase] += at - self._marked
        if self.spans is not None:
            self.spans.append((phase, self._marked, at))
        self._marked = at

    def leave_out(self, seconds: float) -> None:
        """Exclude the last `seconds` from all phases, rates and laps."""
        self._began += seconds
        self._marked += seconds
        self._window_began += seconds

    def count(self, samples: int, local_samples: int) -> None:
        """Count the samples of a step, over all ranks and on this rank."""
        self._steps += 1
        self._samples += samples
        self._local_samples += local_samples

    def rates(self) -> dict[str, float]:
        """Return samples per second over all ranks, and this rank's seconds per sample by phase, since the last call."""
        elapsed = time.perf_counter() - self._window_began
        rates = {"samples_per_second": self._samples / elapsed}
        for phase in self.PHASES:
            rates[f"{phase}_seconds"] = self._seconds[phase] / max(self._local_samples, 1)
        self._open_window()
        return rates

    def lap(self) -> float:
        """Return the seconds since the last call, or since `restart`."""
        began, self._began = self._began, time.perf_counter()
        return self._began - began

    def measure(self, engine: Engine) -> Window:
        """Return the measurements of all ranks since the last call. A collective: 56 bytes per rank."""
        cuda = torch.cuda.max_memory_allocated(engine.device) if engine.device.type == "cuda" else 0
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
        steps, phases = self._steps, [self._seconds[phase] for phase in self.PHASES]
        mine = [*phases, time.perf_counter() - self._window_began, resident, cuda]
        mine.append(seconds_without_core() - self._without_core)
        rows = engine.all_gather(torch.tensor(mine, dtype=torch.float64), "measure").tolist()
        ranks = [RankTimes(row[0], row[1], row[2], row[3], int(row[4]), int(row[5]), row[6]) for row in rows]
        self.totals = added(self.totals, ranks)
        share = {f"{phase}_share": value for phase, value in shares(ranks).items()}
        return Window(steps, ranks, self.rates() | share)

    def per_rank(self) -> dict[str, list[float]]:
        """Return, for each quantity, a list over ranks with the sums since `restart`."""
        names = {field: f"{field}_seconds" for field in (*self.PHASES, "elapsed", "without_core")}
        return {names.get(f, f): [round(getattr(rank, f), 6) for rank in self.totals] for f in RankTimes._fields}


def shares(ranks: list[RankTimes]) -> dict[str, float]:
    """Return the share (0 to 1) of each phase in the time of all ranks. The rest is reporting."""
    elapsed = sum(rank.elapsed for rank in ranks)
    return {phase: sum(getattr(rank, phase) for rank in ranks) / max(elapsed, 1e-9) for phase in Clock.PHASES}


def added(before: list[RankTimes], since: list[RankTimes]) -> list[RankTimes]:
    """Return the sum of the seconds of two windows by rank, and the memory of the later one."""
    if not before:
        return since
    seconds = ("loading", "compute", "communication", "elapsed", "without_core")
    return [
        new._replace(**{name: getattr(old, name) + getattr(new, name) for name in seconds})
        for old, new in zip(before, since, strict=True)
    ]
