"""What nvidia-smi says about this host's GPUs and the processes on them. It needs no CUDA, and makes no context."""

import csv
import shutil
import subprocess
from typing import NamedTuple

LIMIT = 60.0  # seconds: without nvidia-persistenced, the driver starts each GPU first
# Oldest NVIDIA driver for each major version of CUDA (CUDA's release notes, "minor version compatibility").
OLDEST_DRIVER = {"11": "450", "12": "525", "13": "580"}


class Gpu(NamedTuple):
    """One GPU. The field names are those of `nvidia-smi --help-query-gpu`, with _ for dots."""

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


def query(what: str) -> list[list[str]]:
    """Return the rows that nvidia-smi gives for `what`. Raises OSError where it is missing, or says no."""
    path = shutil.which("nvidia-smi")
    if path is None:
        raise OSError("no nvidia-smi on PATH")
    try:
        done = subprocess.run(
            [path, what, "--format=csv,noheader,nounits"], capture_output=True, text=True, timeout=LIMIT, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise OSError(f"nvidia-smi gave no answer in {LIMIT:.0f} s") from error
    if done.returncode != 0:
        said = (done.stdout + done.stderr).strip().splitlines() or ["nothing"]
        raise OSError(f"nvidia-smi ended with {done.returncode}: {said[0]}")
    return [[cell.strip() for cell in row] for row in csv.reader(done.stdout.splitlines()) if row]


def gpus() -> list[Gpu]:
    """Return this host's GPUs, also those that CUDA_VISIBLE_DEVICES hides. Raises OSError."""
    names = ",".join(field.replace("_total", ".total").replace("_used", ".used") for field in Gpu._fields)
    names = names.replace("mig_mode_current", "mig.mode.current")
    found = []
    for row in query(f"--query-gpu={names}"):
        if len(row) != len(Gpu._fields):
            raise OSError(f"nvidia-smi said {', '.join(row)!r} instead of {len(Gpu._fields)} values")
        memory = [int(cell) if cell.isdecimal() else 0 for cell in row[-2:]]  # [N/A] where memory is the host's
        found.append(Gpu(*row[:-2], *memory))  # type: ignore[arg-type] # the first five are text
    return found


def processes() -> set[int]:
    """Return the processes that compute on this host's GPUs. In a container it may be empty. Raises OSError."""
    return {int(row[0]) for row in query("--query-compute-apps=pid") if row[0].isdecimal()}


def too_old(driver: str, cuda: str) -> int | None:
    """Return the oldest major version of the driver with which code for `cuda` runs, if `driver` is older; else None."""
    oldest = int(OLDEST_DRIVER.get(cuda.partition(".")[0], 0))
    major = driver.partition(".")[0]
    return oldest if major.isdecimal() and int(major) < oldest else None
