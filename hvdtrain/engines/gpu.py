"""Which GPU a rank computes on, and in one line why it cannot.

A GPU that is there is used, unless --device cpu was given: otherwise a whole node would train on its CPU, and only a note
would say so. CUDA starts here, in `count`, and nowhere before.
"""

import contextlib
import os
import re
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from hvdtrain.engines.errors import UserError
from hvdtrain.launching.capacity import gpus_here

NO_GPU = "--device cuda, but torch sees no GPU here: use --device cpu, or a GPU node (in a container: --nv)"
# Oldest NVIDIA driver for each major version of CUDA (CUDA's release notes, "minor version compatibility").
OLDEST_DRIVER = {"11": "450", "12": "525", "13": "580"}
DRIVER = Path("/proc/driver/nvidia/version")  # "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05 ..."


def count(wanted: str) -> int:
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
            said = f"{gpus(there)}, but torch {torch.__version__} was built without CUDA"
            raise UserError(f"{said}: install a torch with CUDA, or use --device cpu")
        try:
            torch.cuda.init()
        except RuntimeError as error:
            raise UserError(unusable(there, error)) from error
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
    visible = environment.get("CUDA_VISIBLE_DEVICES", "0").split(",")
    if not re.fullmatch("[0-9]+|(GPU|MIG)-.+", visible[0].strip()):  # names no GPU: -1, NoDevFiles
        return 0
    opened = 0
    for path in devices.glob("nvidia[0-9]*"):
        with contextlib.suppress(OSError):
            os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))
            opened += 1
    return min(opened, gpus_here(environment, devices))


def unusable(there: int, error: Exception, driver: Path = DRIVER) -> str:
    """Return a line about GPUs that torch cannot use. error: what CUDA said when it should start."""
    why = first_sentence(error)
    if "driver" not in why:
        return f"{gpus(there)}, but CUDA does not start ({why}): see nvidia-smi, or use --device cpu"
    with contextlib.suppress(OSError):
        found = re.search("[0-9]+([.][0-9]+)+", driver.read_text())
        why += f"; driver {found[0]}" if found else ""
    cuda = torch.version.cuda or ""
    needed = OLDEST_DRIVER.get(cuda.split(".")[0], f"of CUDA {cuda}")
    said = f"{gpus(there)}, but CUDA does not start ({why}): torch {torch.__version__} needs driver {needed} or newer"
    return f"{said}: update it, install a torch for an older CUDA, or use --device cpu"


def first_sentence(error: Exception) -> str:
    """Return the first sentence of an error of CUDA, which goes on about environment variables and web pages."""
    return re.split(r"\n|\. |: http", str(error), maxsplit=1)[0].rstrip(".")


def take(index: int) -> torch.device:
    """Make GPU `index` torch's current device, and return it. Raises UserError if torch cannot compute on it."""
    device = torch.device("cuda", index)
    try:
        torch.cuda.set_device(device)  # allocates CUDA's context
        capability = torch.cuda.get_device_capability(device)
    except RuntimeError as error:
        how = "another process may hold it (nvidia-smi), or its compute mode be exclusive; or use --device cpu"
        raise UserError(f"{device} cannot be used ({first_sentence(error)}): {how}") from error
    if not has_kernels(capability, built := torch.cuda.get_arch_list()):
        name = torch.cuda.get_device_name(device)
        said = f"{device} ({name}) has architecture sm_{capability[0]}{capability[1]}"
        how = "install a torch built for it, or use --device cpu"
        raise UserError(f"{said}, for which torch {torch.__version__} has no kernels ({', '.join(built)}): {how}")
    return device


def has_kernels(capability: tuple[int, int], built: Sequence[str]) -> bool:
    """Return whether code for the architectures `built` runs on a GPU of this compute capability.

    built: such as sm_86 (machine code: for the same major version, and this minor version or higher), sm_90a (for exactly
    this one) and compute_90 (PTX: for this one or higher). Others, such as AMD's, are not judged.
    """
    known = [found for name in built if (found := re.fullmatch(r"(sm|compute)_([0-9]+)([0-9])([a-z]?)", name))]
    for kind, major, minor, only in (found.groups() for found in known):
        made = (int(major), int(minor))
        if made == capability or (not only and made <= capability and (kind == "compute" or made[0] == capability[0])):
            return True
    return not known


# ---- one GPU for each rank


class RankDevice(NamedTuple):
    """What a rank computes on. uuid, bus: of its GPU; empty if not known. mig: whether it was given slices of GPUs."""

    host: str
    device: str  # "cpu" or "cuda"
    uuid: str = ""
    bus: str = ""  # PCI address: slices of a GPU have the same
    mig: bool = False


def rank_device(device: torch.device) -> RankDevice:
    """Return what this rank computes on."""
    if device.type != "cuda":
        return RankDevice(socket.gethostname(), device.type)
    about = torch.cuda.get_device_properties(device)
    bus = ":".join(str(getattr(about, f"pci_{part}_id", "")) for part in ("domain", "bus", "device")).strip(":")
    mig = "MIG-" in os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return RankDevice(socket.gethostname(), device.type, str(getattr(about, "uuid", "")), bus, mig)


def ranks_share_gpus(environment: Mapping[str, str]) -> bool:
    """Return whether NCCL was told to accept several ranks on one GPU (NCCL 2.30 and newer), as tests with one GPU do."""
    return environment.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"


def conflict(places: Sequence[RankDevice], shared: bool) -> str | None:
    """Return a line that names ranks which cannot reduce with each other over NCCL; None: all can. places: by rank.

    shared: ranks may have the same GPU.
    """
    kinds = {where.device: rank for rank, where in reversed(list(enumerate(places)))}
    if len(kinds) > 1:
        cpu, other = kinds["cpu"], min(rank for kind, rank in kinds.items() if kind != "cpu")
        said = f"rank {cpu} on {places[cpu].host} has no GPU, rank {other} on {places[other].host} has one"
        return f"{said}: give every rank a GPU, or use --device cpu"
    first: dict[tuple[str, str], int] = {}
    for rank, where in enumerate(places):
        for known in {where.uuid, where.bus} - {""}:
            other = first.setdefault((where.host, known), rank)
            if other == rank or shared:
                continue
            who = f"ranks {other} and {rank} on {where.host}"
            if where.mig or places[other].uuid != where.uuid:
                said = f"{who} have slices of one GPU (MIG), between which NCCL does not communicate"
                return f"{said}: turn MIG off (nvidia-smi -mig 0), or start one rank on each GPU"
            said = f"{who} have the same GPU ({where.uuid or where.bus}), and NCCL wants one for each rank"
            return f"{said}: start as many ranks as GPUs, or show each rank its own (CUDA_VISIBLE_DEVICES)"
    return None
