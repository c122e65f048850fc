"""What a run does around a checkpoint, in which phase of the watchdog."""

import contextlib
from types import SimpleNamespace

from hvdtrain.training.run import Run


def test_ranks_are_compared_in_the_phase_of_the_step():
    """A rank that waits there for one that hangs in its step must not have a checkpoint's ten minutes."""
    phases: list[str] = ["step"]
    seen: list[tuple[str, str]] = []

    @contextlib.contextmanager
    def phase(name):
        phases.append(name)
        yield
        phases.pop()

    run = Run.__new__(Run)
    run.state, run._registered = None, {}
    run._prepared = SimpleNamespace(models=[], optimizers=[], scaler=None)
    run.guard = SimpleNamespace(phase=phase, compare_replicas=lambda *_: seen.append(("compare", phases[-1])))
    cadence = SimpleNamespace(saving=contextlib.nullcontext)
    run.checkpoints = SimpleNamespace(cadence=cadence, save=lambda *_, automatic: seen.append(("save", phases[-1])))
    run._save()
    assert seen == [("compare", "step"), ("save", "checkpoint")]
