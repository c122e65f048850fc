"""`--compile`: torch.compile, and one clear line where a CPU has no compiler for what it writes."""

import os
import shutil
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hvdtrain.engines.errors import UserError


def require_compiler(device: torch.device) -> None:
    """Raise UserError where torch.compile would write C++ and nothing can compile it."""
    if device.type == "cpu" and not shutil.which(os.environ.get("CXX", "g++")):  # as torch._inductor chooses it
        raise UserError("--compile on a CPU needs a C++ compiler: install g++, or leave it out")


def compiled(model: nn.Module, device: torch.device) -> Callable[..., Any]:
    """Return the compiled model: the same parameters, one compilation for each shape of input. Raises UserError."""
    require_compiler(device)
    return torch.compile(model, dynamic=False)
