"""The formula that `tests.bench.goodput` prints beside what it measures."""

import math

import pytest

from tests.bench.goodput import daly


def test_without_failures_only_checkpoints_cost():
    assert daly(1e9, 10.0, 0.1, 1.0) == pytest.approx(10 / 10.1)


@pytest.mark.parametrize("mean_time", [30.0, 600.0, 3600.0])
def test_youngs_interval_is_about_the_best(mean_time):
    cost = 0.02
    best = max(daly(mean_time, 0.01 * step, cost, 1.0) for step in range(10, 3000))
    assert daly(mean_time, math.sqrt(2 * cost * mean_time), cost, 1.0) == pytest.approx(best, rel=1e-3)


def test_a_restart_of_a_tenth_of_the_time_between_failures_costs_a_tenth():
    assert daly(30.0, 0.1, 0.0, 3.0) == pytest.approx(math.exp(-0.1), rel=0.01)
