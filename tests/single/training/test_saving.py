"""What a run does around a checkpoint, in which phase of the watchdog."""

import contextlib
from types import SimpleNamespace

import torch

from hvdtrain.training import contents
from hvdtrain.training.resilience.progress import LEAST_SECONDS, Phase, phase_limit
from hvdtrain.training.run import Run


def saved() -> tuple[list[tuple[str, Phase]], int]:
    """Call `Run._save`. Return what it called, each in which phase, and the number of heartbeats."""
    phases, seen, beats = [Phase("step")], [], []

    @contextlib.contextmanager
    def phase(name, seconds=None):
        phases.append(Phase(name, seconds))
        yield
        phases.pop()

    def save(*_, automatic, heartbeat):
        seen.append(("save", phases[-1]))
        contents.snapshot({"a": torch.ones(2), "b": torch.ones(3)}, heartbeat)

    run = Run.__new__(Run)
    run.state, run._registered = None, {}
    run._prepared = SimpleNamespace(models=[], optimizers=[], scaler=None)
    run.guard = SimpleNamespace(
        phase=phase,
        compare_replicas=lambda *_: seen.append(("compare", phases[-1])),
        heartbeat=lambda: beats.append(1),
    )
    run.checkpoints = SimpleNamespace(cadence=SimpleNamespace(saving=contextlib.nullcontext), save=save)
    run._save()
    return seen, len(beats)


def test_ranks_are_compared_in_the_phase_of_the_step():
    """What they wait for there is a rank's step."""
    assert saved()[0] == [("compare", Phase("step")), ("save", Phase("checkpoint", 0.0))]


def test_a_rank_that_hangs_in_a_checkpoint_has_the_limit_of_a_step_and_each_tensor_is_progress():
    """With ten times that, `--step-timeout 5` left a rank that span there alone for 50 s."""
    seen, beats = saved()
    for limit in (5.0, LEAST_SECONDS):
        assert phase_limit(seen[1][1], limit) == limit
    assert beats == 2


def test_a_snapshot_is_contiguous_and_does_not_change_with_the_weights():
    weights = torch.arange(6.0).reshape(2, 3).requires_grad_()
    copies = contents.snapshot({"weights": weights, "transposed": weights.t()})
    weights.data.zero_()
    assert copies["weights"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert copies["transposed"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert all(copy.is_contiguous() and not copy.requires_grad for copy in copies.values())
