"""What a site's environment says about the build: Horovod's own variables, and whether there are GPUs to train on."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
from collections.abc import Iterator

from steps import Refusal, has_nvidia_gpu

# Variables of Horovod's build, which reach it. The others of that name are settings of a run (HOROVOD_CYCLE_TIME), or
# contradict this build's options (HOROVOD_WITHOUT_GLOO).
FOR_GPUS = r"GPU(_\w+)?|ALLOW_MIXED_GPU_IMPL|CUDA_HOME|ROCM_HOME|NCCL_(HOME|INCLUDE|LIB|LINK)"
FOR_ALL = r"CPU_OPERATIONS|BUILD_ARCH_FLAGS|DEBUG|NVTX_INCLUDE|WITH(OUT)?_NVTX"
COMPILERS = r"CXX|CXXFLAGS|CPPFLAGS|LDFLAGS"
# Asked by FindMPI and by the compiler's wrapper.
MPI = r"MPI_HOME|MPI_CXX_COMPILER|MPICXX|I_MPI_ROOT|OMPI_CXX|MPICH_CXX"
ONE_CCL = r"CCL_ROOT|CCL_CONFIGURATION"
OPTIONS_INSTEAD = r"HOROVOD_WITH(OUT)?_(MPI|GLOO|PYTORCH|TENSORFLOW|MXNET)"

# How schedulers list their nodes, and what that shows where some have GPUs. A login node has none itself.
SCHEDULERS = {
    "sinfo": (["-h", "-o", "%G"], r"\bgpu\b"),  # Slurm: generic resources, gpu:h100:4(S:0-1)
    "pbsnodes": (["-a"], r"\b(n?gpus) = [1-9]"),
    "lshosts": (["-gpu"], r"(?m)^\S+ +0 "),  # LSF: a line for each GPU of a host, from number 0
    "flux": (["resource", "info"], r"[1-9]\d* GPUs"),
}


def matching(pattern: str) -> dict[str, str]:
    """Return the variables whose whole names match."""
    return {name: value for name, value in sorted(os.environ.items()) if re.fullmatch(pattern, name) and value}


def build_settings(gpu: bool, system_mpi: bool) -> dict[str, str]:
    """Return the variables of the environment that change the build. Raises Refusal."""
    settings = matching(rf"HOROVOD_({FOR_ALL}{'|' + FOR_GPUS if gpu else ''})|{COMPILERS}")
    if system_mpi:
        settings |= matching(MPI)
    operations = settings.get("HOROVOD_CPU_OPERATIONS", "").upper()  # in a run, small letters do, too
    if operations:
        settings["HOROVOD_CPU_OPERATIONS"] = operations
    if operations == "CCL":
        settings |= matching(ONE_CCL)
        if "CCL_ROOT" not in settings:
            raise Refusal("HOROVOD_CPU_OPERATIONS=CCL needs CCL_ROOT: load oneCCL, or unset it")
    if settings.get("HOROVOD_GPU_OPERATIONS") == "MPI":
        raise Refusal("HOROVOD_GPU_OPERATIONS=MPI: hvdtrain's gradients on GPUs go over NCCL: unset it, or say NCCL")
    return settings


def say(settings: dict[str, str]) -> None:
    """Print what of the environment is used, and which variables are not."""
    if settings:
        print(f"    your settings: {' '.join(f'{name}={value}' for name, value in settings.items())}", flush=True)
    if unused := matching(OPTIONS_INSTEAD):
        print(f"    not used: {', '.join(unused)}: --mpi decides, and Gloo is always built", flush=True)


def asked_for_gpus(options: argparse.Namespace) -> str:
    """Return how the user, or the site for its users, asked for NCCL, or an empty string."""
    named = matching(r"HOROVOD_(GPU(_\w+)?|CUDA_HOME|NCCL_(HOME|INCLUDE|LIB))")
    return "--gpu" if options.gpu else "--cuda-home" if options.cuda_home else next(iter(named), "")


def hints_of_gpus() -> Iterator[str]:
    """Yield what suggests that this environment will train on NVIDIA GPUs. The quickest ones first.

    An nvcc on PATH is none: developers' machines and base images have one, and nobody trains on GPUs there.
    """
    if has_nvidia_gpu():
        yield "this machine has a GPU"
    if os.environ.get("CUDA_HOME"):
        yield "CUDA_HOME is set"
    for command, (arguments, shows) in SCHEDULERS.items():
        if shutil.which(command):
            try:
                listed = subprocess.run([command, *arguments], capture_output=True, text=True, timeout=10).stdout
            except (OSError, subprocess.TimeoutExpired):
                continue
            if re.search(shows, listed):
                yield f"{command} lists nodes with GPUs"
