"""What the ranks of a host import once for all: torch, Horovod, and what the program's own import statements name.

Only what is known to be safe before a fork; the program itself does not run, and each rank imports the rest.
"""

import ast
import contextlib
import importlib
import sys
import weakref
from collections.abc import Sequence
from pathlib import Path

from hvdtrain.engines.errors import UserError

# Packages whose import starts no thread, and touches neither MPI nor a GPU.
SAFE = {"PIL", "horovod", "hvdtrain", "numpy", "safetensors", "torch", "torchvision"}
FIRST = ("torch", "horovod.torch")
# What hvdtrain's programs import later, where they need it.
OF_HVDTRAIN = ("hvdtrain.engines.horovod", "hvdtrain.data.digits")
KEPT: list[object] = []


def modules_of(source: str) -> list[str]:
    """Return the safe modules that a program's import statements may mean: those on its outermost level, in their order.

    `from a import b` may mean the module a.b: that is in the list, too.
    """
    found: list[str] = []
    for statement in ast.parse(source).body:
        if isinstance(statement, ast.Import):
            found += [alias.name for alias in statement.names]
        elif isinstance(statement, ast.ImportFrom) and statement.level == 0 and statement.module:
            found += [statement.module, *(f"{statement.module}.{alias.name}" for alias in statement.names)]
    return [name for name in dict.fromkeys(found) if name.split(".")[0] in SAFE]


def preload(source: str, asked: Sequence[str]) -> None:
    """Import what a program of this `source` will, and what is `asked` for by name.

    Raises UserError where a module that was asked for cannot be imported, or is not safe to import before a fork.
    """
    with contextlib.suppress(ImportError):
        import numpy  # noqa: F401 - its OpenBLAS starts threads, and knows how to stop them at a fork
    allowed = threads()
    wanted = [*FIRST, *modules_of(source)]
    if any(name.startswith("hvdtrain.") for name in wanted):
        wanted += OF_HVDTRAIN
    for name in wanted:
        _load(name)  # what fails here, each rank will report itself
    _check(allowed, "torch or Horovod")
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


def threads() -> int:
    return sum(1 for _ in Path("/proc/self/task").iterdir())


def _check(allowed: int, what: str) -> None:
    """Raise UserError where importing `what` did something that does not survive a fork."""
    done = []
    if threads() > allowed:
        done.append("starts threads")
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        done.append("starts CUDA")
    if "mpi4py.MPI" in sys.modules:
        done.append("starts MPI")
    if done:
        remedy = "leave it out" if what.startswith("--") else "leave --local-ranks out"
        raise UserError(f"{what} {' and '.join(done)}, which cannot be forked: {remedy}", everywhere=True)


def forget_finalizers() -> None:
    """Drop the exit handlers of objects made so far: they are the importer's, not each rank's.

    torch has hundreds of them; carrying them out would copy 28 MB of shared pages for each rank.
    """
    finalizers = weakref.finalize._registry  # type: ignore[attr-defined]
    KEPT.append(dict(finalizers))  # else each would be freed
    finalizers.clear()


def fresh_generators() -> None:
    """Reseed numpy's global generator: forked ranks would all draw the same. (Python reseeds its own.)"""
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
