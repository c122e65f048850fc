"""What a run does around a checkpoint, in which phase of the watchdog."""

import contextlib
from types import SimpleNamespace

from hvdtrain.training.resilience.progress import LEAST_SECONDS, TIMES_STEP, Phase, phase_limit
from hvdtrain.training.run import Run


def test_ranks_are_compared_in_the_phase_of_the_step():
    """A rank that waits there for one that hangs in its step must not have a checkpoint's longer limit."""
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


def test_a_rank_that_hangs_in_a_checkpoint_has_the_limit_of_a_copy_in_memory_not_of_a_slow_disk():
    """It is written in the background. With ten minutes, `--step-timeout 5` left a rank that span there alone."""
    for limit in (5.0, LEAST_SECONDS):
        assert phase_limit(Phase("checkpoint"), limit) == TIMES_STEP * limit < 600.0
    assert phase_limit(Phase("reading data"), 5.0) == 600.0
