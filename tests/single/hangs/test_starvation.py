"""What the watchdog sees of its process's threads, and what it makes of a kernel that tells less."""

import threading
import time

from hvdtrain.hangs.starvation import other_threads


def test_a_thread_that_runs_is_seen_to_run():
    done = threading.Event()
    thread = threading.Thread(target=lambda: [None for _ in iter(done.is_set, True)])
    thread.start()
    try:
        before = after = other_threads()[thread.native_id]
        until = time.monotonic() + 30  # on a busy core it takes a while to get a turn
        while after.cpu_seconds == before.cpu_seconds and time.monotonic() < until:
            time.sleep(0.05)
            after = other_threads()[thread.native_id]
    finally:
        done.set()
        thread.join()
    assert after.cpu_seconds > before.cpu_seconds
    assert threading.get_native_id() not in other_threads()


def test_a_kernel_that_does_not_count_turns_tells_nothing(tmp_path):
    for number, counts in ((1, "0 0 0"), (2, ""), (3, None), (4, "5000000000 0 7")):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "stat").write_text(f"{number} (a) b) R 1 1")
        if counts is not None:
            (tmp_path / str(number) / "schedstat").write_text(counts)
    assert other_threads(tmp_path) == {4: (True, 5.0, 7)}
    assert other_threads(tmp_path / "no proc") == {}
