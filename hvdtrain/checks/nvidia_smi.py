"""What nvidia-smi says about this host's GPUs. It needs no CUDA, and makes no context."""

import contextlib
import csv
import errno
import shutil
import subprocess
from typing import NamedTuple

COLUMNS = {"mig_mode_current": "mig.mode.current", "memory_total": "memory.total", "memory_used": "memory.used"}
LIMIT = 60.0  # seconds: without nvidia-persistenced, the driver starts each GPU first
# Oldest NVIDIA driver for each major version of CUDA (CUDA's release notes, "minor version compatibility").
OLDEST_DRIVER = {"11": "450", "12": "525", "13": "580"}


# Query, what a sound GPU answers (brackets: it has no such counter), and what else that means.
ERRORS = (
    (
        "--query-gpu=index,ecc.errors.uncorrected.volatile.total",
        ("0", "[N/A]"),
        "GPU {0}: {1} uncorrectable memory errors",
    ),
    ("--query-gpu=index,gpu_recovery_action", ("None", "[N/A]", "N/A"), "GPU {0}: its driver asks for: {1}"),
    ("--query-remapped-rows=gpu_uuid,remapped_rows.failure", ("No", "[N/A]"), "{0}: memory rows could not be remapped"),
    ("--query-remapped-rows=gpu_uuid,remapped_rows.pending", ("No", "[N/A]"), "{0}: memory rows wait for a reset"),
)  # as answered by nvidia-smi 580 on an H200


class NotKnown(OSError):
    """This nvidia-smi does not know the query."""


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
    found = []
    for row in answer("--query-gpu=" + ",".join(COLUMNS.get(name, name) for name in Gpu._fields)):
        if len(row) != len(Gpu._fields):
            raise OSError(f"nvidia-smi said {', '.join(row)!r} instead of {len(Gpu._fields)} values")
        memory = [int(cell) if cell.isdecimal() else 0 for cell in row[-2:]]  # [N/A] where memory is the host's
        found.append(Gpu(*row[:-2], *memory))  # type: ignore[arg-type] # the first five are text
    return found


def answer(query: str) -> list[list[str]]:
    """Return the rows of an answer. Raises OSError where nvidia-smi is missing or fails, and NotKnown for a name."""
    path = shutil.which("nvidia-smi")
    if path is None:
        raise FileNotFoundError(errno.ENOENT, "no nvidia-smi on PATH")
    try:
        command = [path, query, "--format=csv,noheader,nounits"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
    except subprocess.TimeoutExpired as error:
        raise OSError(f"nvidia-smi gave no answer in {LIMIT:.0f} s") from error
    lines = (done.stdout + done.stderr).strip().splitlines() or ["nothing"]
    if "is not a valid field" in lines[0] or "not recognized" in lines[0]:
        raise NotKnown(lines[0])
    if done.returncode != 0:
        raise OSError(f"nvidia-smi ended with {done.returncode}: {lines[0]}")
    return list(filter(None, csv.reader(done.stdout.splitlines(), skipinitialspace=True)))


def errors() -> list[str]:
    """Return which GPUs of this host have errors, in words. Raises OSError where nvidia-smi is missing or fails."""
    found = []
    for query, sound, words in ERRORS:
        with contextlib.suppress(NotKnown):  # by an older nvidia-smi
            found += [words.format(*row) for row in answer(query) if len(row) == 2 and row[1] not in sound]
    return found


def too_old(driver: str, cuda: str) -> int | None:
    """Return the oldest major version of the driver with which code for `cuda` runs, if `driver` is older; else None."""
    oldest = int(OLDEST_DRIVER.get(cuda.partition(".")[0], 0))
    major = driver.partition(".")[0]
    return oldest if major.isdecimal() and int(major) < oldest else None
