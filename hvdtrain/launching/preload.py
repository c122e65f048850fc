"""Import, once for all ranks of a host, torch, Horovod and the modules in the program's import statements.

Only modules that are known to be safe before a fork are imported. The program itself is not run; each rank imports the
other modules.
"""

import ast
import contextlib
import gc
import importlib
import os
import sys
import weakref
from collections.abc import Sequence

from hvdtrain.engines.errors import UserError
from hvdtrain.launching import processes

# Packages whose import starts no thread, and touches neither MPI nor a GPU.
SAFE = {"PIL", "horovod", "hvdtrain", "numpy", "safetensors", "torch", "torchvision"}
FIRST_IMPORTS = ("torch", "horovod.torch")
# Modules that hvdtrain's programs import later.
OF_HVDTRAIN = ("hvdtrain.engines.horovod", "hvdtrain.datasets.mnist_data")


def modules_of(source: str) -> list[str]:
    """Return the safe modules in the top-level import statements of `source`, in their order.

    For `from a import b`, the list has both a and a.b, which may be a module.
    """
    found: list[str] = []
    for statement in ast.parse(source).body:
        if isinstance(statement, ast.Import):
            found += [alias.name for alias in statement.names]
        elif isinstance(statement, ast.ImportFrom) and statement.level == 0 and statement.module:
            found += [statement.module, *(f"{statement.module}.{alias.name}" for alias in statement.names)]
    return [name for name in dict.fromkeys(found) if name.split(".")[0] in SAFE]


def preload(source: str, asked: Sequence[str]) -> None:
    """Import the modules that a program with this `source` imports, and those in `asked`.

    Raises UserError if a module in `asked` cannot be imported, or an import is not safe before a fork.
    """
    # torch.cuda.is_available() then asks NVML, as device_count() does. CUDA's own answer would keep CUDA from the ranks.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    with contextlib.suppress(ImportError):
        import numpy  # noqa: F401 - its OpenBLAS starts threads, and handles forks itself
    allowed = len(processes.own_threads())
    wanted = [*FIRST_IMPORTS, *modules_of(source)]
    if any(name.startswith("hvdtrain.") for name in wanted):
        wanted += OF_HVDTRAIN
    for name in wanted:
        _load(name)  # ignore errors: each rank will report them itself
    _check(allowed, "what the program imports")
    for name in asked:
        if error := _load(name):
            raise UserError(f"--import {name} cannot be imported: {type(error).__name__}: {error}", everywhere=True)
        _check(allowed, f"--import {name}")


def _load(name: str) -> Exception | None:
    parent, _, attribute = name.rpartition(".")
    if parent in sys.modules and hasattr(sys.modules[parent], attribute):
        return None
    try:
        importlib.import_module(name)
    except Exception as error:
        return error
    return None


def _check(allowed: int, what: str) -> None:
    """Raise UserError if importing `what` did something that does not survive a fork. allowed: number of threads."""
    done = []
    if len(processes.own_threads()) > allowed:
        done.append("starts threads")
    torch = sys.modules.get("torch")
    if torch is not None and (torch.cuda.is_initialized() or _keeps_cuda_from_ranks()):
        done.append("starts CUDA")
    if "mpi4py.MPI" in sys.modules:
        done.append("starts MPI")
    if done:
        remedy = "leave it out" if what.startswith("--") else "leave --local-ranks out"
        raise UserError(f"{what} {' and '.join(done)}, which does not survive a fork: {remedy}", everywhere=True)


def _keeps_cuda_from_ranks() -> bool:
    """Return whether a rank that is forked now could not use this host's GPUs. Only a forked process is told."""
    import torch

    from hvdtrain.engines import gpu

    if not gpu.gpus_here(os.environ):
        return False
    if (pid := os.fork()) == 0:
        os._exit(int(torch.cuda._is_in_bad_fork()))
    return os.waitpid(pid, 0)[1] != 0


def keep_finalizers_to_this_process() -> None:
    """Turn off the exit handlers (`weakref.finalize`) of what is imported by now, so that the ranks do not run them.

    torch registers hundreds of them; running them would copy 28 MB of shared pages in each rank.
    """
    for each in gc.get_objects():
        if type(each) is weakref.finalize:
            each.atexit = False


def fresh_generators() -> None:
    """Reseed numpy's global generator, which would be the same in all forked ranks. (Python reseeds its own.)"""
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
