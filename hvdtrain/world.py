"""The one truth about ranks: what the launcher announced, what the engine found, and that the two agree.

Only this file and the engines read the variables that launchers set; everything else asks `world.rank`.
"""

import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple, NoReturn

import torch

from hvdtrain.allocation import keep_freed_memory
from hvdtrain.engines.base import World
from hvdtrain.errors import Failure, UserError

LINGER_SECONDS = 2.0
MOST_RANKS = 2**20  # announced more, it is a mistake: the largest machines have fewer GPUs
ENGINES = ("horovod", "ddp", "dataparallel", "serial")


class Announced(NamedTuple):
    """What a launcher told this process, before any engine was asked."""

    launcher: str
    rank: int
    size: int


# Innermost launcher first: mpirun inside sbatch sets its own variables beside Slurm's.
LAUNCHERS = (
    ("horovodrun", "HOROVOD_RANK", "HOROVOD_SIZE"),
    ("mpirun (Open MPI)", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("mpirun (MPICH or Intel MPI)", "PMI_RANK", "PMI_SIZE"),
    ("torchrun", "RANK", "WORLD_SIZE"),
    ("Slurm", "SLURM_PROCID", "SLURM_NTASKS"),
)


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


def start(
    engine: str, *, tuning: bool = True, device: str = "auto", threads: int | None = None, timeline: bool = False
) -> World:
    """Start `engine` and return its World, after checking it against the launcher's word.

    `threads`: torch's threads on this rank; None derives them from the cores that this rank really has.
    `timeline`: `World.start_timeline` will be called.
    Raises UserError where launcher and engine disagree, or the device cannot be had.
    """
    told = announced()
    unbind = tuning and bound_by_default(os.environ)
    if unbind:
        # The kernel cuts the set down to what the job's own limits allow.
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    kind = engine_class(engine)
    if timeline:
        kind.offer_timeline()
    world = kind(tuning=tuning, rank=told.rank, size=told.size, launcher=told.launcher)
    if told.launcher != "none" and (told.rank, told.size) != (world.rank, world.size):
        world.shutdown()
        how = remedy(told.launcher, engine)
        said = f"{told.launcher} announced {told.size} ranks, but {engine} sees {world.size}: {how}"
        raise UserError(said, everywhere=True)
    if unbind:
        world.notes.append("mpirun's default binding to one core undone (--bind-to is respected)")
    if tuning and bound_unexplained(os.environ, len(os.sched_getaffinity(0)), os.cpu_count() or 1):
        world.notes.append(
            "mpirun bound rank 0 to one core, which its threads share: unless you meant it, --bind-to none"
        )
    with world.agreement("device"):
        world.device = world.choose_device(device)
    if tuning and world.device.type == "cpu" and keep_freed_memory(os.environ):
        world.notes.append("malloc keeps freed memory")
    if threads is not None or tuning:
        torch.set_num_threads(threads or cores_of_rank(world))
    return world


def cores_of_rank(world: World) -> int:
    """Return this rank's share of the cores that it may run on, at least one. A collective."""
    cores = world.gather([socket.gethostname(), sorted(os.sched_getaffinity(0))], "cores")
    return threads_for(world.rank, cores, cpu_quota())


def engine_class(engine: str) -> type[World]:
    """Return the class of `engine`; only the chosen engine's module is imported."""
    if engine == "horovod":
        from hvdtrain.engines.horovod import HorovodWorld

        return HorovodWorld
    if engine == "ddp":
        from hvdtrain.engines.ddp import DdpWorld

        return DdpWorld
    from hvdtrain.engines import single

    return single.DataParallelWorld if engine == "dataparallel" else single.SerialWorld


def refuse_foreign(engine: str, options: Mapping[str, object]) -> None:
    """Raise UserError where `options` (flags by name; None: not given) ask of `engine` what only others can do."""
    for name, refused in engine_class(engine).lacks.items():
        value = options.get(name)
        if value is not None and (refused is None or value in refused):
            able = [
                other
                for other in ENGINES
                if (lacked := engine_class(other).lacks.get(name, ())) is not None and value not in lacked
            ]
            flag = f"--{name.replace('_', '-')} {value}"
            how = f"leave it out, or use --engine {' or '.join(able)}"
            raise UserError(f"{flag} is not for --engine {engine}: {how}", everywhere=True)


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


def threads_for(rank: int, cores: list[tuple[str, list[int]]], quota: float) -> int:
    """Return how many threads `rank` should use: its share of the cores that it may run on, and at least one.

    `cores`: per rank its host and the cores it may run on, which other ranks of the host may share or not.
    `quota`: cores' worth of time that the container may use (`cpu_quota`).
    """
    host, mine = cores[rank]
    neighbours = [set(theirs) for where, theirs in cores if where == host]
    share = sum(1 / sum(core in theirs for theirs in neighbours) for core in mine)
    return max(1, int(min(share, quota / len(neighbours)) + 1e-6))


def cpu_quota(root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> float:
    """Return the cores' worth of time that this process's control group (version 2) allows; inf where it sets no limit."""
    try:
        own = next(line[4:] for line in membership.read_text().splitlines() if line.startswith("0::/"))
    except (OSError, StopIteration):
        return float("inf")
    quota = float("inf")
    for directory in [root, *(root / part for part in _prefixes(own))]:
        try:
            limit, period = (directory / "cpu.max").read_text().split()
            cores = float(limit) / float(period) if limit != "max" else quota
        except (OSError, ValueError, ZeroDivisionError):
            continue
        quota = min(quota, cores) if cores > 0 else quota
    return quota


def _prefixes(path: str) -> list[str]:
    parts = [part for part in path.split("/") if part]
    return ["/".join(parts[: depth + 1]) for depth in range(len(parts))]


def run(main: Callable[[], int]) -> NoReturn:
    """Call `main` and exit with its code; a UserError or Failure becomes one line on standard error and its exit code.

    Rank 0 speaks at once. The others linger first, because mpirun ends a job at the first rank that fails: left at once, one
    of them could end rank 0 before it has said why. Then they say what rank 0 may not know.
    """
    try:
        code = main()
    except (UserError, Failure) as error:
        script = f"hvdtrain.{Path(sys.argv[0]).stem}"
        try:
            rank = announced().rank
        except UserError:
            rank = 0
        if rank != 0:
            time.sleep(LINGER_SECONDS)
            script += f": rank {rank} on {socket.gethostname()}"
        if rank == 0 or not error.everywhere:
            line = " ".join(str(error).splitlines())  # one line, whatever the user typed into it
            print(f"{script}: error: {line}", file=sys.stderr, flush=True)
        code = error.exit_code
    sys.exit(code)
