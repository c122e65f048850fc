"""The types in which a run computes and sends, where the user leaves the choice to us: --amp auto, --compression auto."""

import math
import socket
from pathlib import Path

import torch

from hvdtrain.engines.base import Engine


def computes_in_bf16(device: torch.device, cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Return whether `device` has bfloat16 instructions: NVIDIA of compute capability 8.0 or higher; CPUs with AVX512-BF16,
    AMX or Arm BF16."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    try:
        lines = [line for line in cpuinfo.read_text().splitlines() if line.startswith(("flags", "Features"))]
    except OSError:
        return False
    return bool({"avx512_bf16", "amx_bf16", "bf16"} & set(" ".join(lines).split()))


def default_predivision(compression: str, size: int) -> float:
    """Return by what gradients are divided before their sum over `size` ranks, if the user does not say.

    float16 ends at 65,504 and has few bits below 6e-5. Division by the number of ranks keeps every sum finite whose mean is,
    but loses small gradients: with a root mean square of 4.5e-5 the mean is wrong by 0.3 % on 8 ranks, 2.5 % on 64 and 20 %
    on 512. Division by about the root of the number keeps that at 0.3, 0.3 and 0.6 %, and means finite below 65,504,
    8,188 and 2,047 (tests/single/engines/test_gpu_numbers.py). A power of two divides without rounding.
    """
    if compression != "fp16":  # the others have the range of float32
        return 1.0
    return float(size) if size <= 8 else max(8.0, 2.0 ** math.floor(math.log2(size) / 2))


def choose_compression(engine: Engine, asked: str) -> str:
    """Return "none", "fp16" or "bf16". For "auto", choose the faster one here. A collective. Raises UserError."""
    if asked != "auto":
        engine.refuse_compression(asked)
        return asked
    hosts = len(set(engine.all_gather_object(socket.gethostname(), "compression")))
    if hosts > 1:
        engine.notes.append(f"compression fp16: gradients travel between {hosts} hosts")
        return "fp16"
    engine.notes.append("compression none: all ranks are on one host, where casting costs more than it saves")
    return "none"


def choose_amp(engine: Engine, asked: str | None) -> str:
    """Return "off", "fp16" or "bf16". For "auto": "bf16" if every rank's device supports it, else "off". For None: as
    "auto" on GPUs, "off" on CPUs.

    A collective for "auto", and for None on GPUs.
    """
    if asked is None:
        asked = "auto" if engine.device.type == "cuda" else "off"
    if asked != "auto":
        return asked
    if all(engine.all_gather_object(computes_in_bf16(engine.device), "amp")):
        engine.notes.append("amp bf16: every rank's device has instructions for it")
        return "bf16"
    engine.notes.append(
        "amp off: not every rank's device has instructions for bf16, which would be slower than float32"
    )
    return "off"
