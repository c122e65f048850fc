"""What nvidia-smi says about this host's GPUs. It needs no CUDA, and makes no context."""

import csv
import shutil
import subprocess
from typing import NamedTuple

COLUMNS = {"mig_mode_current": "mig.mode.current", "memory_total": "memory.total", "memory_used": "memory.used"}
LIMIT = 60.0  # seconds: without nvidia-persistenced, the driver starts each GPU first
# Oldest NVIDIA driver for each major version of CUDA (CUDA's release notes, "minor version compatibility").
OLDEST_DRIVER = {"11": "450", "12": "525", "13": "580"}


class Gpu(NamedTuple):
    """One GPU. The field names are those of `nvidia-smi --help-query-gpu`; see COLUMNS."""

    uuid: str
    name: str
    driver_version: str
    mig_mode_current: str  # Enabled, Disabled, or [N/A] where the GPU has no MIG
    compute_mode: str  # Default, Exclusive_Process, Prohibited
    memory_total: int  # MiB
    memory_used: int  # MiB

    def __str__(self) -> str:
        return (
            f"{self.name}, {self.memory_total:,} MiB, driver {self.driver_version}, MIG {self.mig_mode_current}, "
            f"compute mode {self.compute_mode}"
        )


def gpus() -> list[Gpu]:
    """Return this host's GPUs, also those that CUDA_VISIBLE_DEVICES hides. Raises OSError where nvidia-smi fails."""
    path = shutil.which("nvidia-smi")
    if path is None:
        raise OSError("no nvidia-smi on PATH")
    names = ",".join(COLUMNS.get(name, name) for name in Gpu._fields)
    command = [path, f"--query-gpu={names}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
    except subprocess.TimeoutExpired as error:
        raise OSError(f"nvidia-smi gave no answer in {LIMIT:.0f} s") from error
    if done.returncode != 0:
        said = (done.stdout + done.stderr).strip().splitlines() or ["nothing"]
        raise OSError(f"nvidia-smi ended with {done.returncode}: {said[0]}")
    found = []
    for row in filter(None, csv.reader(done.stdout.splitlines(), skipinitialspace=True)):
        if len(row) != len(Gpu._fields):
            raise OSError(f"nvidia-smi said {', '.join(row)!r} instead of {len(Gpu._fields)} values")
        memory = [int(cell) if cell.isdecimal() else 0 for cell in row[-2:]]  # [N/A] where memory is the host's
        found.append(Gpu(*row[:-2], *memory))  # type: ignore[arg-type] # the first five are text
    return found


def too_old(driver: str, cuda: str) -> int | None:
    """Return the oldest major version of the driver with which code for `cuda` runs, if `driver` is older; else None."""
    oldest = int(OLDEST_DRIVER.get(cuda.partition(".")[0], 0))
    major = driver.partition(".")[0]
    return oldest if major.isdecimal() and int(major) < oldest else None
