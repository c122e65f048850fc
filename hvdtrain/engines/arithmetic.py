"""How GPUs compute: fast, or with the same bits in each run (--deterministic).

On CPUs nothing is set: the same command on the same machine has the same bits there (docs/restarts.md).
"""

import torch

# Variables with which bits repeat. Read once, when cuBLAS and NCCL start.
REPEATABLE = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # without it, torch refuses matrix products (use_deterministic_algorithms)
    "NCCL_NVLS_ENABLE": "0",  # sums in NVLink switches: "not deterministic between different calls" (nccl#1497)
    # NCCL chooses both by size and topology, and may choose differently in the next job.
    "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "Simple",
}


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
