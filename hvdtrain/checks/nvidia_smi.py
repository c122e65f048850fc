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

import torch

from hvdtrain.checks.findings import Findings, Here

NVIDIA_SMI_SECONDS = 60.0  # seconds: without nvidia-persistenced, the driver starts each GPU first
ABOUT = ("name", "memory.total", "driver_version", "mig.mode.current", "compute_mode")
# Query, what a sound GPU answers (brackets: it has no such counter), and what else that means. As answered by nvidia-smi 580
# on an H200.
ERRORS = (
    ("gpu=index,ecc.errors.uncorrected.volatile.total", "0 [N/A]", "GPU {0}: {1} uncorrectable memory errors"),
    ("gpu=index,gpu_recovery_action", "None [N/A] N/A", "GPU {0}: its driver asks for: {1}"),
    ("remapped-rows=gpu_uuid,remapped_rows.failure", "No [N/A]", "{0}: memory rows could not be remapped"),
    ("remapped-rows=gpu_uuid,remapped_rows.pending", "No [N/A]", "{0}: memory rows wait for a reset"),
)


class NotKnown(OSError):
    """This nvidia-smi does not know the query."""


def answer(query: str) -> list[list[str]]:
    """Return the rows of an answer. Raises OSError where nvidia-smi is missing or fails, and NotKnown for a name."""
    path = shutil.which("nvidia-smi")
    if path is None:
        raise FileNotFoundError(errno.ENOENT, "no nvidia-smi on PATH")
    try:
        command = [path, f"--query-{query}", "--format=csv,noheader,nounits"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=NVIDIA_SMI_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise OSError(f"nvidia-smi gave no answer in {NVIDIA_SMI_SECONDS:.0f} s") from error
    lines = (done.stdout + done.stderr).strip().splitlines() or ["nothing"]
    if "is not a valid field" in lines[0] or "not recognized" in lines[0]:
        raise NotKnown(lines[0])
    if done.returncode != 0:
        raise OSError(f"nvidia-smi ended with {done.returncode}: {lines[0]}")
    return list(filter(None, csv.reader(done.stdout.splitlines(), skipinitialspace=True)))


def check_gpus(findings: Findings, here: Here) -> None:
    """Check MIG, compute mode and errors of this host's GPUs, and that torch sees them."""
    if here.flags.device == "cpu":
        return
    here.gpus = torch.cuda.is_available()
    try:
        there = [row for row in answer(f"gpu={','.join(ABOUT)}") if len(row) == len(ABOUT)]
    except OSError:  # missing, or no GPU: torch is asked when the engine starts
        return
    # Trap: `device_count` alone asks NVML, which counts GPUs for which the driver is too old.
    seen = torch.cuda.device_count() if here.gpus else 0
    check_gpu_errors(findings, here)
    judge_gpus(findings, there, seen, os.environ.get("CUDA_VISIBLE_DEVICES"))


def judge_gpus(findings: Findings, there: Sequence[Sequence[str]], seen: int, visible: str | None) -> None:
    """Add the findings. there: the values of ABOUT, by GPU. seen: number of GPUs that torch sees. visible:
    CUDA_VISIBLE_DEVICES."""
    for (name, memory, driver, mig, mode), count in Counter(map(tuple, there)).items():
        findings.ok(f"{count} x {name}, {memory} MiB, driver {driver}, MIG {mig}, compute mode {mode}")
        if mig == "Enabled":
            why = "a process uses one slice, and NCCL does not communicate between slices of one GPU"
            findings.warning(f"MIG is on ({name})", why, "one rank per GPU, or turn it off: nvidia-smi -mig 0")
        if mode != "Default":
            why = "Exclusive_Process refuses a second process on a GPU, also beside one that was left there"
            level = "problem" if mode == "Prohibited" else "warning"
            findings.add(level, f"compute mode of {name} is {mode}", why, "nvidia-smi -c 0")
    if visible is not None and not seen:
        findings.ok(f"CUDA_VISIBLE_DEVICES={visible} hides the {len(there)} GPUs of this host")
    elif there and not seen:
        what = f"torch sees none of the {len(there)} GPUs of this host (CUDA of this torch: {torch.version.cuda})"
        do = "a torch with CUDA, of a version that the driver takes; a container with --nv, or --gpus all; --gres=gpu:N"
        findings.problem(what, "training would leave them idle", do)


def check_gpu_errors(findings: Findings, here: Here) -> None:
    """Check what nvidia-smi counts of errors, and that it answers."""
    reset = "reset the GPU (nvidia-smi --gpu-reset) or the host, or use another one"
    try:
        for query, sound, words in ERRORS:
            with contextlib.suppress(NotKnown):  # by an older nvidia-smi
                for row in answer(query):
                    if len(row) == 2 and row[1] not in sound.split():
                        findings.problem(words.format(*row), "computations on it fail, or are wrong", reset)
    except FileNotFoundError:  # no GPU of NVIDIA here
        return
    except OSError as error:
        findings.problem(str(error), "a GPU has fallen off the bus, or its driver has failed", reset)
