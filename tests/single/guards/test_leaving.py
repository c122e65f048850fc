"""A process that does not come to its end after training: real ones, with a limit of a second."""

import subprocess
import sys
import textwrap

import pytest

BEGIN = """
import atexit, subprocess, sys, threading, time
from hvdtrain.guards import leaving
leaving.LOOK_SECONDS = 0.1
watch = leaving.Leaving("rank 1 on b", LIMIT)

def work(seconds):  # at a fifth of a core: a twentieth counts as work
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        sum(range(500_000))
        time.sleep(0.04)

"""


def run(body: str, limit: float) -> subprocess.CompletedProcess[str]:
    script = BEGIN.replace("LIMIT", str(limit)) + textwrap.dedent(body)
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(
    ("body", "does"),
    [
        ("watch.start()\ntime.sleep(1000)", "is at <string>:"),
        (
            "threading.Thread(target=time.sleep, args=[1000], name='uploader').start()\nwatch.start()",
            "waits for its thread uploader, which is no daemon, at ",
        ),
        ("atexit.register(time.sleep, 1000)\nwatch.start()", "runs its exit handlers, for 1 s"),
        ("atexit.register(work, 1000)\nwatch.start()", "runs its exit handlers, at <string>:"),
        ("watch.start()\nwith leaving.ending(): work(1000)", "is at <string>:"),
    ],
    ids=["a line", "a thread", "an exit handler", "an exit handler at work", "the engine's shutdown at work"],
)
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
        "watch.start()\nfor _ in range(30): time.sleep(0.1); leaving.heartbeat()",
        "watch.start()\nleaving.stop()\ntime.sleep(3)",
        "watch.start()\nwith leaving.ending(): work(0.5)\nwork(3)",
        "watch.start()\nwith leaving.ending(suspended=True): time.sleep(3)",
        "sys.ps1 = '>>> '\nleaving.Leaving('a person', 1.0).start()\ntime.sleep(3)",
    ],
    ids=[
        "a line",
        "a thread",
        "a child process",
        "heartbeats",
        "another training",
        "a shutdown",
        "for others",
        "a person",
    ],
)
def test_who_works_on_is_left_alone(body):
    done = run(body, 1.5)
    assert (done.returncode, done.stderr) == (0, ""), done
