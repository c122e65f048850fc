"""CUDA for building Horovod: nvcc, headers and NCCL out of wheels, or a CUDA installation that the user names."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sysconfig
from pathlib import Path

from steps import Refusal

# Where torch's own CUDA wheels lie in the environment that Horovod is built for.
SITE = Path(sysconfig.get_path("purelib")) / "nvidia"


def identity(torch_cuda: str, cuda_home: Path | None) -> str:
    """For the cache key: '13.2 (wheels), NCCL 2.30.7'."""
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
    """Where the extension finds NCCL: next to torch's other CUDA wheels. A system's NCCL is found without."""
    return ["$ORIGIN/../../nvidia/nccl/lib"]


def requirements(identity: str) -> list[str]:
    """The wheels with the compiler of torch's own CUDA version."""
    version = identity.split()[0]
    return [f"cuda-toolkit[nvcc,cccl]=={version}.*"] if "(wheels)" in identity else []


def build_environment(cuda_home: Path | None, tools: Path, scratch: Path) -> dict[str, str]:
    """Variables for Horovod's build; `tools` has the wheels of `requirements`, `scratch` gets links."""
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
    if "HOROVOD_BUILD_CUDA_CC_LIST" in os.environ:  # GPU generations, as 80,90; default: all that nvcc knows
        env["HOROVOD_BUILD_CUDA_CC_LIST"] = os.environ["HOROVOD_BUILD_CUDA_CC_LIST"]
    return env


def joined_toolkit(parts: list[Path], prefix: Path) -> Path:
    """One CUDA prefix of links to several wheels' files: CMake and nvcc want one, with lib64 and unversioned names."""
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
