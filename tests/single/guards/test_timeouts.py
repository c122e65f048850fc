"""Each phase has its limit, never below that of a step."""

import pytest

from hvdtrain.guards.activity import START, STEP, Phase
from hvdtrain.guards.timeouts import PHASE_SECONDS, HangTimeouts


@pytest.mark.parametrize(
    ("asked", "longest", "step"), [(None, 0.0, 30.0), (None, 2.0, 40.0), (5.0, 1.0, 5.0), (5.0, 2.0, 6.0)]
)
def test_a_step_and_what_follows_from_it(asked, longest, step):
    timeouts = HangTimeouts(asked)
    assert timeouts.step(longest) == timeouts.phase(STEP, longest) == step
    assert timeouts.phase(Phase("evaluation"), longest) == timeouts.leaving(longest) == 10 * step
    assert timeouts.phase(Phase("checkpoint", 0.0), longest) == step  # a rank that hangs there has no longer limit
    assert timeouts.phase(Phase("work of one rank", 3600.0), longest) == 3600.0


@pytest.mark.parametrize("name", list(PHASE_SECONDS))
def test_a_phase_that_is_known_to_be_long_has_ten_minutes_or_ten_steps(name):
    assert HangTimeouts(5.0).phase(Phase(name), 0.0) == 600.0
    assert HangTimeouts(100.0).phase(Phase(name), 0.0) == 1000.0


def test_start_up_has_its_limit_before_the_ranks_are_connected_too():
    assert HangTimeouts(5.0).start_up() == HangTimeouts(5.0).phase(START, 0.0) == 600.0


def test_no_limit_is_none_anywhere():
    assert HangTimeouts(0.0).off
    assert HangTimeouts(0.0).start_up() == HangTimeouts(0.0).leaving(1.0) == float("inf")
