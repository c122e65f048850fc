"""Who is at work, and who only waits."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from hvdtrain.guards.evidence import Work
from hvdtrain.launching import processes


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


def test_a_call_that_writes_for_long_is_work_before_it_ends(monkeypatch, tmp_path):
    """The kernel counts what a call wrote at its end, and what goes to the disk meanwhile. fsync counts nothing."""
    (tmp_path / "self").mkdir()
    counts = dict(zip(["rchar", "wchar", "syscr", "syscw", "read_bytes", "write_bytes"], range(1, 7), strict=True))
    monkeypatch.setattr(processes, "PROC", tmp_path)
    (tmp_path / "self" / "io").write_text("".join(f"{name}: {count}\n" for name, count in counts.items()))
    assert processes.bytes_transferred("self") == 1 + 2 + 5 + 6
    assert processes.bytes_transferred("gone") == 0
    for state in "SD":
        monkeypatch.setattr(processes, "stat", lambda *_, state=state: processes.Stat(state, 1, 0.0, 0))
        work = Work()
        assert work.seen() == (state == "D")
