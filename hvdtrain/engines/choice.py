"""Start an engine and check it against the launcher. The returned engine is the only source of rank and size. And choose the
types in which a run computes and sends, where the user leaves that to us: --amp auto, --compression auto."""

import math
import multiprocessing
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from hvdtrain import __version__
from hvdtrain.engines import accelerators, gpu
from hvdtrain.engines.base import Engine, Setting
from hvdtrain.engines.cores import cpu_quota, near_gpu, stay_on, threads_asked, threads_for, turn_on
from hvdtrain.engines.errors import UserError
from hvdtrain.engines.launchers import announced, bound_by_default, bound_unexplained, cores_of_job, remedy
from hvdtrain.engines.library_settings import keep_freed_memory
from hvdtrain.engines.lines import write_whole_lines
from hvdtrain.guards import limits

refused_in_worker = False  # whether `start_engine` was called while multiprocessing imported the program


def start_engine(
    name: str, *, tuning: bool = True, device: str = "auto", threads: int | None = None, deterministic: bool = False
) -> Engine:
    """Start the engine `name` and return it, after a check against rank and size in the launcher's variables.

    `threads`: number of torch threads on this rank; None: OMP_NUM_THREADS, or this rank's share of the cores.
    deterministic: on GPUs, compute so that the bits of a run can be had again. Raises UserError if launcher and engine
    disagree, if the device is not available or would be left idle, and in a DataLoader worker that imports the program.
    """
    # multiprocessing sets this attribute while a new process imports the program, and deletes it afterwards.
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        global refused_in_worker
        refused_in_worker = True
        advice = 'start training under `if __name__ == "__main__":`'
        raise UserError(
            f"a DataLoader worker imports the program, which must not train again there: {advice}", everywhere=True
        )
    write_whole_lines()
    place = announced()
    unbind = tuning and bound_by_default(os.environ)
    if unbind:
        # The kernel restricts the set to the cores that the job may use.
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    if deterministic and device != "cpu":
        os.environ.update(accelerators.REPEATABLE)
    kind = engine_class(name)
    engine = kind(tuning=tuning, rank=place.rank, size=place.size, launcher=place.launcher)
    engine.ending = limits.ending
    if place.launcher != "none" and (place.rank, place.size) != (engine.rank, engine.size):
        engine.shutdown()
        advice = remedy(place.launcher, name)
        message = f"{place.launcher} announced {place.size} ranks, but {name} sees {engine.size}: {advice}"
        raise UserError(message, everywhere=True)
    if unbind:
        engine.notes.append(Setting("mpirun's default binding to one core undone (--bind-to is respected)"))
    if tuning and bound_unexplained(os.environ, len(os.sched_getaffinity(0)), os.cpu_count() or 1):
        engine.notes.append(
            "mpirun bound rank 0 to one core, which its threads share: unless you meant it, --bind-to none"
        )
    with engine.raising_together("device"):
        engine.device = engine.choose_device(device)
    gpu.require_own(engine)
    if tuning and engine.device.type == "cuda":
        address = gpu.pci_address(engine.device)
        if near := near_gpu(address, os.sched_getaffinity(0), os.cpu_count() or 1):
            os.sched_setaffinity(0, near)
            engine.notes.append(Setting(f"{len(near)} cores next to the GPU at {address}"))
    engine.activity.asynchronous = engine.device.type != "cpu"
    engine.notes += accelerators.set_arithmetic(engine.device, deterministic=deterministic, tuning=tuning)
    if tuning and engine.device.type == "cpu" and keep_freed_memory(os.environ):
        engine.notes.append(Setting("malloc keeps freed memory"))
    # A collective, whatever flags this rank has: differences are refused later.
    cores = cores_of_ranks(engine)
    core = turn_on(engine.rank, cores)
    if threads is not None or tuning:
        torch.set_num_threads(threads or threads_asked(os.environ) or share_of(engine.rank, cores))
    # A rank with several threads needs several cores.
    if tuning and core is not None and engine.device.type == "cpu" and torch.get_num_threads() == 1:
        stay_on(core)
        engine.notes.append(Setting("more ranks than cores: as many on each"))
    return engine


def cores_of_ranks(engine: Engine) -> list[tuple[str, list[int]]]:
    """Return host and cores of each rank. A collective."""
    cores: list[tuple[str, list[int]]] = engine.all_gather_object(
        [socket.gethostname(), sorted(os.sched_getaffinity(0))], "cores"
    )
    return cores


def cores_of_rank(engine: Engine) -> int:
    """Return this rank's share of the cores that it may run on, at least 1. A collective."""
    return share_of(engine.processes.rank, cores_of_ranks(engine))


def share_of(rank: int, cores: Sequence[tuple[str, Sequence[int]]]) -> int:
    """Return this rank's share of the cores that it may run on, at least 1. cores: host and cores of each rank."""
    return threads_for(rank, cores, min(cpu_quota(), cores_of_job(os.environ, announced())))


def engine_class(name: str) -> type[Engine]:
    """Return the class of the engine `name`. Only the module of that engine is imported."""
    if name == "horovod":
        from hvdtrain.engines.horovod import HorovodEngine

        return HorovodEngine
    if name == "ddp":
        from hvdtrain.engines.ddp import DdpEngine

        return DdpEngine
    from hvdtrain.engines import single

    return single.DataParallelEngine if name == "dataparallel" else single.SerialEngine


def require_same_flags(engine: Engine, flags: Mapping[str, str]) -> None:
    """Raise UserError on every rank if flags or the versions of hvdtrain differ between ranks. A collective."""
    versions, everyone = zip(*engine.all_gather_object([__version__, dict(flags)], "flags"), strict=True)
    for rank, theirs in enumerate(everyone):
        if versions[rank] != versions[0]:
            message = (
                f"ranks 0 and {rank} have hvdtrain {versions[0]} and {versions[rank]}: install the same on each host"
            )
            raise UserError(message, everywhere=True)
        if unlike := [name for name in everyone[0] | theirs if theirs.get(name) != everyone[0].get(name)]:
            pairs = (f"--{name.replace('_', '-')} {everyone[0].get(name)} and {theirs.get(name)}" for name in unlike)
            message = (
                f"ranks 0 and {rank} have different flags ({'; '.join(pairs)}): start every rank with the same command"
            )
            raise UserError(message, everywhere=True)


# ---- the types in which a run computes and sends


def computes_in_bf16(device: torch.device, cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Return whether `device` has bfloat16 instructions: NVIDIA of compute capability 8.0 or higher; CPUs with AVX512-BF16,
    AMX or Arm BF16."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    try:
        # "flags" is x86's word for them, "Features" that of Arm.
        lines = [line for line in cpuinfo.read_text().splitlines() if line.startswith(("flags", "Features"))]
    except OSError:
        return False
    return bool({"avx512_bf16", "amx_bf16", "bf16"} & set(" ".join(lines).split()))


def default_predivision(compression: str, size: int) -> float:
    """Return by what gradients are divided before their sum over `size` ranks, if the user does not say.

    float16 ends at 65,504 and has few bits below 6e-5. Division by the number of ranks keeps every sum finite whose mean is,
    but loses small gradients. Division by about its root has an error of 0.3, 0.3 and 0.6 % on 8, 64 and 512 ranks, and
    means finite below 65,504, 8,188 and 2,047 (tests/single/engines/test_gpu_numbers.py).
    """
    if compression != "fp16":  # the others have the range of float32
        return 1.0
    # By the number of ranks, small gradients are lost:
    # for a root mean square of 4.5e-5, the mean is wrong by 20 % on 512 ranks.
    return float(size) if size <= 8 else max(8.0, 2.0 ** math.floor(math.log2(size) / 2))


def choose_compression(engine: Engine, asked: str) -> str:
    """Return "none", "fp16" or "bf16". For "auto", choose the faster one here. A collective. Raises UserError."""
    if asked != "auto":
        engine.refuse_compression(asked)
        return asked
    hosts = len(set(engine.all_gather_object(socket.gethostname(), "compression")))
    if hosts > 1:
        engine.notes.append(f"compression fp16: gradients travel between {hosts} hosts")
        return "fp16"
    engine.notes.append("compression none: all ranks are on one host, where casting costs more than it saves")
    return "none"


def choose_amp(engine: Engine, asked: str | None, of_cpus: str = "off", began: str | None = None) -> str:
    """Return "off", "fp16" or "bf16". For "auto": "bf16" if every rank's device supports it, else "off". For None: as the
    run that is resumed, else as "auto" on GPUs, and `of_cpus` on CPUs. A collective.

    began: of the run that is resumed. It does not change, wherever that goes on.
    """
    if asked is None and began in ("off", "bf16"):
        if began == "bf16":
            engine.notes.append("amp bf16: as when the run began")
        return began
    if asked is None:
        asked = "auto" if engine.device.type == "cuda" else of_cpus
    if asked != "auto":
        return asked
    if all(engine.all_gather_object(computes_in_bf16(engine.device), "amp")):
        engine.notes.append("amp bf16: every rank's device has instructions for it (--amp off: float32)")
        return "bf16"
    engine.notes.append(
        "amp off: not every rank's device has instructions for bf16, which would be slower than float32"
    )
    return "off"
