"""What a run does around a checkpoint: in which phase of the rank, with how many heartbeats."""

import threading
import time

import pytest
import torch

from hvdtrain.checkpoint import checkpoint, contents
from hvdtrain.features import replicas
from hvdtrain.guards.judge import HangTimeouts
from tests.single.training.small import Trained


def test_a_rank_that_hangs_in_a_checkpoint_has_the_limit_of_a_step_and_each_tensor_is_progress(tmp_path, monkeypatch):
    """With ten times that, `--step-timeout 5` left a rank that span there alone for 50 s. What ranks wait for when they are
    compared is a rank's step."""
    phases, beats, snapshot = {}, [], contents.snapshot

    def before(t):
        activity = t.run.engine.activity

        def copied(tensors, heartbeat):
            phases.setdefault("copy", activity.phase)
            assert heartbeat == activity.heartbeat
            del beats[:]
            copies = snapshot(tensors, lambda: beats.append(heartbeat()))
            assert len(beats) == len(copies) > 1
            return copies

        monkeypatch.setattr(replicas, "compare", lambda *_: phases.setdefault("compare", activity.phase) and None)
        monkeypatch.setattr(contents, "snapshot", copied)

    Trained("--checkpoint-steps", "1", out=tmp_path, epochs=1, before=before)
    assert phases["compare"].name in ("step", "first step")
    assert phases["copy"].name == "checkpoint"
    for timeouts in (HangTimeouts(5.0), HangTimeouts()):
        assert timeouts.phase(phases["copy"], 0.0) == timeouts.step(0.0)


def test_a_snapshot_is_contiguous_and_does_not_change_with_the_weights():
    weights = torch.arange(6.0).reshape(2, 3).requires_grad_()
    copies = contents.snapshot({"weights": weights, "transposed": weights.t()})
    weights.data.zero_()
    assert copies["weights"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert copies["transposed"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert all(copy.is_contiguous() and not copy.requires_grad for copy in copies.values())


def test_an_exception_waits_for_the_checkpoint_that_is_being_written(tmp_path, monkeypatch, capfd):
    """The lock was released first: "not written (AssertionError()): training continues", of which neither was true."""
    raised, digest = threading.Event(), checkpoint.checkpoint_digest

    def late(*arguments):
        assert raised.wait(60)
        time.sleep(0.3)  # the exception has reached the end of the block meanwhile
        return digest(*arguments)

    monkeypatch.setattr(checkpoint, "checkpoint_digest", late)

    def fail(t, epoch):
        if epoch == 1:
            raised.set()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        Trained(out=tmp_path, head=fail)
    assert checkpoint.read_checkpoint(tmp_path / "checkpoints" / checkpoint.name_of(5))[0]["state"]["epoch"] == 1
    assert "not written" not in capfd.readouterr().err
