"""The time that each rank spends in each phase of training, and what the ranks have measured together.

On an accelerator, by its own events: the host would add the time to start a kernel and to learn of its end.
"""

import os
import resource
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from hvdtrain.engines.accelerators import CPU, module_of
from hvdtrain.engines.base import Engine
from hvdtrain.launching import processes
from hvdtrain.output.metric_names import PHASES

SIDES = {"cpu": 1024}  # of a matrix product that occupies the device; others: LARGE_SIDE
LARGE_SIDE = 8192  # 1.1 TFLOP: milliseconds on a GPU, against microseconds to start a kernel
MOST_EVENTS = 1000  # that are kept until a window ends: with --log-steps 100000 there would be a million


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

    ranks: list[RankTimes]
    rates: dict[str, float]  # `Clock.rates` of this rank, and each phase's share of the time of all ranks
    alike: bool = True  # all ranks have given the same key


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


def seconds_without_core() -> float:
    """Return how long the main thread was ready to run but had no core, in seconds; 0 if the kernel does not say."""
    turns = processes.turns(os.getpid())
    return turns.waiting_seconds if turns is not None else 0.0


class Clock:
    """Measures this rank's time by phase. Each `mark` adds the time since the previous mark to a phase.

    On an accelerator, the phases are those of the device (`DeviceTimes`), and a window has what it has completed in it.
    """

    def __init__(self, device: torch.device = CPU) -> None:
        self._device_times = None
        if device.type != "cpu":
            self._device_times = DeviceTimes(device)
        self.restart()

    def restart(self) -> None:
        """Reset the clock at the beginning of an epoch."""
        self._began = self._marked = time.perf_counter()
        self.step_seconds = 0.0  # of the last step, and of what was done since the one before
        self.totals: list[RankTimes] = []  # sums over all windows since `restart`, by rank
        if self._device_times is not None:
            self._device_times.restart()
        self._without_core = seconds_without_core()
        self._open_window()

    def _open_window(self) -> None:
        self._window_began = time.perf_counter()
        self._seconds: dict[str, float] = defaultdict(float)
        self._samples = self._local_samples = 0

    def mark(self, phase: str, at: float | None = None) -> float:
        """Add the time since the previous mark to `phase`. at: end of the phase (`time.perf_counter`); None: now. Return
        it."""
        # A time before the previous mark adds nothing: a phase within another counts once.
        at = time.perf_counter() if at is None else max(at, self._marked)
        self._seconds[phase] += at - self._marked
        if self._device_times is not None:
            self._device_times.mark(phase)
        self._marked = at
        return at

    def end_step(self, samples: int, local_samples: int) -> float:
        """Count the samples of a step, over all ranks and on this rank. Return the time, as `mark`."""
        self._samples += samples
        self._local_samples += local_samples
        now = self.mark("compute")
        self.step_seconds, self._began = now - self._began, now
        return now

    def leave_out(self, seconds: float) -> None:
        """Exclude the last `seconds` from all phases, rates and laps."""
        self._began += seconds
        self._marked += seconds
        self._window_began += seconds
        if self._device_times is not None:
            self._device_times.leave_out()

    def rates(self) -> dict[str, float]:
        """Return samples per second over all ranks, and this rank's seconds per sample by phase, since the last call."""
        elapsed = time.perf_counter() - self._window_began
        rates = {"samples_per_second": self._samples / max(elapsed, 1e-9)}
        for phase in PHASES:
            rates[f"{phase}_seconds"] = self._seconds[phase] / max(self._local_samples, 1)
        self._open_window()
        return rates

    def lap(self) -> float:
        """Return the seconds since the last step, or since `restart`."""
        began, self._began = self._began, time.perf_counter()
        return self._began - began

    def measure(self, engine: Engine, key: int = 0) -> Window:
        """Return the measurements of all ranks since the last call. key: is compared. A collective: 64 bytes per rank."""
        if self._device_times is not None:
            self._seconds = self._device_times.take()
        own = torch.tensor([*self.times(engine.device), key], dtype=torch.float64)
        rows = engine.all_gather(own, "measure").tolist()
        ranks = [RankTimes._make(row[:-1]) for row in rows]
        self.totals = added(self.totals, ranks)
        return Window(ranks, self.rates() | shares(ranks), len({row[-1] for row in rows}) == 1)

    def times(self, device: torch.device) -> RankTimes:
        """Return this rank's measurements since the last window. device: whose memory is meant."""
        elapsed = time.perf_counter() - self._window_began
        before, self._without_core = self._without_core, seconds_without_core()
        phases = [self._seconds[phase] for phase in PHASES]
        return RankTimes._make([*phases, elapsed, self._without_core - before, *peak_memory(device)])

    def per_rank(self) -> dict[str, list[float]]:
        """Return the sums since `restart` under their names in a record, each a list over ranks."""
        rows = [rank.fields() for rank in self.totals]
        return {name: [round(row[name], 6) for row in rows] for name in (rows[0] if rows else {})}


class DeviceTimes:
    """Measures the time of an accelerator by phase, with events on its current stream. It never waits for the device."""

    def __init__(self, device: torch.device):
        self._device, self._backend = device, module_of(device)
        self._spans: deque[tuple[str, Any, Any]] = deque()  # (phase, event at its start, event at its end)
        self._seconds: dict[str, float] = defaultdict(float)
        self._marked = self._now()

    def _now(self) -> Any:
        event = self._backend.Event(enable_timing=True)
        event.record(self._backend.current_stream(self._device))
        return event

    def restart(self) -> None:
        """Forget what has not been taken."""
        self._spans.clear()
        self._seconds.clear()
        self.leave_out()

    def leave_out(self) -> None:
        """Exclude the time since the last mark."""
        self._marked = self._now()

    def mark(self, phase: str) -> None:
        """Add the time since the last mark to `phase`: from when the device had done its work until then to when it has
        done its work until now."""
        # The host only queues work, and is soon ahead: where it waits says nothing about the device.
        event = self._now()
        self._spans.append((phase, self._marked, event))
        self._marked = event
        if len(self._spans) > MOST_EVENTS:
            self._collect()

    def take(self) -> dict[str, float]:
        """Return the seconds of the spans that the device has completed since the last call, by phase."""
        self._collect()
        taken, self._seconds = self._seconds, defaultdict(float)
        return taken

    def _collect(self) -> None:
        # `query` does not wait. What the device has not done yet counts in the next window.
        while self._spans and self._spans[0][2].query():
            phase, start, end = self._spans.popleft()
            self._seconds[phase] += start.elapsed_time(end) / 1000


def matrix_product_rate(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Return the FLOP/s that `device` reaches in a product of two square matrices of `dtype`, as float64 []."""
    side = SIDES.get(device.type, LARGE_SIDE)
    a, b = torch.randn(2, side, side, device=device).to(dtype)
    # The first is a warm-up. Of the others the least: other processes only make a product slower.
    best = min(seconds_of(device, lambda: a @ b) for _ in range(4))
    return torch.tensor(2 * side**3 / best, dtype=torch.float64)


def seconds_of(device: torch.device, work: Callable[[], object]) -> float:
    """Return how long `device` takes for `work`."""
    if device.type == "cpu":
        began = time.perf_counter()
        work()
        return time.perf_counter() - began
    backend = module_of(device)
    start, end = (backend.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000
