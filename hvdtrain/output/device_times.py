"""The time of a device: of an accelerator by phase, and of a large matrix product.

On an accelerator by its own events: the host would add the time to start a kernel and to learn of its end.
"""

import time
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import torch

from hvdtrain.engines.accelerators import module_of

SIDES = {"cpu": 1024}  # of a matrix product that occupies the device; others: LARGE_SIDE
LARGE_SIDE = 8192  # 1.1 TFLOP: milliseconds on a GPU, against microseconds to start a kernel
MOST_EVENTS = 1000  # that are kept until a window ends: with --log-steps 100000 there would be a million


class DeviceTimes:
    """Measures the time of an accelerator by phase, with events on its current stream. It never waits for the device.

    The host only queues work, and is soon ahead. Where it then waits says nothing about what the device does meanwhile.
    """

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
        while self._spans and self._spans[0][2].query():
            phase, start, end = self._spans.popleft()
            self._seconds[phase] += start.elapsed_time(end) / 1000


def matrix_product_rate(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Return the FLOP/s that `device` reaches in a product of two square matrices of `dtype`, as float64 []."""
    side = SIDES.get(device.type, LARGE_SIDE)
    a, b = torch.randn(2, side, side, device=device).to(dtype)
    best = min(seconds_of(device, lambda: a @ b) for _ in range(4))  # the first is a warm-up
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
