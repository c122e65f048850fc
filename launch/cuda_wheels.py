"""CUDA for building Horovod: nvcc and NCCL out of wheels, or a CUDA installation the user names."""

from __future__ import annotations

from pathlib import Path


def identity(torch_cuda: str, cuda_home: Path | None) -> str:
    raise NotImplementedError


def run_path() -> list[str]:
    return ["$ORIGIN/../../nvidia/nccl/lib"]


def requirements(identity: str) -> list[str]:
    raise NotImplementedError


def build_environment(cuda_home: Path | None, tools: Path, prefix: Path) -> dict[str, str]:
    raise NotImplementedError
