"""CUDA and NCCL for building Horovod: from wheels, or from a CUDA of the site."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from steps import Refusal, pins

SITE = Path(sysconfig.get_path("purelib")) / "nvidia"  # torch's CUDA wheels, where Horovod is built for it
USUAL = Path("/usr/local/cuda")
# A100, H100; the compiler adds PTX of the last one, from which newer GPUs compile at their first use
ARCHITECTURES = "80,90"


@dataclass(frozen=True)
class Cuda:
    """What Horovod's kernels and NCCL calls are compiled with."""

    version: str  # of nvcc, such as 13.2
    home: Path | None  # None: nvcc from its wheel
    nccl: str
    architectures: str  # compute capabilities, as 80,90

    def __str__(self) -> str:
        """For the cache's key and the user."""
        return f"CUDA {self.version} ({self.home or 'wheels'}), {self.nccl}, for GPUs of {self.architectures}"

    def requirements(self) -> list[str]:
        """Return the requirements of wheels with the compiler of torch's CUDA version."""
        return [] if self.home else nvcc_wheels(self.version)

    def run_path(self) -> list[str]:
        """Return where the extension finds NCCL and the CUDA runtime, also if it is loaded before torch."""
        path = [str(directory) for directory in site_nccl("LIB", "lib")]
        path += [
            f"$ORIGIN/../../nvidia/{library.parent.parent.relative_to(SITE)}/lib"
            for pattern in ("nccl/lib/libnccl.so.*", "*/lib/libcudart.so.*")
            for library in sorted(SITE.glob(pattern))
        ]
        return [*path, *([f"{self.home}/lib64"] if self.home else [])]

    def build_environment(self, tools: Path, scratch: Path) -> dict[str, str]:
        """Return variables for Horovod's build. tools: where `requirements` are. scratch: links are made in it."""
        parts = [root / f"cu{self.version.split('.')[0]}" for root in (SITE, tools / "nvidia")]
        home = str(self.home or joined_toolkit(parts, scratch / "toolkit"))
        env = {
            "CUDA_HOME": home,  # torch looks here
            "HOROVOD_CUDA_HOME": home,
            "CUDAToolkit_ROOT": home,  # CMake looks here
            "HOROVOD_NCCL_LINK": os.environ.get("HOROVOD_NCCL_LINK", "SHARED"),
            "HOROVOD_BUILD_CUDA_CC_LIST": self.architectures,
        }
        if not any(re.fullmatch(r"HOROVOD_GPU_[A-Z]+", name) for name in os.environ):
            env["HOROVOD_GPU_OPERATIONS"] = "NCCL"
        if (SITE / "nccl").is_dir() and not site_nccl("INCLUDE", "include"):
            env["HOROVOD_NCCL_HOME"] = str(joined_toolkit([SITE / "nccl"], scratch / "nccl"))
        return env


def nvcc_wheels(version: str) -> list[str]:
    """Return the requirements for nvcc and its headers, of CUDA 13 or newer: CUDA 12's wheels have no compiler."""
    return [f"cuda-toolkit[nvcc,cccl]=={version}.*"]


def choose(torch_cuda: str, cuda_home: Path | None, capabilities: str) -> Cuda:
    """Return the CUDA to compile with, for torch's CUDA version and the GPUs of this machine. Raises Refusal."""
    home, version = toolkit(torch_cuda, cuda_home)
    return Cuda(version, home, nccl(), os.environ.get("HOROVOD_BUILD_CUDA_CC_LIST") or capabilities or ARCHITECTURES)


def toolkit(torch_cuda: str, cuda_home: Path | None) -> tuple[Path | None, str]:
    """Return (directory, version) of a CUDA of torch's major version, or (None, torch's) for wheels. Raises Refusal."""
    major = torch_cuda.split(".")[0]
    for by, named in (("--cuda-home ", cuda_home), ("HOROVOD_CUDA_HOME=", os.environ.get("HOROVOD_CUDA_HOME"))):
        if named:
            directory = Path(named)
            found = nvcc_version(directory)
            if not found:
                raise Refusal(f"{by}{directory}: no working bin/nvcc with its headers there")
            if found.split(".")[0] != major:
                raise Refusal(f"{by}{directory} is CUDA {found}, but torch was built with {torch_cuda}: load another")
            return directory, found
    wheels = int(major) >= 13 and (SITE / f"cu{major}").is_dir()
    on_path = shutil.which("nvcc")
    near = [Path(os.environ["CUDA_HOME"])] if os.environ.get("CUDA_HOME") else []
    if not wheels:
        near += [*([Path(on_path).resolve().parents[1]] if on_path else []), USUAL]
    for directory in near:
        found = nvcc_version(directory)
        if found.split(".")[0] == major:
            return directory, found
    if not wheels:
        raise Refusal(
            f"no nvcc for torch's CUDA {torch_cuda}: its wheels have none before CUDA 13. Load a CUDA {major} (module, or "
            f"--cuda-home DIR), take a torch with CUDA 13 (--torch {pins()['torch']}), or build without NCCL (--cpu)"
        )
    return None, torch_cuda


def nvcc_version(home: Path) -> str:
    """Return the version of the nvcc in a CUDA directory, such as 13.0; an empty string without it or its headers."""
    if not (home / "include" / "cuda_runtime.h").is_file():  # a wrapper in /usr/local/bin, for one
        return ""
    try:
        shown = subprocess.run([home / "bin" / "nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""
    return (re.search(r"release (\S+),", shown) or ["", ""])[1]


def site_nccl(name: str, below: str) -> list[Path]:
    """Return the directory that HOROVOD_NCCL_`name` or HOROVOD_NCCL_HOME gives, if one does."""
    home, named = os.environ.get("HOROVOD_NCCL_HOME"), os.environ.get(f"HOROVOD_NCCL_{name}")
    return [Path(named)] if named else [Path(home) / below] if home else []


def nccl() -> str:
    """Return the name of the NCCL to build with, with its version where that is known. Raises Refusal."""
    for directory in site_nccl("INCLUDE", "include"):
        header = directory / "nccl.h"
        if not header.is_file():
            raise Refusal(f"HOROVOD_NCCL_HOME or HOROVOD_NCCL_INCLUDE: there is no {header}")
        numbers = re.findall(r"#define NCCL_(?:MAJOR|MINOR|PATCH) +(\d+)", header.read_text(errors="replace"))
        return f"NCCL {'.'.join(numbers)} ({directory})"
    wheels = [
        d for d in importlib.metadata.distributions() if re.match(r"nvidia-nccl-cu\d+$", d.metadata["Name"] or "")
    ]
    return f"NCCL {wheels[0].version}" if wheels else "NCCL of the system"


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
