"""Measures the time that each rank spends in each phase of training."""

import time
from collections import defaultdict

import torch

from hvdtrain.engines.accelerators import CPU
from hvdtrain.engines.base import Engine
from hvdtrain.output.metric_names import PHASES
from hvdtrain.output.rank_times import (
    RankTimes,
    Window,
    added,
    by_rank,
    peak_memory,
    seconds_without_core,
    shares,
)


class Clock:
    """Measures this rank's time by phase. Each `mark` adds the time since the previous mark to a phase.

    On an accelerator, the phases are those of the device (`DeviceTimes`), and a window has what it has completed in it.
    """

    def __init__(self, device: torch.device = CPU) -> None:
        self._device_times = None
        if device.type != "cpu":
            from hvdtrain.output.device_times import DeviceTimes

            self._device_times = DeviceTimes(device)
        self.restart()

    def restart(self) -> None:
        """Reset the clock at the beginning of an epoch."""
        self._began = self._marked = time.perf_counter()
        self.step_seconds = 0.0  # of the last step, and of what was done since the one before
        self.totals: list[RankTimes] = []  # sums over all windows since `restart`, by rank
        if self._device_times is not None:
            self._device_times.restart()
        self._open_window()

    def _open_window(self) -> None:
        self._window_began = time.perf_counter()
        self._seconds: dict[str, float] = defaultdict(float)
        self._steps = self._samples = self._local_samples = 0
        self._without_core = seconds_without_core()

    def mark(self, phase: str, at: float | None = None) -> float:
        """Add the time since the previous mark to `phase`. at: end of the phase (`time.perf_counter`); None: now. Return
        it. A time before the previous mark adds nothing: a phase within another counts once."""
        at = time.perf_counter() if at is None else max(at, self._marked)
        self._seconds[phase] += at - self._marked
        if self._device_times is not None:
            self._device_times.mark(phase)
        self._marked = at
        return at

    def end_step(self, samples: int, local_samples: int) -> float:
        """Count a step and its samples, over all ranks and on this rank. Return the time, as `mark`."""
        self._steps += 1
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
        rates = {"samples_per_second": self._samples / elapsed}
        for phase in PHASES:
            rates[f"{phase}_seconds"] = self._seconds[phase] / max(self._local_samples, 1)
        self._open_window()
        return rates

    def lap(self) -> float:
        """Return the seconds since the last step, or since `restart`."""
        began, self._began = self._began, time.perf_counter()
        return self._began - began

    def measure(self, engine: Engine) -> Window:
        """Return the measurements of all ranks since the last call. A collective: 56 bytes per rank."""
        if self._device_times is not None:
            self._seconds = self._device_times.take()
        steps = self._steps
        rows = engine.all_gather(torch.tensor(self.times(engine.device), dtype=torch.float64), "measure").tolist()
        ranks = list(map(RankTimes._make, rows))
        self.totals = added(self.totals, ranks)
        return Window(steps, ranks, self.rates() | shares(ranks))

    def times(self, device: torch.device) -> RankTimes:
        """Return this rank's measurements since the last window. device: whose memory is meant."""
        elapsed = time.perf_counter() - self._window_began
        without_core = seconds_without_core() - self._without_core
        phases = [self._seconds[phase] for phase in PHASES]
        return RankTimes._make([*phases, elapsed, without_core, *peak_memory(device)])

    def per_rank(self) -> dict[str, list[float]]:
        """Return the sums since `restart` under their names in a record, each a list over ranks."""
        return by_rank(self.totals)
