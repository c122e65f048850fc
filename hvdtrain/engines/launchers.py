"""The rank that the launcher assigned to this process, and its binding to cores. Does not import torch.

Only this file, the engines, the starter, the doctor and the limit on importing torch read the launchers' environment
variables. All other code uses `engine.rank`.
"""

import importlib.util
import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hvdtrain.engines.errors import UserError

LARGEST_SIZE = 2**20  # a larger number must be a mistake: the largest machines have fewer GPUs
OPEN_MPI_NAME = "mpirun (Open MPI)"


class Announced(NamedTuple):
    """The rank and size in the launcher's environment variables, before an engine is started."""

    launcher: str
    rank: int
    size: int


class Launcher(NamedTuple):
    """A launcher, and the environment variables in which it announces a process's place in the job."""

    name: str
    rank: str
    size: str
    local_rank: str = ""  # "": the launcher does not tell
    local_size: tuple[str, ...] = ()  # the first one that is set counts
    mark: str = ""  # a variable that this launcher alone sets, where others set the same rank and size


# Innermost launcher first: mpirun inside sbatch sets its own variables in addition to Slurm's. The sources, and which of
# them have been run: docs/reference/launchers.md.
LAUNCHERS = (
    Launcher("horovodrun", "HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", ("HOROVOD_LOCAL_SIZE",)),
    Launcher(
        OPEN_MPI_NAME, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK", ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
    Launcher(
        "mpirun (MVAPICH)", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK", ("MV2_COMM_WORLD_LOCAL_SIZE",),
    ),
    Launcher("mpiexec (PALS)", "PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", ("PMI_LOCAL_SIZE",), mark="PALS_RANKID"),
    # MPICH's Hydra and Intel MPI.
    Launcher("mpirun (MPICH or Intel MPI)", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", ("MPI_LOCALNRANKS",)),
    Launcher(
        "jsrun", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE",
        "JSM_NAMESPACE_LOCAL_RANK", ("JSM_NAMESPACE_LOCAL_SIZE",),
    ),
    Launcher("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", ("LOCAL_WORLD_SIZE",)),
    # A TrainJob's variables for torchrun. Without torchrun there is one process in each pod, so they count pods.
    Launcher("Kubeflow", "PET_NODE_RANK", "PET_NNODES"),
    Launcher("Flux", "FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID"),
    Launcher("Slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", ("SLURM_NTASKS_PER_NODE",)),
)  # fmt: skip
BY_NAME = {launcher.name: launcher for launcher in LAUNCHERS}
# Slurm's pmi2 plugin and Flux also speak PMI. Hydra, which does so inside their jobs, marks its processes. The first is for
# scripts that set torch's variables from Slurm's: as under a Slurm that does not speak PMI, ddp is asked for.
MANAGERS = ("torchrun", "Flux", "Slurm")
HYDRAS_MARK = "MPI_LOCALRANKID"
# Variables that tell of one process among several, set by launchers that tell no size.
OTHER_RANK_VARIABLES = ("PMIX_RANK", "PALS_RANKID", "ALPS_APP_PE", "MPIRUN_RANK", "PMI_RANK", "FLUX_TASK_RANK")
GLOO_ALONE = {"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo"}  # no MPI in a job of one process
NUMBERS_OF_HOSTS = {"Slurm": "SLURM_NNODES", "Flux": "FLUX_JOB_NNODES"}


def without_launcher(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment for a subprocess of a rank that is not itself a rank."""
    names = {name for launcher in LAUNCHERS for name in (launcher.rank, launcher.size)} | set(OTHER_RANK_VARIABLES)
    return {name: value for name, value in environment.items() if name not in names}


def announced(environment: Mapping[str, str] = os.environ) -> Announced:
    """Return the rank and size set by the innermost launcher. Without a launcher: rank 0 of 1, launcher "none".

    Raises UserError if the values are not numbers, if the rank is out of range, and if an unknown launcher started this
    process: each of its processes would train alone.
    """
    for launcher in _candidates(environment):
        if launcher.rank in environment and launcher.size in environment:
            return _place_of(launcher, environment)
    for name in OTHER_RANK_VARIABLES:
        if name in environment:
            raise UserError(
                f"{name}={environment[name][:40]!r} is of a launcher that tells no number of processes: start with mpirun "
                f"or hvdtrain.starter, or set RANK and WORLD_SIZE; for a single process, unset {name}"
            )
    for name, lacking, remedy in (
        ("WORLD_SIZE", "RANK", "set RANK, too, from 0"),
        ("RANK", "WORLD_SIZE", "set WORLD_SIZE, too"),
    ):
        value = environment.get(name, "").strip()
        if value and (name, value) != ("WORLD_SIZE", "1"):
            raise UserError(f"{name}={value[:40]!r} without {lacking}: {remedy}; for a single process, unset {name}")
    return Announced("none", 0, 1)


def place_in_use() -> tuple[int, int]:
    """Return rank and size, as the first of torch.distributed, Horovod, accelerate and the launcher has them. What is not
    imported is not in use. Raises UserError as `announced` does."""
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    horovod: Any = sys.modules.get("horovod.torch")
    if horovod is not None and horovod.is_initialized():
        return horovod.rank(), horovod.size()
    accelerate: Any = sys.modules.get("accelerate.state")
    if accelerate is not None and (state := accelerate.PartialState._shared_state):
        return state["process_index"], state["num_processes"]
    return announced()[1:]


def _candidates(environment: Mapping[str, str]) -> list[Launcher]:
    """Return the launchers that may have started this process, the innermost first."""
    # Only torchrun sets this variable: what other launchers set is then left over from around it.
    first = [BY_NAME["torchrun"]] if "TORCHELASTIC_RUN_ID" in environment else []
    if HYDRAS_MARK not in environment and ("PALS_RANKID" not in environment or _of_slurms_plugin(environment)):
        place = environment.get("PMI_RANK"), environment.get("PMI_SIZE")
        managers = [BY_NAME[name] for name in MANAGERS]
        if None not in place:
            first += [each for each in managers if place == (environment.get(each.rank), environment.get(each.size))]
    found = first + [each for each in LAUNCHERS if not each.mark or each.mark in environment]
    if in_batch_shell(environment):
        found = [launcher for launcher in found if launcher.name != "Slurm"]
    return found


def in_batch_shell(environment: Mapping[str, str]) -> bool:
    """Return whether a process of a Slurm job was started without srun, by the script that sbatch runs."""
    # sbatch's script also gets SLURM_PROCID=0 and the job's SLURM_NTASKS, but no step: other ranks would never come.
    return "SLURM_JOB_ID" in environment and not {"SLURM_STEP_ID", "SLURM_STEPID"} & set(environment)


def job_attempt(environment: Mapping[str, str]) -> tuple[str, int] | None:
    """Return the number of a job of Slurm, and how often it was requeued before; None without one."""
    job, requeued = environment.get("SLURM_JOB_ID"), environment.get("SLURM_RESTART_COUNT", "0")
    return (job, int(requeued)) if job and requeued.isdecimal() else None


def _of_slurms_plugin(environment: Mapping[str, str]) -> bool:
    """Return whether PALS's variables are Slurm's."""
    # Slurm's plugin cray_shasta sets PALS's variables, with the step as the application.
    step = f"{environment.get('SLURM_JOB_ID')}.{environment.get('SLURM_STEP_ID')}"
    return environment.get("PALS_APID") == step


def _place_of(launcher: Launcher, environment: Mapping[str, str]) -> Announced:
    """Return what `launcher` announces. Raises UserError if the values are not a rank and a size."""
    rank, size = environment[launcher.rank], environment[launcher.size]
    message = f"{launcher.rank}={rank[:40]!r}, {launcher.size}={size[:40]!r}"
    try:
        place = Announced(launcher.name, int(rank), int(size))
    except ValueError:
        raise UserError(f"{message}: not whole numbers; unset them") from None
    if not 0 <= place.rank < place.size <= LARGEST_SIZE:
        raise UserError(
            f"{message}: the rank must be from 0 to the number of ranks minus 1; correct them, or unset both"
        )
    return place


def remedy(launcher: str, engine: str) -> str:
    """Return advice for the case that this launcher's ranks did not find each other."""
    if engine in ("serial", "dataparallel"):
        return "this engine runs in one process; start it without a launcher, or use --engine ddp or horovod"
    if launcher == "Slurm":
        return "start with `srun --mpi=pmix` (see `srun --mpi=list`), or srun python -m hvdtrain.starter -m ..."
    if launcher == "torchrun":
        return "start with horovodrun or mpirun, or leave --engine horovod out: torchrun starts ddp"
    if launcher == "Kubeflow":
        return "start hvdtrain.starter --local-ranks N in each pod, or torchrun with --engine ddp"
    if launcher in ("mpiexec (PALS)", "Flux", "jsrun"):
        return (
            "build Horovod with the MPI of this launcher, or set MASTER_ADDR to the host of rank 0 and MASTER_PORT, "
            "and start python -m hvdtrain.starter -m ..."
        )
    # Also Open MPI 4 in a container under mpirun 5: what PMIx 5 sends there, PMIx 3 cannot read.
    if engine == "ddp":
        return "this mpi4py was built for another MPI; use torchrun, or set MASTER_ADDR and MASTER_PORT"
    return (
        "this Horovod was built for another MPI, or for none; run `make setup`, start with `horovodrun --gloo`, or set "
        "MASTER_ADDR to the host of rank 0 and MASTER_PORT, and start python -m hvdtrain.starter -m ..."
    )


def alone_in_pid_namespace(environment: Mapping[str, str], parent: int, first: str) -> bool:
    """Tell whether Open MPI's mpirun started this rank in a PID namespace of its own: in a container with `--pid`, say.

    Open MPI's shared memory (vader, 4.1.8) then crashes at the first long message. parent: this process's parent. first:
    the name of process 1. Where mpirun runs in the same container, it is the parent.
    """
    # A parent outside of the namespace is seen as 0.
    # Apptainer and Singularity put a process 1 of theirs before the program.
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


def ranks_on_host(environment: Mapping[str, str], place: Announced) -> int | None:
    """Return the number of ranks on this host according to the launcher; None if it does not tell."""
    if place.size == 1:
        return 1
    launcher = BY_NAME[place.launcher]
    for name in launcher.local_size:
        if (value := environment.get(name, "")).isdecimal() and 1 <= int(value) <= place.size:
            return int(value)
    if place.launcher == "Slurm":
        counts = tasks_per_node(
            environment.get("SLURM_STEP_TASKS_PER_NODE", environment.get("SLURM_TASKS_PER_NODE", ""))
        )
        node = environment.get("SLURM_NODEID", "")
        if node.isdecimal() and int(node) < len(counts):
            return max(1, counts[int(node)])
    return place.size if environment.get(NUMBERS_OF_HOSTS.get(place.launcher, "")) == "1" else None


def tasks_per_node(text: str) -> list[int]:
    """Parse Slurm's number of tasks per node: "2(x3),1" gives [2, 2, 2, 1]. Returns [] for any other format."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,7})(?:\(x([0-9]{1,7})\))?", part)
        if not match or len(counts) > LARGEST_SIZE:
            return []
        counts += [int(match[1])] * min(int(match[2] or 1), LARGEST_SIZE)
    return counts


def cores_of_job(environment: Mapping[str, str], place: Announced) -> float:
    """Return how many cores of this host Slurm allocated to the job; inf under any other launcher."""
    value = environment.get("SLURM_CPUS_ON_NODE", "")
    of_slurm = place.launcher == "Slurm" or (place.launcher == "none" and in_batch_shell(environment))
    return int(value) if of_slurm and value.isdecimal() and int(value) > 0 else float("inf")


# ---- which engine trains where nobody says: --engine auto

OF_DDP = ("torchrun", "Kubeflow")  # launchers whose ranks Horovod cannot see
NO_HOROVOD = "Horovod is not installed here; `make setup` builds it"


class Choice(NamedTuple):
    """An engine, and why it was chosen: a clause that follows its name."""

    engine: str
    reason: str


def choose_engine(
    environment: Mapping[str, str] = os.environ,
    *,
    supports: Callable[[str], bool] = lambda engine: True,
    lack: Callable[[], str] | None = None,
) -> Choice:
    """Return the engine for this process, the same on every rank of a job. Raises UserError as `announced` does.

    supports: whether an engine takes the flags given. lack: why there is no Horovod (default: looks for it).
    """
    launcher, size = (place := announced(environment)).launcher, place.size
    if launcher in OF_DDP:
        return Choice("ddp", f"{launcher} started the ranks")
    there = not (why := (lack or lack_of_horovod)())
    if launcher == "none" or (size == 1 and not there):
        if supports("serial"):
            tasks = environment.get("SLURM_NTASKS", "1") if in_batch_shell(environment) else "1"
            rest = f", not the {tasks} tasks of this Slurm job: srun or mpirun starts them" if tasks != "1" else ""
            return Choice("serial", f"one process{rest}")
        return Choice("horovod", "for these flags") if there else Choice("ddp", f"for these flags; {why}")
    return Choice("horovod", f"{launcher} started the ranks") if there else Choice("ddp", why)


def lack_of_horovod() -> str:
    """Return why there is no Horovod with its PyTorch extension, and the remedy; an empty string if there is. It is not
    imported."""
    if "horovod.torch" in sys.modules:
        return ""
    try:
        spec = importlib.util.find_spec("horovod")
    except (ImportError, ValueError):  # an import hook that forbids it; a stand-in without a specification
        return NO_HOROVOD
    places = [*((spec.submodule_search_locations if spec else None) or ())]
    # Horovod's source, also in the working directory. And `pip install horovod` without a compiler reports success.
    lack = f"{places[0]} has no PyTorch extension; build it, or start elsewhere" if places else NO_HOROVOD
    return "" if any(any(Path(place, "torch").glob("mpi_lib*.so")) for place in places) else lack
