"""Data-parallel training with Horovod. README.md says what is where; `hvdtrain.training` is for programs of your own."""

import gc
import sys
from importlib.machinery import ModuleSpec

__version__ = "0.1.0"

# As `python -m hvdtrain.NAME`: sys.argv[0] is "-m" until the module is found. While torch is imported, the collector takes a
# sixth of the time and finds nothing (docs/network.md); `engines.exit_codes.run` turns it on again.
if sys.argv[:1] == ["-m"]:
    gc.disable()

# Modules of the first layout, and where they went. Remove with 0.2.
_MOVED = {
    "allocation": "engines.malloc", "board": "training.records.tensorboard", "checkpoint": "training.checkpoint",
    "clock": "training.records.clock", "convnet": "models.convnet", "display": "training.records.progress",
    "errors": "engines.errors", "files": "training.records.files", "flags": "training.flags",
    "guard": "training.resilience.guard", "launching": "analysis.launching",
    "links": "training.resilience.control_channel", "measuring": "analysis.measuring",
    "mistakes": "training.records.misclassified", "optim": "training.optim", "plotting": "analysis.plotting",
    "predicting": "analysis.predicting", "profiling": "training.records.profiling", "reporting": "analysis.reporting",
    "resume": "training.resume", "sharding": "data.sharding", "speedup": "analysis.scaling_results",
    "telemetry": "training.records.telemetry", "traces": "training.records.traces",
    "watchdog": "training.resilience.watchdog", "weights": "models.weights", "world": "engines.start",
}  # fmt: skip


class _Moved:
    """An import finder that says where a module went."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        package, _, old = name.rpartition(".")
        if package == __name__ and old in _MOVED:
            raise ModuleNotFoundError(f"{name} is now {package}.{_MOVED[old]} (see CHANGELOG.md)", name=name)
        return None


sys.meta_path.append(_Moved)
