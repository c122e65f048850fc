"""A start that does not come to an end; and a process that does not come to its end after training: real ones."""

import signal
import threading
import time

import pytest

from hvdtrain.guards import judge, limits
from hvdtrain.guards.activity import Activity
from hvdtrain.guards.judge import HangTimeouts
from hvdtrain.guards.limits import limited_start
from tests.single.forked import ends_of

BEGIN = """
import atexit, subprocess, sys, threading, time
from hvdtrain.guards import limits
limits.LIMIT_CHECK_SECONDS = 0.1

def work(seconds):  # at a fifth of a core: a twentieth counts as work
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        sum(range(500_000))
        time.sleep(0.04)
"""
WATCH = "watch = limits.Leaving('rank 1 on b', {})\nprint('kept', end='')\n"
ENDED = {  # after 1 s: what it does, and what is said of that
    "a line": ("watch.start()\ntime.sleep(1000)", "is at <string>:"),
    "a thread": ("threading.Thread(target=time.sleep, args=[1000], name='uploader').start()\nwatch.start()",
        "waits for its thread uploader, which is no daemon, at "),
    "an exit handler": ("atexit.register(time.sleep, 1000)\nwatch.start()", "runs its exit handlers, for 1 s"),
    "an exit handler at work": ("atexit.register(work, 1000)\nwatch.start()", "runs its exit handlers, at <string>:"),
    "the engine's shutdown at work": ("watch.start()\nwith limits.ending(): work(1000)", "is at <string>:"),
}  # fmt: skip
LEFT_ALONE = {
    "a line at work": "watch.start()\nwork(3)",
    "a thread at work": "watch.start()\nthreading.Thread(target=work, args=[3]).start()",
    "a child process": "watch.start()\nsubprocess.run([sys.executable, '-S', '-c', 'for i in range(10**7): pass'])",
    "heartbeats": "watch.start()\nfor _ in range(30): time.sleep(0.1); limits.heartbeat()",
    "another training": "watch.start()\nlimits.stop()\ntime.sleep(3)",
    "a shutdown": "watch.start()\nwith limits.ending(): work(0.5)\nwork(3)",
    "for others": "watch.start()\nwith limits.ending(suspended=True): time.sleep(3)",
    "a person": "sys.ps1 = '>>> '\nlimits.Leaving('a person', 1.0).start()\ntime.sleep(3)",
}


@pytest.fixture(scope="module")
def ends(tmp_path_factory):
    programs = {name: WATCH.format(1.0) + body for name, (body, _) in ENDED.items()}
    programs |= {name: WATCH.format(1.5) + body for name, body in LEFT_ALONE.items()}
    return ends_of(BEGIN, programs, tmp_path_factory.mktemp("ends"))


@pytest.mark.parametrize("name", ENDED)
def test_it_is_ended_and_says_where(name, ends):
    done = ends[name]
    assert (done.code, done.out) == (1, "kept"), done
    assert f"hvdtrain: error: rank 1 on b does not end after training: it {ENDED[name][1]}" in done.err
    assert ", for 1 s without work\n" in done.err


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_who_works_on_is_left_alone(name, ends):
    assert ends[name] == (0, "kept", "")


def test_a_request_to_stop_ends_the_start_until_the_watch_hears_it(tmp_path):
    body = "import os, signal\nwith limits.limited_start(limits.HangTimeouts()):\n    {}"
    asks = "os.kill(os.getpid(), signal.SIGUSR1); time.sleep(60)"
    programs = {"start": body.format(asks), "watch": body.format(f"limits.stop(); {asks}"), "none": body.format("pass")}
    ends = {name: (done.code, done.err) for name, done in ends_of(BEGIN, programs, tmp_path).items()}
    assert ends.pop("start") == (75, "hvdtrain: SIGUSR1 before training: nothing to save\n")
    assert ends == {"watch": (-signal.SIGUSR1, ""), "none": (0, "")}


@pytest.fixture
def fast(monkeypatch):
    monkeypatch.setattr(limits, "LIMIT_CHECK_SECONDS", 0.01)
    monkeypatch.setattr(limits, "WAITING_LINE_SECONDS", 0.03)
    monkeypatch.setitem(judge.PHASE_SECONDS, "start-up", 0.1)


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
