"""Which GPU a rank computes on, and in one line why it cannot.

A GPU that is there is used, unless --device cpu was given: otherwise a whole node would train on its CPU, and only a note
would say so. CUDA starts here, in `usable_gpus`, and nowhere before.
"""

import contextlib
import os
import re
import socket
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

import torch

from hvdtrain.engines.base import Engine
from hvdtrain.engines.errors import UserError
from hvdtrain.launching import processes

NAME_OF_GPU = re.compile("[0-9]+|(GPU|MIG)-.+")
NO_GPU = "--device cuda, but torch sees no GPU here: use --device cpu, or a GPU node (in a container: --nv)"


def usable_gpus(wanted: str) -> int:
    """Return how many GPUs this process may compute on, and start CUDA if there are any. 0: compute on the CPU.

    wanted: "auto", "cpu" or "cuda". Raises UserError if there are GPUs that torch cannot use, and for "cuda" if there are
    none.
    """
    if wanted == "cpu":
        return 0
    # Trap: `device_count` asks NVML, which needs no CUDA: it counts GPUs for which the driver is too old.
    # `is_available` is False for these, as for no GPU at all.
    there = torch.cuda.device_count() or openable(os.environ)
    if there:
        if not (torch.version.cuda or torch.version.hip):
            message = f"{gpus(there)}, but torch {torch.__version__} was built without CUDA"
            raise UserError(f"{message}: install a torch with CUDA, or use --device cpu")
        try:
            torch.cuda.init()
        except RuntimeError as error:
            remedy = "see nvidia-smi; update the driver, install a torch for an older CUDA, or use --device cpu"
            if torch.cuda._is_in_bad_fork():
                remedy = (
                    "what started this process had used CUDA: let it start ranks without a fork, or leave CUDA alone"
                )
            message = f"{gpus(there)}, but CUDA does not start ({first_sentence(error)})"
            raise UserError(f"{message} with torch {torch.__version__}: {remedy}") from error
        there = torch.cuda.device_count()  # NVML may count more than CUDA shows
    if there:
        return there
    if wanted == "cuda":
        raise UserError(NO_GPU)
    if hasattr(torch, "xpu") and torch.xpu.is_available():
        raise UserError("torch sees an Intel GPU (XPU), which no engine of hvdtrain uses: use --device cpu")
    return 0


def gpus(number: int) -> str:
    """Return "1 GPU here" or "8 GPUs here"."""
    return f"{number} GPU{'s'[: number != 1]} here"


def openable(environment: Mapping[str, str], devices: Path = Path("/dev")) -> int:
    """Return the number of NVIDIA GPUs that this process may open. Slurm leaves those of other jobs in /dev."""
    opened = 0
    for path in devices.glob("nvidia[0-9]*"):
        with contextlib.suppress(OSError):
            os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))
            opened += 1
    return min(opened, gpus_here(environment, devices))


def first_sentence(error: Exception) -> str:
    """Return the first sentence of an error of CUDA, which goes on about environment variables and web pages."""
    return re.split(r"\n|\. |: http", str(error), maxsplit=1)[0].rstrip(".")


def take_gpu(index: int) -> torch.device:
    """Make GPU `index` torch's current device, and return it. Raises UserError if torch cannot compute on it."""
    device = torch.device("cuda", index)
    try:
        torch.cuda.set_device(device)  # allocates CUDA's context
        torch.ones(1, device=device)  # runs a kernel, which this torch may lack for a GPU older or newer than it
    except RuntimeError as error:
        remedy = "another process may hold it (nvidia-smi), or it needs another torch; or use --device cpu"
        raise UserError(f"{device} cannot be used ({first_sentence(error)}): {remedy}") from error
    return device


# ---- one GPU for each rank


def of_local_rank(local_rank: int, gpus: int) -> torch.device:
    """Return this rank's GPU, one of the `gpus` visible ones, and make it torch's current device.

    Whether two ranks have the same is known once all have one (`require_own`). Raises UserError if torch cannot compute.
    """
    # Fewer GPUs than ranks may be visible: a scheduler shows each rank its own, an agent of torchrun its ranks theirs.
    return take_gpu(local_rank % gpus)


def require_own(engine: Engine) -> None:
    """Raise UserError on every rank if two ranks have the same GPU, or some a GPU and some none. Note the memory of the
    smallest. A collective."""
    shared = ranks_share_gpus(os.environ)
    places = [RankDevice(*row) for row in engine.all_gather_object(rank_device(engine.device), "gpus")]
    engine.gpu_bytes = min(place.memory for place in places) // (MOST_ON_ONE if shared else 1)
    if engine.size == 1:
        return
    if refusal := conflict(places, shared):
        raise UserError(refusal, everywhere=True)
    if shared and conflict(places, False):
        for name, value in sharing_variables(engine.rank, torch.cuda.nccl.version()).items():
            os.environ.setdefault(name, value)
        engine.notes.append("ranks share a GPU (NCCL_MULTI_RANK_GPU_ENABLE=1): for tests, not for speed")


class RankDevice(NamedTuple):
    """What a rank computes on. bus: the PCI address of its GPU, which slices of it (MIG) share; its UUID where torch
    does not say; else empty. boot: tells machines of one name from each other. memory: bytes of the GPU."""

    host: str
    device: str  # "cpu" or "cuda"
    bus: str = ""
    boot: str = ""
    memory: int = 0


def rank_device(device: torch.device) -> RankDevice:
    """Return what this rank computes on."""
    if device.type != "cuda":
        return RankDevice(socket.gethostname(), device.type)
    about = torch.cuda.get_device_properties(device)
    bus = ":".join(str(getattr(about, f"pci_{part}_id", "")) for part in ("domain", "bus", "device")).strip(":")
    bus = bus or str(getattr(about, "uuid", ""))
    return RankDevice(socket.gethostname(), device.type, bus, processes.boot_id(), about.total_memory)


def pci_address(device: torch.device) -> str:
    """Return where the kernel lists a GPU in /sys/bus/pci/devices."""
    about = torch.cuda.get_device_properties(device)
    domain, bus, number = (getattr(about, f"pci_{part}_id", 0) for part in ("domain", "bus", "device"))
    return f"{domain:04x}:{bus:02x}:{number:02x}.0"


SHARING = "NCCL_MULTI_RANK_GPU_ENABLE"
MOST_ON_ONE = 2  # ranks on a GPU, as NCCL documents it


def ranks_share_gpus(environment: Mapping[str, str]) -> bool:
    """Return whether several ranks may have the same GPU, as tests with one GPU want it."""
    return environment.get(SHARING) == "1"


def sharing_variables(rank: int, nccl: tuple[int, ...]) -> dict[str, str]:
    """Return the variables with which this NCCL accepts two ranks on one GPU. Set them before its first collective.

    NCCL 2.30 and newer read SHARING. With older ones, these ranks communicate over sockets. Run with NCCL 2.28.9.
    """
    if nccl >= (2, 30):
        return {}
    # Older ones refuse ranks with the same GPU and the same host
    # ("Duplicate GPU detected"): each names a host of its own.
    return {"NCCL_HOSTID": f"rank{rank}", "NCCL_MNNVL_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}


def conflict(places: Sequence[RankDevice], shared: bool) -> str | None:
    """Return a line that names ranks which cannot reduce with each other over NCCL; None: all can. places: by rank.

    shared: two ranks may have the same GPU.
    """
    # Reversed, so that of each kind the lowest rank is named.
    kinds = {where.device: rank for rank, where in reversed(list(enumerate(places)))}
    if len(kinds) > 1:
        cpu, other = kinds["cpu"], min(rank for kind, rank in kinds.items() if kind != "cpu")
        message = f"rank {cpu} on {places[cpu].host} has no GPU, rank {other} on {places[other].host} has one"
        return f"{message}: give every rank a GPU, or use --device cpu"
    on: dict[RankDevice, list[int]] = {}
    for rank, where in enumerate(places):
        ranks = on.setdefault(where, [])
        ranks.append(rank)
        if where.bus and len(ranks) > (MOST_ON_ONE if shared else 1):
            message = (
                f"ranks {', '.join(map(str, ranks[:-1]))} and {rank} on {where.host} have the same GPU ({where.bus})"
            )
            if shared:
                return f"{message}, and NCCL takes {MOST_ON_ONE} at most (with {SHARING}=1): start fewer ranks"
            remedy = "start as many ranks as GPUs, or show each rank its own (CUDA_VISIBLE_DEVICES)"
            return f"{message}, or slices of it (MIG), and NCCL wants one for each rank: {remedy}"
    return None


def refuse_too_many_for_gpus(ranks: int, gpus: int) -> None:
    """Raise UserError if there are GPUs, but fewer than ranks. NCCL does not allow ranks to share a GPU."""
    if 0 < gpus < ranks:
        remedy = f"use --local-ranks {gpus}, or add --oversubscribe (--device cpu)"
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
