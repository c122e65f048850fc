"""`--compile`: torch.compile of a model's blocks, and one clear line where a CPU has no compiler for what it writes."""

import os
import shutil
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import nn

from hvdtrain.engines.errors import UserError
from hvdtrain.models import compile_cache

MOST_COMPILATIONS = 64  # of one block's code: ResNet-50 has 8 kinds of blocks, and the last batch another shape


def require_compiler(device: torch.device) -> None:
    """Raise UserError where nothing compiles the C++ that torch.compile writes, or where others may replace the result."""
    compile_cache.require_private()
    if device.type != "cpu" and not os.environ.get("CC") and not (shutil.which("gcc") or shutil.which("clang")):
        # as Triton chooses it, for what starts its kernels
        raise UserError("--compile on a GPU needs a C compiler: install gcc, set CC, or leave it out")
    if device.type == "cpu" and not shutil.which(os.environ.get("CXX", "g++")):  # as torch._inductor chooses it
        given = f", and CXX={os.environ['CXX']} is not there" if "CXX" in os.environ else ""
        remedy = "correct CXX" if given else "install g++"
        raise UserError(f"--compile on a CPU needs a C++ compiler{given}: {remedy}, or leave it out")


def repeated_blocks(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the largest modules in a row that are made of others: ResNet's bottlenecks, a transformer's layers."""
    for module in model.children():
        row = isinstance(module, (nn.Sequential, nn.ModuleList))
        for part in module.children() if row else ():
            if any(True for _ in part.children()) and any(True for _ in part.parameters()):
                yield part
        if not row:
            yield from repeated_blocks(module)


def compiled(model: nn.Module, device: torch.device, backend: Any = "inductor") -> nn.Module:
    """Compile `model` for training, and return it. Raises UserError.

    Its blocks are compiled one by one. A method `end` is compiled as another block: what follows them up to the loss, of a
    model that has it. What is around the blocks of others is not compiled, which gained nothing (docs/evidence/gpus.md). In
    evaluation mode, the model runs as before.
    """
    require_compiler(device)
    if isinstance(model, nn.DataParallel):  # copies the modules in each step, and with them the compiled calls
        return cast("nn.Module", torch.compile(model, dynamic=False, backend=backend))
    import torch._dynamo.config as limits

    name = "recompile_limit" if hasattr(limits, "recompile_limit") else "cache_size_limit"  # before torch 2.7
    setattr(limits, name, max(MOST_COMPILATIONS, getattr(limits, name)))
    # Compiled code has its gradients ready all at once, at its end.
    # Of a model compiled as one, none could be reduced meanwhile.
    for block in list(repeated_blocks(model)) or [model]:
        # Not `nn.Module.compile`: the layers' names and the state_dict stay, but evaluations and samples would be compiled.
        block.forward = _in_training(block, block.forward, backend)
    end: Any = getattr(model, "end", None)
    if end is not None:
        vars(model)["end"] = _in_training(model, end, backend)
    return model


def _in_training(module: nn.Module, eager: Callable[..., Any], backend: Any) -> Callable[..., Any]:
    """Return `eager`, a method of `module`, that is compiled for training mode."""
    fast = torch.compile(eager, dynamic=False, backend=backend)

    def method(*inputs: Any, **named: Any) -> Any:
        return (fast if module.training else eager)(*inputs, **named)

    return method
