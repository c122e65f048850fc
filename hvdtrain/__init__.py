"""Data-parallel training with Horovod. README.md shows the layout; `hvdtrain.training` is the library for your programs."""

import gc
import sys
from importlib.machinery import ModuleSpec

from hvdtrain.engines import importing

__version__ = "0.1.0"

# Under `python -m hvdtrain.NAME`, sys.argv[0] is "-m" until the module is found. Garbage collection would take a sixth of
# the time to import torch and free nothing (docs/network.md). `engines.exit_codes.run` enables it again.
if sys.argv[:1] == ["-m"]:
    gc.disable()

importing.report_start()
importing.limit_torch()

# Old module names and their replacements. Remove with 0.2.
_MOVED = {
    "allocation": "engines.malloc", "board": "training.records.tensorboard", "checkpoint": "training.checkpoint",
    "clock": "training.records.clock", "convnet": "models.convnet", "display": "training.records.progress",
    "errors": "engines.errors", "files": "training.records.files", "flags": "training.flags",
    "guard": "training.resilience.guard", "launching": "analysis.launching",
    "links": "training.resilience.control_channel", "measuring": "analysis.measuring",
    "mistakes": "training.records.misclassified", "optim": "training.optim", "plotting": "analysis.plotting",
    "profiling": "training.records.profiling", "reporting": "analysis.reporting", "resume": "training.resume",
    "sharding": "data.sharding", "speedup": "analysis.scaling_results",
    "telemetry": "training.records.telemetry", "traces": "training.records.traces",
    "watchdog": "training.resilience.watchdog", "weights": "models.weights", "world": "engines.start",
}  # fmt: skip


class _Moved:
    """An import finder that raises ModuleNotFoundError with the new name of a moved module."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        package, _, old = name.rpartition(".")
        if package == __name__ and old in _MOVED:
            raise ModuleNotFoundError(f"{name} is now {package}.{_MOVED[old]} (see CHANGELOG.md)", name=name)
        return None


sys.meta_path.append(_Moved)
