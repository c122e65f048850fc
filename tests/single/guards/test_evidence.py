"""Who is at work, and who only waits; what the monitor sees of its threads, also of a kernel that tells less."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from hvdtrain.guards import evidence
from hvdtrain.guards.evidence import Work
from hvdtrain.launching import processes
from hvdtrain.launching.processes import Stat, Turns, turns


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


# ---- threads of this process


def test_a_thread_that_runs_is_seen_to_run():
    done = threading.Event()
    thread = threading.Thread(target=lambda: [None for _ in iter(done.is_set, True)])
    thread.start()
    try:
        before = after = turns(thread.native_id)
        until = time.monotonic() + 30  # on a busy core it takes a while to get a turn
        while after.cpu_seconds == before.cpu_seconds and time.monotonic() < until:
            time.sleep(0.05)
            after = turns(thread.native_id)
    finally:
        done.set()
        thread.join()
    assert after.cpu_seconds > before.cpu_seconds


@pytest.mark.parametrize(
    ("state", "ran", "slices", "starved"),
    [
        ("R", 0.5, 3, 1.5),
        ("R", 0.0, 39, 2.0),
        ("R", 0.0, 40, 0.0),  # a busy-wait loop that yields
        ("S", 0.0, 1, 0.0),
        ("R", 0.0, None, 0.0),  # a kernel that does not count them
    ],
)
def test_who_is_ready_and_gets_few_turns_is_starved(monkeypatch, state, ran, slices, starved):
    now, threads = [100.0], {7: Turns(1.0, 0.0, 10 if slices is not None else 0)}
    monkeypatch.setattr(evidence.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(evidence.processes, "own_threads", lambda: [7, 8, threading.get_native_id()])
    monkeypatch.setattr(evidence.processes, "turns", threads.get)
    monkeypatch.setattr(evidence.processes, "stat", lambda which: Stat(state, 1, 0.0, 0))
    mine = evidence.Starvation()
    assert mine.seconds() == 0.0
    now[0] += 2.0
    threads[7] = Turns(1.0 + ran, 0.0, 10 + slices if slices is not None else 0)
    assert mine.seconds() == starved
    mine.reset()
    assert mine.seconds() == 0.0


def test_a_kernel_that_does_not_count_turns_tells_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(evidence.processes, "PROC", tmp_path)
    for number, counts in ((1, "0 0"), (2, ""), (3, None), (4, "5000000000 1000000000 7")):
        (tmp_path / "self/task" / str(number)).mkdir(parents=True)
        if counts is not None:
            (tmp_path / "self/task" / str(number) / "schedstat").write_text(counts)
    assert [turns(number) for number in (1, 2, 3, 4, 5)] == [None, None, None, (5.0, 1.0, 7), None]
