"""Checks whether this host has enough cores and GPUs for the ranks. Does not import torch or use a GPU."""

import math
import os
import re
from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path

from hvdtrain.engines.cores import cpu_quota
from hvdtrain.engines.errors import UserError
from hvdtrain.engines.launchers import Announced, cores_of_job

ANYWAY = "or add --oversubscribe"
NAME_OF_GPU = re.compile("[0-9]+|(GPU|MIG)-.+")


def cores_here(environment: Mapping[str, str], place: Announced) -> int:
    """Return how many cores this process may use according to its affinity, its control group and Slurm."""
    return math.ceil(min(len(os.sched_getaffinity(0)), cpu_quota(), cores_of_job(environment, place)))


def refuse_too_many_for_cores(ranks: int, cores: int, launcher: str) -> None:
    """Raise UserError if there are more ranks than cores."""
    if ranks > cores:
        slurm = f"give the task more (srun --cpus-per-task={ranks}), " if launcher == "Slurm" else ""
        remedy = f"{slurm}use --local-ranks {cores}, {ANYWAY}"
        raise UserError(f"--local-ranks {ranks}, but {cores} core{'s'[: cores > 1]} here: {remedy}", everywhere=True)


def refuse_too_many_for_gpus(ranks: int, gpus: int) -> None:
    """Raise UserError if there are GPUs, but fewer than ranks. NCCL does not allow ranks to share a GPU."""
    if 0 < gpus < ranks:
        remedy = f"use --local-ranks {gpus}, {ANYWAY} (--device cpu)"
        raise UserError(f"--local-ranks {ranks}, but {gpus} GPU{'s'[: gpus > 1]} here: {remedy}", everywhere=True)


def gpus_here(environment: Mapping[str, str], devices: Path = Path("/dev")) -> int:
    """Return how many GPUs this process may use. Does not initialize CUDA, which would not work after a fork."""
    here = sum(1 for path in devices.glob("nvidia*") if re.fullmatch("nvidia[0-9]+", path.name))
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not here:
        return here
    # Like CUDA, ignore all entries from the first on that names no GPU: -1, NoDevFiles.
    named = list(takewhile(NAME_OF_GPU.fullmatch, map(str.strip, visible.split(","))))
    if any(name.startswith("MIG-") for name in named):  # GPU partitions
        return len(named)
    return min(here, len(named))
