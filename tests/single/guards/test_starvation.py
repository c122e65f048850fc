"""What the monitor sees of its process's threads, and what it makes of a kernel that tells less."""

import threading
import time

import pytest

from hvdtrain.guards import evidence
from hvdtrain.launching.processes import Stat, Turns, turns


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
