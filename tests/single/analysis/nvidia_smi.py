"""A program in place of nvidia-smi. Its columns and spellings are those of driver 580; the values are made up."""

from pathlib import Path

GPU = "GPU-5c2b{:04d}-0000-0000-0000-000000000000, NVIDIA H100 80GB HBM3, 580.65.06, Disabled, Default, 81559, 4"


def put(directory: Path, gpus: list[str], processes: list[int] = (), code: int = 0) -> None:
    """Write an nvidia-smi into `directory`, which belongs on PATH."""
    path = directory / "nvidia-smi"
    answers = {"--query-gpu": gpus, "--query-compute-apps": processes}
    cases = [f"{what}*) cat <<E\n" + "\n".join(map(str, said)) + "\nE\n;;" for what, said in answers.items()]
    path.write_text("\n".join(["#!/bin/sh", 'case "$1" in', *cases, "esac", f"exit {code}", ""]))
    path.chmod(0o755)
