"""The rank that the launcher assigned to this process, and its binding to cores. Does not import torch.

Only this file, the engines, the starter and the doctor read the launchers' environment variables. All other code uses
`engine.rank`.
"""

import os
import re
from collections.abc import Mapping
from typing import NamedTuple

from hvdtrain.engines.errors import UserError

MOST_RANKS = 2**20  # a larger number must be a mistake: the largest machines have fewer GPUs


class Announced(NamedTuple):
    """The rank and size in the launcher's environment variables, before an engine is started."""

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


# Variables with the number of ranks on this host.
LOCAL_SIZES = {
    "horovodrun": ("HOROVOD_LOCAL_SIZE",),
    "mpirun (Open MPI)": ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    "mpirun (MPICH or Intel MPI)": ("MPI_LOCALNRANKS", "MV2_COMM_WORLD_LOCAL_SIZE"),
    "torchrun": ("LOCAL_WORLD_SIZE",),
    "Slurm": ("SLURM_NTASKS_PER_NODE",),
    "none": (),
}


def without_launcher(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment for a subprocess of a rank that is not itself a rank."""
    told = {name for _, *names in LAUNCHERS for name in names}
    return {name: value for name, value in environment.items() if name not in told}


def announced(environment: Mapping[str, str] = os.environ) -> Announced:
    """Return the rank and size set by the innermost launcher. Without a launcher: rank 0 of 1, launcher "none".

    Raises UserError if the values are not numbers, or the rank is out of range.
    """
    # Only torchrun sets this variable: what other launchers set is then left over from around it.
    innermost = [row for row in LAUNCHERS if row[0] == "torchrun"] if "TORCHELASTIC_RUN_ID" in environment else []
    for launcher, rank, size in (*innermost, *LAUNCHERS):
        if rank not in environment or size not in environment:
            continue
        said = f"{rank}={environment[rank][:40]!r}, {size}={environment[size][:40]!r}"
        try:
            told = Announced(launcher, int(environment[rank]), int(environment[size]))
        except ValueError:
            raise UserError(f"{said}: not whole numbers; unset them") from None
        if not 0 <= told.rank < told.size <= MOST_RANKS:
            raise UserError(
                f"{said}: the rank must be from 0 to the number of ranks minus 1; correct them, or unset both"
            )
        return told
    return Announced("none", 0, 1)


def remedy(launcher: str, engine: str) -> str:
    """Return advice for the case that this launcher's ranks did not find each other."""
    if engine in ("serial", "dataparallel"):
        return "this engine runs in one process; start it without a launcher, or use --engine ddp or horovod"
    if launcher == "Slurm":
        return "start with `srun --mpi=pmix` (see `srun --mpi=list`), or srun python -m hvdtrain.starter -m ..."
    if launcher == "torchrun":
        return "start with horovodrun or mpirun, or use --engine ddp"
    return "this Horovod was built for another MPI, or for none; run `make setup`, or start with `horovodrun --gloo`"


def alone_in_pid_namespace(environment: Mapping[str, str], parent: int, first: str) -> bool:
    """Tell whether Open MPI's mpirun started this rank in a PID namespace of its own: in a container with `--pid`, say.

    Open MPI's shared memory (vader, 4.1.8) then crashes at the first long message.
    parent: this process's parent, 0 where it is outside. first: the name of process 1, which Apptainer and
    Singularity put before the program there (sinit, appinit). Where mpirun runs in the same container, it is the parent.
    """
    outside = parent == 0 or (parent == 1 and first in ("appinit", "sinit"))
    return "OMPI_COMM_WORLD_RANK" in environment and outside


def bound_by_default(environment: Mapping[str, str]) -> bool:
    """Return whether mpirun (Open MPI 4) bound this rank to one core by default, not by request.

    It does so for up to two ranks; training, MPI and the engine's threads then share that core. A binding requested with
    `--bind-to` or `--map-by` appears in the environment and is kept.
    """
    asked = ("OMPI_MCA_hwloc_base_binding_policy", "OMPI_MCA_rmaps_base_mapping_policy")
    return environment.get("OMPI_MCA_orte_bound_at_launch") == "1" and not any(name in environment for name in asked)


def bound_unexplained(environment: Mapping[str, str], mine: int, host: int) -> bool:
    """Return whether Open MPI 5 bound this rank to one core. mine, host: number of cores of the rank and of its host.

    It does so by default for up to two ranks, unless oversubscription is allowed. The environment does not show whether the
    user requested the binding (5.0.11), so it is only reported, not undone.
    """
    return environment.get("PRTE_LAUNCHED") == "1" and mine == 1 < host


def ranks_on_host(environment: Mapping[str, str], told: Announced) -> int:
    """Return the number of ranks on this host according to the launcher, or the number of all ranks if it is not known."""
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
    """Parse Slurm's number of tasks per node: "2(x3),1" gives [2, 2, 2, 1]. Returns [] for any other format."""
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"([0-9]{1,7})(?:\(x([0-9]{1,7})\))?", part)
        if not found or len(counts) > MOST_RANKS:
            return []
        counts += [int(found[1])] * min(int(found[2] or 1), MOST_RANKS)
    return counts


def cores_of_job(environment: Mapping[str, str], told: Announced) -> float:
    """Return how many cores of this host Slurm allocated to the job; inf under any other launcher."""
    value = environment.get("SLURM_CPUS_ON_NODE", "")
    return int(value) if told.launcher == "Slurm" and value.isdecimal() and int(value) > 0 else float("inf")
