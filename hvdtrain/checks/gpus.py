"""GPUs before CUDA starts, as nvidia-smi lists them: what would leave them idle, refuse a rank, or cost a run.

nvidia-smi needs no CUDA, and makes no context.
"""

import contextlib
import csv
import errno
import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch

from hvdtrain.checks.findings import Findings, Here

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


def listed() -> list[Gpu]:
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


def check_gpus(findings: Findings, here: Here) -> None:
    """Check driver, MIG and compute mode of this host's GPUs, and that torch sees them."""
    if here.flags.device == "cpu":
        return
    here.gpus = torch.cuda.is_available()
    try:
        there = listed()
    except OSError:  # missing, or no GPU: torch is asked when the engine starts
        return
    # Trap: `device_count` alone asks NVML, which counts GPUs for which the driver is too old.
    seen = torch.cuda.device_count() if here.gpus else 0
    check_gpu_errors(findings, here)
    judge(findings, there, torch.version.cuda, seen, os.environ.get("CUDA_VISIBLE_DEVICES"))


def judge(findings: Findings, there: Sequence[Gpu], cuda: str | None, seen: int, visible: str | None) -> None:
    """Add the findings. cuda: torch's; None without. seen: number of GPUs that torch sees. visible: CUDA_VISIBLE_DEVICES."""
    for gpu, count in Counter(gpu._replace(uuid="", memory_used=0) for gpu in there).items():
        findings.ok(f"{count} x {gpu}")
        if gpu.mig_mode_current == "Enabled":
            why = "a process uses one slice, and NCCL does not communicate between slices of one GPU"
            findings.warning(f"MIG is on ({gpu.name})", why, "one rank per GPU, or turn it off: nvidia-smi -mig 0")
        if gpu.compute_mode != "Default":
            why = "Exclusive_Process refuses a second process on a GPU, also beside one that was left there"
            add = findings.problem if gpu.compute_mode == "Prohibited" else findings.warning
            add(f"compute mode of {gpu.name} is {gpu.compute_mode}", why, "nvidia-smi -c 0")
    if seen or not there:
        return
    driver, idle = there[0].driver_version, "training would leave them idle"
    if cuda is None:
        do = "install a torch with CUDA, or train with --device cpu"
        findings.problem(f"{len(there)} GPUs here, but this torch has no CUDA", idle, do)
    elif visible is not None:
        findings.ok(f"CUDA_VISIBLE_DEVICES={visible} hides the {len(there)} GPUs of this host")
    elif oldest := too_old(driver, cuda):
        do = "update the driver, or install a torch for an older CUDA"
        findings.problem(f"driver {driver}, but CUDA {cuda} of this torch needs {oldest} or newer", idle, do)
    else:
        do = "in a container: --nv, or --gpus all; under Slurm: --gres=gpu:N"
        findings.problem(f"torch sees none of the {len(there)} GPUs of this host", idle, do)


def check_gpu_errors(findings: Findings, here: Here) -> None:
    """Check what nvidia-smi counts of errors, and that it answers."""
    reset = "reset the GPU (nvidia-smi --gpu-reset) or the host, or use another one"
    try:
        for what in errors():
            findings.problem(what, "computations on it fail, or are wrong", reset)
    except FileNotFoundError:  # no GPU of NVIDIA here
        return
    except OSError as error:
        findings.problem(str(error), "a GPU has fallen off the bus, or its driver has failed", reset)
