"""When automatic checkpoints are due."""

import threading
import time

import pytest
import torch

from hvdtrain.checkpoint import checkpoint, contents
from hvdtrain.checkpoint.writer import LEAST_SECONDS, MOST_BACKOFF, CheckpointInterval
from hvdtrain.features import replicas
from hvdtrain.guards.judge import HangTimeouts
from tests.single.training.small import Trained


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def saved(interval, clock, stall, processor=0.0, seconds=0.01, failed=False):
    with interval.saving():
        clock.now += stall
    interval.written(processor, seconds, failed=failed)


def due(interval, clock):
    return clock() >= interval.due_at


def share(cost, seconds=400.0):
    """Return the share of the time that checkpoints of this cost (stall, processor) take once one was measured."""
    clock = Clock()
    interval = CheckpointInterval(True, clock)
    interval.begin()
    saved(interval, clock, *cost)
    until, spent = clock.now + seconds, 0.0
    while clock.now < until:
        clock.now += 0.02
        if due(interval, clock):
            saved(interval, clock, *cost)
            spent += sum(cost)
    return spent / seconds


@pytest.mark.parametrize("cost", [(0.001, 0.002), (0.01, 0.01), (0.5, 1.0), (0.0, 3.0)])
def test_checkpoints_take_at_most_a_hundredth_of_the_time(cost):
    assert share(cost) <= 0.0101
    assert share(cost) >= min(0.005, sum(cost) / LEAST_SECONDS * 0.9)


def test_before_the_first_is_measured_its_size_tells():
    clock = Clock()
    interval = CheckpointInterval(True, clock)
    assert interval.seconds == LEAST_SECONDS
    interval.expect(1_500_000_000)  # GPT-2's, with Adam
    assert 600 < interval.seconds < 1200
    clock.now += 1200
    assert not due(interval, clock), "before training"
    interval.begin()
    assert not due(interval, clock)
    clock.now += 1200
    assert due(interval, clock)
    saved(interval, clock, 0.2, 3.0)
    assert interval.seconds == pytest.approx(320)


def test_one_long_stall_is_an_exception_and_two_are_none():
    clock = Clock()
    interval = CheckpointInterval(True, clock)
    for stall in (0.01, 0.01, 5.0):
        saved(interval, clock, stall)
    assert interval.seconds == pytest.approx(LEAST_SECONDS)
    saved(interval, clock, 5.0)
    assert interval.seconds == pytest.approx(500)


def test_a_slow_file_system_is_busy_for_a_tenth_of_the_time():
    clock = Clock()
    interval = CheckpointInterval(True, clock)
    saved(interval, clock, 0.001, 0.001, seconds=30.0)
    assert interval.seconds == pytest.approx(300)


def test_where_none_can_be_written_it_is_tried_ever_more_rarely():
    clock = Clock()
    interval = CheckpointInterval(True, clock)
    pauses = []
    for _ in range(12):
        saved(interval, clock, 0.001, failed=True)
        pauses.append(interval.seconds)
    assert pauses[:3] == [2.0, 4.0, 8.0]
    assert pauses[-1] == MOST_BACKOFF
    saved(interval, clock, 0.001)
    assert interval.seconds == pytest.approx(LEAST_SECONDS)


def test_never_where_it_is_off():
    clock = Clock()
    interval = CheckpointInterval(False, clock)
    interval.begin()
    saved(interval, clock, 0.1)
    clock.now += 1e6
    assert not due(interval, clock)


# ---- what a run does around one


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
