"""The rank that a launcher gave this process, and how it bound the process to cores. Does not import torch.

Only this file, the engines, the starter and the doctor read the variables that launchers set; everything else asks
`engine.rank`.
"""

import os
import re
from collections.abc import Mapping
from typing import NamedTuple

from hvdtrain.engines.errors import UserError

MOST_RANKS = 2**20  # announced more, it is a mistake: the largest machines have fewer GPUs


class Announced(NamedTuple):
    """What a launcher told this process, before any engine was asked."""

    launcher: str
    rank: int
    size: int


# Innermost launcher first: mpirun inside sbatch sets its own variables in addition to Slurm's.
LAUNCHERS = (
    ("horovodrun", "HOROVOD_RANK", "HOROVOD_SIZE"),
    ("mpirun (Open MPI)", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("mpirun (MPICH or Intel MPI)", "PMI_RANK", "PMI_SIZE"),
    ("torchrun", "RANK", "WORLD_SIZE"),
    ("Slurm", "SLURM_PROCID", "SLURM_NTASKS"),
)


# How many of the ranks are on this host.
LOCAL_SIZES = {
    "horovodrun": ("HOROVOD_LOCAL_SIZE",),
    "mpirun (Open MPI)": ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    "mpirun (MPICH or Intel MPI)": ("MPI_LOCALNRANKS", "MV2_COMM_WORLD_LOCAL_SIZE"),
    "torchrun": ("LOCAL_WORLD_SIZE",),
    "Slurm": ("SLURM_NTASKS_PER_NODE",),
    "none": (),
}


def without_launcher(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment for a program that a rank starts and that is no rank itself."""
    told = {name for _, *names in LAUNCHERS for name in names}
    return {name: value for name, value in environment.items() if name not in told}


def announced(environment: Mapping[str, str] = os.environ) -> Announced:
    """Return what the innermost launcher announced; alone, rank 0 of 1 by the launcher "none".

    Raises UserError where that is no rank of so many.
    """
    for launcher, rank, size in LAUNCHERS:
        if rank not in environment or size not in environment:
            continue
        said = f"{rank}={environment[rank][:40]!r}, {size}={environment[size][:40]!r}"
        try:
            told = Announced(launcher, int(environment[rank]), int(environment[size]))
        except ValueError:
            raise UserError(f"{said}: not whole numbers; unset them") from None
        if not 0 <= told.rank < told.size <= MOST_RANKS:
            raise UserError(f"{said}: ranks go from 0 to below their number; correct them, or unset both")
        return told
    return Announced("none", 0, 1)


def remedy(launcher: str, engine: str) -> str:
    """Return what to type where this launcher's ranks did not find each other."""
    if engine in ("serial", "dataparallel"):
        return "it is one process; start it without a launcher, or use --engine ddp or horovod"
    if launcher == "Slurm":
        return "start with `srun --mpi=pmix` (see `srun --mpi=list`), or srun python -m hvdtrain.starter -m ..."
    if launcher == "torchrun":
        return "start with horovodrun or mpirun, or use --engine ddp"
    return "this Horovod was built for another MPI, or for none; run `make setup`, or start with `horovodrun --gloo`"


def bound_by_default(environment: Mapping[str, str]) -> bool:
    """Tell whether mpirun bound this rank to one core without having been asked to.

    Open MPI 4 does so for up to two ranks; training, MPI and the engine's own threads then share that core. What was asked
    for (`--bind-to`, `--map-by`) stands in the environment, and is left alone.
    """
    asked = ("OMPI_MCA_hwloc_base_binding_policy", "OMPI_MCA_rmaps_base_mapping_policy")
    return environment.get("OMPI_MCA_orte_bound_at_launch") == "1" and not any(name in environment for name in asked)


def bound_unexplained(environment: Mapping[str, str], mine: int, host: int) -> bool:
    """Tell whether Open MPI 5 bound this rank to one core; `mine` and `host` count the cores of the rank and of its host.

    It does so for up to two ranks, unless it may oversubscribe. Whether anyone asked for it stands nowhere in the rank's
    environment (5.0.11), so that this can be said but not undone.
    """
    return environment.get("PRTE_LAUNCHED") == "1" and mine == 1 < host


def ranks_on_host(environment: Mapping[str, str], told: Announced) -> int:
    """Return how many ranks this host has according to the launcher; all ranks if it does not say."""
    for name in LOCAL_SIZES[told.launcher]:
        if (value := environment.get(name, "")).isdecimal() and 1 <= int(value) <= told.size:
            return int(value)
    if told.launcher == "Slurm":
        counts = tasks_per_node(
            environment.get("SLURM_STEP_TASKS_PER_NODE", environment.get("SLURM_TASKS_PER_NODE", ""))
        )
        node = environment.get("SLURM_NODEID", "")
        if node.isdecimal() and int(node) < len(counts):
            return max(1, counts[int(node)])
    return told.size


def tasks_per_node(text: str) -> list[int]:
    """Return Slurm's counts by node: "2(x3),1" is 2, 2, 2, 1. Empty where it is written otherwise."""
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"([0-9]{1,7})(?:\(x([0-9]{1,7})\))?", part)
        if not found or len(counts) > MOST_RANKS:
            return []
        counts += [int(found[1])] * min(int(found[2] or 1), MOST_RANKS)
    return counts


def cores_of_job(environment: Mapping[str, str], told: Announced) -> float:
    """Return how many cores of this host Slurm gave to the job; inf where another launcher started the ranks."""
    value = environment.get("SLURM_CPUS_ON_NODE", "")
    return int(value) if told.launcher == "Slurm" and value.isdecimal() and int(value) > 0 else float("inf")
