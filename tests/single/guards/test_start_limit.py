"""What is said, and when the process ends, where start-up does not come to an end."""

import threading
import time

import pytest

from hvdtrain.guards import start_limit, timeouts
from hvdtrain.guards.activity import Activity
from hvdtrain.guards.start_limit import limited_start
from hvdtrain.guards.timeouts import HangTimeouts


@pytest.fixture
def fast(monkeypatch):
    monkeypatch.setattr(start_limit, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(start_limit, "SAY_SECONDS", 0.03)
    monkeypatch.setitem(timeouts.PHASE_SECONDS, "start-up", 0.1)


class Engine:
    def __init__(self, collective: str | None):
        self.activity = Activity()
        self.activity.collective = collective


def stuck(timeout: float | None, prepare=lambda started: None) -> int | None:
    """Stand still in a start, and return the exit code; None where it was waited for."""
    codes, left = [], threading.Event()

    def leave(code: int) -> None:
        codes.append(code)
        left.set()

    with limited_start(HangTimeouts(timeout), leave) as started:
        prepare(started)
        left.wait(10.0 if timeout != 0 else 0.5)
    return codes[0] if codes else None


def test_a_rank_that_waits_for_others_says_so_and_ends(fast, capfd):
    assert stuck(None) == 1
    warning, error = capfd.readouterr().err.splitlines()
    assert warning.startswith("warning: rank 0 on ")
    assert "waits for the other ranks to start the engine, at " in warning
    assert error.startswith("hvdtrain: error: rank 0 on ")
    assert error.endswith("; start-up did not finish within 0 s")


@pytest.mark.parametrize("collective", ["checkpoint.facts", None])
def test_with_an_engine_the_collective_is_named_or_the_line(collective, fast, capfd):
    def prepare(started):
        started.engine = Engine(collective)

    assert stuck(None, prepare) == 1
    error = capfd.readouterr().err.splitlines()[-1]
    assert ("waits for the other ranks in checkpoint.facts;" if collective else " is at ") in error


def test_without_a_limit_it_is_only_said(fast, capfd):
    assert stuck(0) is None
    assert len(capfd.readouterr().err.splitlines()) == 1


def test_a_start_that_is_over_is_left_alone(fast, capfd):
    with limited_start(HangTimeouts(), lambda code: pytest.fail("ended")):
        pass
    time.sleep(0.3)
    assert capfd.readouterr().err == ""
