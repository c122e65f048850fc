"""What a run does around a checkpoint: in which phase of the rank, with how many heartbeats."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hvdtrain import training
from hvdtrain.engines.single import SerialEngine
from hvdtrain.hangs.activity import Activity, Phase
from hvdtrain.hangs.timeouts import HangTimeouts
from hvdtrain.training import contents
from hvdtrain.training.guard import Guard

X = torch.randn(8, 3, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> dict[str, list[Phase]]:
    """Train two steps, with a checkpoint after the first. Return the phases of comparing ranks and of copying tensors."""
    activity: list[Activity] = []
    found: dict[str, list[Phase]] = {"compare": [], "copy": [], "beat": []}
    init, compare, snapshot, beat = Activity.__init__, Guard.compare_replicas, contents.snapshot, Activity.heartbeat

    def made(self: Activity) -> None:
        activity.append(self)
        init(self)

    def compared(self, *rest) -> None:
        found["compare"].append(activity[0].phase)
        compare(self, *rest)

    def copied(tensors, heartbeat=lambda: None):
        found["copy"].append(activity[0].phase)
        del found["beat"][:]
        copies = snapshot(tensors, heartbeat)
        found["tensors"] = [activity[0].phase] * len(copies)
        return copies

    def beaten(self: Activity) -> None:
        found["beat"].append(self.phase)
        beat(self)

    words = (
        f"--engine serial --no-progress --threads 1 --checkpoint-steps 1 --output-dir {tmp_path_factory.mktemp('run')}"
    )
    flags = training.parser("test", None, epochs=1, batch_size=4).parse(words.split())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Activity, "__init__", made)
        patch.setattr(Activity, "heartbeat", beaten)
        patch.setattr(Guard, "compare_replicas", compared)
        patch.setattr(contents, "snapshot", copied)
        patch.setattr(SerialEngine, "barrier", lambda self: None)
        with training.start(flags) as run:
            net = nn.Linear(3, 1)
            model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
            for _ in run.epochs(1):
                for step in run.steps(X):
                    for (x,) in step.batches():
                        step.backward(F.mse_loss(model(x), x.sum(1, keepdim=True)))
                    step.update()
                    if step.number == 2:
                        break_at = {name: list(phases) for name, phases in found.items()}
    return break_at


def test_ranks_are_compared_in_the_phase_of_the_step(saved):
    """What they wait for there is a rank's step."""
    assert saved["compare"][0].name in ("step", "first step")


def test_a_rank_that_hangs_in_a_checkpoint_has_the_limit_of_a_step_and_each_tensor_is_progress(saved):
    """With ten times that, `--step-timeout 5` left a rank that span there alone for 50 s."""
    assert saved["copy"][0].name == "checkpoint"
    for timeouts in (HangTimeouts(5.0), HangTimeouts()):
        assert timeouts.phase(saved["copy"][0], 0.0) == timeouts.step(0.0)
    assert len(saved["beat"]) >= len(saved["tensors"]) == 2


def test_a_snapshot_is_contiguous_and_does_not_change_with_the_weights():
    weights = torch.arange(6.0).reshape(2, 3).requires_grad_()
    copies = contents.snapshot({"weights": weights, "transposed": weights.t()})
    weights.data.zero_()
    assert copies["weights"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert copies["transposed"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert all(copy.is_contiguous() and not copy.requires_grad for copy in copies.values())
