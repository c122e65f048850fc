"""Run a callback right after a module's first import. Does not import torch."""

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


def nothing(module: ModuleType) -> None:
    """The default callback."""


class ImportHook(MetaPathFinder):
    """Calls `then(module)` right after the first import of the module `name`, or at once if it is already imported.

    during: returns a context manager around the import, and around the search for the module before it.
    """

    def __init__(
        self, name: str, then: Callable[[ModuleType], None] = nothing,
        during: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    ):  # fmt: skip
        self.name, self.then, self.during = name, then, during
        if name in sys.modules:
            then(sys.modules[name])
        else:
            sys.meta_path.insert(0, self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        with self.during():
            spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                with self.during():
                    load(module)
                self.then(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign] # of this loader alone
        return spec
