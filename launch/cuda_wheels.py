"""CUDA for building Horovod: nvcc, headers and NCCL from wheels, or from a CUDA installation that the user names."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sysconfig
from pathlib import Path

from steps import Refusal

# Location of torch's CUDA wheels in the environment that Horovod is built for.
SITE = Path(sysconfig.get_path("purelib")) / "nvidia"


def identity(torch_cuda: str, cuda_home: Path | None) -> str:
    """Return the CUDA and NCCL for the cache key, such as '13.2 (wheels), NCCL 2.30.7'. Raises Refusal."""
    nccl = [d for d in importlib.metadata.distributions() if re.match(r"nvidia-nccl-cu\d+$", d.metadata["Name"] or "")]
    nccl_name = f"NCCL {nccl[0].version}" if nccl else "NCCL of the system"
    if cuda_home is None:
        if not torch_cuda.startswith("13.") or not nccl:
            raise Refusal(f"no nvcc wheels known for CUDA {torch_cuda}: name a CUDA with --cuda-home, or use --cpu")
        return f"{torch_cuda} (wheels), {nccl_name}"
    nvcc = cuda_home / "bin" / "nvcc"
    try:
        shown = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        raise Refusal(f"--cuda-home {cuda_home}: no working bin/nvcc there") from None
    found = re.search(r"release (\S+),", shown)
    version = found.group(1) if found else "?"
    if version.split(".")[0] != torch_cuda.split(".")[0]:
        raise Refusal(f"--cuda-home {cuda_home} is CUDA {version}, but torch was built with {torch_cuda}: load another")
    return f"{version} ({cuda_home}), {nccl_name}"


def run_path() -> list[str]:
    """Return where the extension finds NCCL: next to torch's other CUDA wheels. A system's NCCL needs no run path."""
    return ["$ORIGIN/../../nvidia/nccl/lib"]


def requirements(identity: str) -> list[str]:
    """Return the requirements of wheels with the compiler of torch's CUDA version."""
    version = identity.split()[0]
    return [f"cuda-toolkit[nvcc,cccl]=={version}.*"] if "(wheels)" in identity else []


def build_environment(cuda_home: Path | None, tools: Path, scratch: Path) -> dict[str, str]:
    """Return variables for Horovod's build. tools: has the wheels of `requirements`. scratch: links are created in it."""
    home = cuda_home or joined_toolkit([SITE / "cu13", tools / "nvidia" / "cu13"], scratch / "toolkit")
    env = {
        "CUDA_HOME": str(home),  # torch looks here
        "HOROVOD_CUDA_HOME": str(home),
        "CUDAToolkit_ROOT": str(home),  # CMake looks here
        "HOROVOD_GPU_OPERATIONS": "NCCL",
        "HOROVOD_NCCL_LINK": "SHARED",
    }
    if (SITE / "nccl").is_dir():
        env["HOROVOD_NCCL_HOME"] = str(joined_toolkit([SITE / "nccl"], scratch / "nccl"))
    if "HOROVOD_BUILD_CUDA_CC_LIST" in os.environ:  # compute capabilities, as 80,90; default: all that nvcc supports
        env["HOROVOD_BUILD_CUDA_CC_LIST"] = os.environ["HOROVOD_BUILD_CUDA_CC_LIST"]
    return env


def joined_toolkit(parts: list[Path], prefix: Path) -> Path:
    """Link the files of several wheels into one CUDA prefix, with lib64 and unversioned names, for CMake and nvcc."""
    for part in parts:
        for source in sorted(part.rglob("*")):
            relative = source.relative_to(part)
            link = prefix / ("lib64" if relative.parts[0] == "lib" else relative.parts[0]) / Path(*relative.parts[1:])
            if source.is_dir():
                link.mkdir(parents=True, exist_ok=True)
            elif not link.exists():
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(source)
    for library in sorted((prefix / "lib64").glob("lib*.so.*")):
        plain = library.with_name(library.name.split(".so.")[0] + ".so")
        if not plain.exists():
            plain.symlink_to(library.name)
    if not (prefix / "lib").exists():
        (prefix / "lib").symlink_to("lib64")
    return prefix
