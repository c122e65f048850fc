"""Who is at work, and who only waits."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from hvdtrain.hangs.work import Work


def seen_within(work: Work, seconds: float) -> bool:
    """Whether work is seen at any of several looks by a daemon, as a monitor takes them: looking is no work."""
    found = []

    def look() -> None:
        work.seen()
        until = time.monotonic() + seconds
        while not found and time.monotonic() < until:
            time.sleep(0.2)
            found.extend([True] * work.seen())

    looking = threading.Thread(target=look, daemon=True)
    looking.start()
    looking.join()
    return bool(found)


def spin(over: threading.Event) -> None:
    while not over.is_set():
        sum(range(1000))


def write(over: threading.Event) -> None:
    with Path("/dev/null").open("wb", buffering=0) as file:
        while not over.wait(0.05):
            file.write(b"x")


@pytest.mark.parametrize(("what", "daemon", "sees"), [(spin, False, True), (spin, True, False), (write, False, True)])
def test_the_programs_threads_work_and_its_daemons_do_not(what, daemon, sees):
    over = threading.Event()
    thread = threading.Thread(target=what, args=[over], daemon=daemon)
    thread.start()
    try:
        assert seen_within(Work(), 20.0 if sees else 1.0) == sees
    finally:
        over.set()
        thread.join()


@pytest.mark.parametrize(("body", "sees"), [("while True: pass", True), ("import time; time.sleep(600)", False)])
def test_so_do_child_processes_of_child_processes(body, sees):
    inner = [sys.executable, "-S", "-c", f"print(flush=True)\n{body}"]
    outer = [sys.executable, "-S", "-c", f"import subprocess; subprocess.run({inner!r})"]
    with subprocess.Popen(outer, start_new_session=True, stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == b"\n"  # both have started
            assert seen_within(Work(), 20.0 if sees else 1.0) == sees
        finally:
            os.killpg(child.pid, signal.SIGKILL)
