"""GPUs before CUDA starts, as nvidia-smi lists them: what would leave them idle, or refuse a rank."""

import os
from collections import Counter
from collections.abc import Sequence

import torch

from hvdtrain.checks import host, nvidia_smi
from hvdtrain.checks.findings import Findings, Here
from hvdtrain.checks.nvidia_smi import Gpu


def check_gpus(findings: Findings, here: Here) -> None:
    """Check driver, MIG and compute mode of this host's GPUs, and that torch sees them."""
    if here.flags.device == "cpu":
        return
    here.gpus = torch.cuda.is_available()
    try:
        there = nvidia_smi.gpus()
    except OSError:  # missing, or no GPU: torch is asked when the engine starts
        return
    # Trap: `device_count` alone asks NVML, which counts GPUs for which the driver is too old.
    seen = torch.cuda.device_count() if here.gpus else 0
    host.check_gpu_errors(findings, here)
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
    elif oldest := nvidia_smi.too_old(driver, cuda):
        do = "update the driver, or install a torch for an older CUDA"
        findings.problem(f"driver {driver}, but CUDA {cuda} of this torch needs {oldest} or newer", idle, do)
    else:
        do = "in a container: --nv, or --gpus all; under Slurm: --gres=gpu:N"
        findings.problem(f"torch sees none of the {len(there)} GPUs of this host", idle, do)
