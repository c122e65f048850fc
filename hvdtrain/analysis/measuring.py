"""Functions for all measurements: device synchronization, hardware, result files."""

import json
import os
import platform
from pathlib import Path

import torch

from hvdtrain.engines import atomic, files


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


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
        atomic.write(trial, "", sync=False)
        trial.unlink()


def write_json(path: Path, result: dict[str, object]) -> None:
    """Write `result` to `path` atomically. Values that JSON does not support are written as text. Raises UserError."""
    with files.output_to(path.parent):
        atomic.write(path, json.dumps(result, indent=2, default=str) + "\n", sync=False)
