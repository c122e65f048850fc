"""A program in place of nvidia-smi. Its columns and spellings are those of driver 580; the values are made up."""

from pathlib import Path

GPU = "NVIDIA H100 80GB HBM3, 81559, 580.65.06, Disabled, Default"


def put(directory: Path, gpus: list[str], code: int = 0) -> None:
    """Write an nvidia-smi that lists `gpus` into `directory`, which belongs on PATH."""
    path = directory / "nvidia-smi"
    path.write_text("\n".join(["#!/bin/sh", "cat <<E", *gpus, "E", f"exit {code}", ""]))
    path.chmod(0o755)
