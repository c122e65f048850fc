"""How GPUs compute: fast, or with the same bits in each run (--deterministic).

On CPUs nothing is set: the same command on the same machine has the same bits there (docs/restarts.md).
"""

from collections.abc import Mapping

import torch

from hvdtrain.engines.errors import UserError
from hvdtrain.engines.tuning import tuned_environment

# Read once, when cuBLAS and NCCL start.
REPEATABLE = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # without it, torch refuses matrix products (use_deterministic_algorithms)
    "NCCL_NVLS_ENABLE": "0",  # sums in NVLink switches: "not deterministic between different calls" (nccl#1497)
    # NCCL chooses both by size and topology, and may choose differently in the next job.
    "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "Simple",
}
KEEPS_BITS = {"CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"), "NCCL_NVLS_ENABLE": ("0",)}


def repeatable_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to set before CUDA and NCCL start, so that bits repeat. Raises UserError where the user has set
    one to a value with which they do not."""
    for name, values in KEEPS_BITS.items():
        if environment.get(name, values[0]) not in values:
            said = f"--deterministic, but {name}={environment[name][:40]!r}, with which bits do not repeat"
            raise UserError(f"{said}: unset it, or set it to {values[0]}")
    return tuned_environment(environment, REPEATABLE)


def set_up(device: torch.device, *, deterministic: bool, tuning: bool) -> list[str]:
    """Set how torch computes on `device`. Return what was set and why, for the user."""
    if device.type != "cuda":
        return ["--deterministic changes nothing on CPUs, where runs have the same bits anyway"] * deterministic
    if deterministic:
        torch.use_deterministic_algorithms(True)
        # Otherwise torch fills each new tensor with NaN, to reveal reads of uninitialized memory.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined] # of the module's class
        torch.backends.cudnn.benchmark = False  # it times algorithms, and may choose differently in the next run
        notes = [
            "deterministic: algorithms that give the same bits in each run (slower; an operation without one raises)"
        ]
    elif tuning:
        torch.backends.cudnn.benchmark = True
        notes = ["cuDNN times its algorithms in the first steps; bits differ from run to run (--deterministic)"]
    else:
        notes = []
    if tuning:  # TensorFloat-32: 10 bits of mantissa in products that stay float32 under --amp
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.allow_tf32 = True
        notes.append("products of float32 in TF32 (exact ones: --tuning off, or NVIDIA_TF32_OVERRIDE=0)")
    return notes
