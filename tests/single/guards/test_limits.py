"""A start that does not come to an end; and a process that does not come to its end after training: real ones."""

import subprocess
import sys
import textwrap
import threading
import time

import pytest

from hvdtrain.guards import judge, limits
from hvdtrain.guards.activity import Activity
from hvdtrain.guards.judge import HangTimeouts
from hvdtrain.guards.limits import limited_start

BEGIN = """
import atexit, subprocess, sys, threading, time
from hvdtrain.guards import limits
limits.LIMIT_CHECK_SECONDS = 0.1
watch = limits.Leaving("rank 1 on b", PATIENCE)

def work(seconds):  # at a fifth of a core: a twentieth counts as work
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        sum(range(500_000))
        time.sleep(0.04)

"""


def run(body: str, limit: float) -> subprocess.CompletedProcess[str]:
    script = BEGIN.replace("PATIENCE", str(limit)) + textwrap.dedent(body)
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(
    ("body", "does"),
    [
        ("watch.start()\ntime.sleep(1000)", "is at <string>:"),
        ("threading.Thread(target=time.sleep, args=[1000], name='uploader').start()\nwatch.start()",
            "waits for its thread uploader, which is no daemon, at "),
        ("atexit.register(time.sleep, 1000)\nwatch.start()", "runs its exit handlers, for 1 s"),
        ("atexit.register(work, 1000)\nwatch.start()", "runs its exit handlers, at <string>:"),
        ("watch.start()\nwith limits.ending(): work(1000)", "is at <string>:"),
    ],
    ids=["a line", "a thread", "an exit handler", "an exit handler at work", "the engine's shutdown at work"],
)  # fmt: skip
def test_it_is_ended_and_says_where(body, does):
    done = run("print('kept', end='')\n" + body, 1.0)
    assert done.returncode == 1, done
    assert f"hvdtrain: error: rank 1 on b does not end after training: it {does}" in done.stderr
    assert ", for 1 s without work\n" in done.stderr
    assert done.stdout == "kept"


@pytest.mark.parametrize(
    "body",
    [
        "watch.start()\nwork(3)",
        "watch.start()\nthreading.Thread(target=work, args=[3]).start()",
        "watch.start()\nsubprocess.run([sys.executable, '-S', '-c', 'for i in range(10**7): pass'])",
        "watch.start()\nfor _ in range(30): time.sleep(0.1); limits.heartbeat()",
        "watch.start()\nlimits.stop()\ntime.sleep(3)",
        "watch.start()\nwith limits.ending(): work(0.5)\nwork(3)",
        "watch.start()\nwith limits.ending(suspended=True): time.sleep(3)",
        "sys.ps1 = '>>> '\nlimits.Leaving('a person', 1.0).start()\ntime.sleep(3)",
    ],
    ids=[
        "a line", "a thread", "a child process", "heartbeats", "another training", "a shutdown", "for others",
        "a person",
    ],
)  # fmt: skip
def test_who_works_on_is_left_alone(body):
    done = run(body, 1.5)
    assert (done.returncode, done.stderr) == (0, ""), done


# ---- the start


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
