"""When automatic checkpoints are due."""

import pytest

from hvdtrain.checkpoint.writer import LEAST_SECONDS, MOST_BACKOFF, CheckpointInterval


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
