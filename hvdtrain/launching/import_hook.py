"""Run a callback right after a module's first import. Does not import torch."""

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class ImportHook(MetaPathFinder):
    """Calls `then(module)` right after the first import of the module `name`, or at once if it is already imported."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]):
        self.name, self.then = name, then
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
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                self.then(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign] # of this loader alone
        return spec
