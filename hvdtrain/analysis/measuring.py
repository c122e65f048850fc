"""Functions for all measurements: device synchronization, hardware, result files."""

import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch

from hvdtrain.engines import atomic, files
from hvdtrain.engines.accelerators import module_of


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


SIDES = {"cpu": 1024}  # of a matrix product that occupies the device; others: LARGE_SIDE
LARGE_SIDE = 8192  # 1.1 TFLOP: milliseconds on a GPU, against microseconds to start a kernel


def matrix_product_rate(device: torch.device, dtype: torch.dtype, side: int | None = None) -> torch.Tensor:
    """Return the FLOP/s that `device` reaches in a product of two [side, side] matrices of `dtype`, as float64 [].

    On an accelerator, timed by its own events: the host would add the time to start a kernel and to learn of its end.
    """
    side = side or SIDES.get(device.type, LARGE_SIDE)
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


def hardware() -> dict[str, object]:
    """Return the hardware of this process: processor, cores it may use, memory in bytes, GPU, load average."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    found: dict[str, object] = dict(
        processor=next(names, platform.processor()),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        load_average=os.getloadavg()[0],  # of the last minute: runnable processes
    )
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


def make_directory(directory: Path) -> None:
    """Create `directory`. Raises UserError if it is not writable, so that this is known before measuring."""
    with files.output_to(directory):
        directory.mkdir(parents=True, exist_ok=True)
        trial = directory / f".trial.{os.getpid()}"
        trial.touch()
        trial.unlink()


def write_json(path: Path, result: dict[str, object]) -> None:
    """Write `result` to `path` atomically. Values that JSON does not support are written as text. Raises UserError."""
    with files.output_to(path.parent):
        atomic.write(path, json.dumps(result, indent=2, default=str) + "\n", sync=False)
