"""When a rank asks the others, and what it says of itself. Without a clock: the test says how much time has passed."""

import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from hvdtrain.hangs import detector
from hvdtrain.hangs.activity import READING, STEP, UNREAD, Activity
from hvdtrain.hangs.detector import Detector
from hvdtrain.hangs.timeouts import HangTimeouts


def one(rank: int = 0, **options) -> SimpleNamespace:
    """Return a rank of two, between its first and its second step, with a limit of 60 s for a step."""
    asked, ended, activity = [], [], Activity()
    settings = dict(watched=None, reply=1.0, guest=False, is_stopped=lambda rank: False) | options
    made = Detector(
        rank, ["rank 0", "rank 1"], activity, HangTimeouts(60.0), ask=lambda: asked.append(True), end=ended.append,
        **settings,
    )  # fmt: skip
    made.starvation.seconds = lambda: 0.0
    activity.begin_step(0)
    activity.finish_step(1)
    made.look(0.0, 0.0, connected=True)
    return SimpleNamespace(detector=made, activity=activity, asked=asked, ended=ended)


def seconds_until_it_asks(some: SimpleNamespace) -> float:
    for quarters in range(1, 400):
        some.detector.look(quarters / 4, 0.25, connected=True)
        if some.asked:
            return quarters / 4
    raise AssertionError("never")


@pytest.mark.parametrize(
    ("rank", "stopped", "seconds"), [(0, False, 60.0), (1, False, 62.0), (1, True, 60.0)],
    ids=["it decides", "rank 0 may be about to decide", "rank 0 is stopped"],
)  # fmt: skip
def test_how_long_the_decision_is_left_to_rank_0(rank, stopped, seconds):
    assert seconds_until_it_asks(one(rank, is_stopped=lambda rank: stopped)) == seconds


def test_other_phases_and_waiting_make_no_step_longer():
    some = one()
    with some.activity.during("checkpoint"):
        some.detector.look(1.0, 1.0, connected=True)
        some.detector.look(31.0, 30.0, connected=True)
    some.detector.look(32.0, 1.0, connected=True)
    assert some.detector.longest == 0.0
    some.detector.look(37.0, 5.0, connected=True)
    some.activity.finish_step(2)
    some.detector.look(38.0, 1.0, connected=True)
    assert some.detector.longest == 5.0


def test_an_input_worker_that_is_stopped_is_named_after_the_limit_of_a_step():
    child = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    try:
        some = one()
        with some.activity.during(READING.name):
            assert some.detector.report().report.limit == 600.0
            child.send_signal(signal.SIGSTOP)
            until = time.monotonic() + 20
            while detector.stopped_child() is None:
                assert time.monotonic() < until
            report = some.detector.report().report
        assert report.limit == 60.0
        assert f"(its input worker, process {child.pid}, is stopped by a signal: `kill -CONT {child.pid}`" in report.at
        assert some.detector.report().report.phase == STEP.name
        assert "worker" not in some.detector.report().report.at
    finally:
        child.kill()
        child.communicate()


def test_a_rank_whose_output_nobody_reads_has_time_and_says_so(monkeypatch):
    reader, writer = os.pipe()
    assert detector.output_is_read([writer])
    os.set_blocking(writer, False)
    with pytest.raises(BlockingIOError):
        while True:
            os.write(writer, b"x" * 4096)
    assert not detector.output_is_read([writer])
    some = one()
    assert some.detector.report().report.limit == 60.0
    monkeypatch.setattr(detector, "output_is_read", lambda: False)
    report = some.detector.report().report
    assert report.limit == HangTimeouts(60.0).phase(UNREAD, 0.0) == 600.0
    assert report.at.endswith(" (its output is not read: a paused pager, or Ctrl-S)")
    some.activity.collective = "gradients"
    assert some.detector.report().report.limit == 60.0
    os.close(reader)
    os.close(writer)
