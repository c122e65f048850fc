"""Python imports this by itself at its start, because the audit put this folder at the front of PYTHONPATH.

It waits until the program has imported torch, then `hvdtrain_audit_recorder` takes over. It adds no other name that a
program could import by mistake, and runs the sitecustomize that the environment has of its own.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

# Without pathlib: every process imports this file, also those that need nothing of it.
HERE = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120


class AfterImport(importlib.abc.MetaPathFinder):
    """Calls `then` with a module once its import is complete. A child that is forked before that has its own copy."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]):
        self.name = name
        self.then = then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self.then(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def record(torch: ModuleType) -> None:
    import hvdtrain_audit_recorder  # beside this file: on the path of the audited program, and nowhere else

    hvdtrain_audit_recorder.attach(torch)


def run_the_next_sitecustomize() -> None:
    elsewhere = [folder for folder in sys.path if os.path.abspath(folder or ".") != HERE]  # noqa: PTH100
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if os.environ.get("HVDTRAIN_AUDIT"):
    sys.meta_path.insert(0, AfterImport("torch", record))
run_the_next_sitecustomize()
