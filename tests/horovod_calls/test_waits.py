"""Ranks and threads that wait for each other: late, early, out of order, joined, several at once."""

import ctypes
import os
import signal
import threading
import time

import pytest
import torch

PATIENCE = 60.0  # seconds that a thread is waited for, before the test says that it hangs


def ones(n: int = 4) -> torch.Tensor:
    return torch.ones(n)


def test_poll_says_whether_synchronize_would_wait(hvd):
    if hvd.rank() != 0:
        handle = hvd.allreduce_async(ones(), op=hvd.Sum, name="polled")
        assert not hvd.poll(handle)  # rank 0 has not queued its own
    hvd.barrier()
    if hvd.rank() == 0:
        handle = hvd.allreduce_async(ones(), op=hvd.Sum, name="polled")
    until = time.monotonic() + PATIENCE
    while not hvd.poll(handle):
        assert time.monotonic() < until
        time.sleep(0.001)
    assert hvd.synchronize(handle).tolist() == [hvd.size()] * 4
    with pytest.raises(ValueError, match="was not created or has been cleared"):
        hvd.poll(handle)


# Both are more than the background thread sleeps without work.
@pytest.mark.parametrize(("late", "seconds"), [("first", 1.3), ("last", 0.2)])
def test_a_rank_that_is_late(hvd, late, seconds):
    if hvd.rank() == (0 if late == "first" else hvd.size() - 1):
        time.sleep(seconds)
    assert hvd.allreduce(ones(), op=hvd.Sum, name="late").tolist() == [hvd.size()] * 4


def test_another_order_on_each_rank(hvd):
    names = [f"order.{number}" for number in range(8)]
    for _ in range(3):
        own = names[hvd.rank() :] + names[: hvd.rank()]
        handles = {name: hvd.allreduce_async(ones() * int(name[-1]), op=hvd.Sum, name=name) for name in own}
        for name in names:
            assert hvd.synchronize(handles[name]).tolist() == [hvd.size() * int(name[-1])] * 4


def test_three_threads_at_once(hvd):
    """Each has its own names; which thread comes first differs by rank and turn."""
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for turn in range(30):
                if (turn + hvd.rank()) % 3 == number:
                    time.sleep(0.002)
                got = hvd.allreduce(ones() * number, op=hvd.Sum, name=f"thread.{number}.{turn % 4}")
                assert got.tolist() == [number * hvd.size()] * 4
                rows = hvd.allgather(ones(hvd.rank() + number + 1), name=f"rows.{number}")
                assert len(rows) == sum(rank + number + 1 for rank in range(hvd.size()))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert not failures
    assert not any(thread.is_alive() for thread in threads)


def test_a_forked_child_ends_although_a_thread_of_its_parent_waited(hvd):
    """As it leaves, the child runs the destructors of what the parent's thread waits for: it does not have that thread."""
    if not hvd.mpi_enabled():
        pytest.skip("the destructors of Gloo's own connections never end in a forked child, in the release neither")
    if hvd.rank() == 0:
        handle = hvd.allreduce_async(ones(), op=hvd.Sum, name="after the child")
        got: list[torch.Tensor] = []
        waiting = threading.Thread(target=lambda: got.append(hvd.synchronize(handle)), daemon=True)
        waiting.start()
        time.sleep(0.2)
        child = os.fork()
        if child == 0:
            ctypes.CDLL(None).exit(0)  # the end of a program, without pytest's own
        until = time.monotonic() + PATIENCE
        while (ended := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < until:
            time.sleep(0.01)
        if ended[0] == 0:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        assert ended == (child, 0)
    hvd.broadcast(ones(), 0, name="the child has ended")
    if hvd.rank() == 0:
        waiting.join(PATIENCE)
        assert [tensor.tolist() for tensor in got] == [[hvd.size()] * 4]
    else:
        assert hvd.allreduce(ones(), op=hvd.Sum, name="after the child").tolist() == [hvd.size()] * 4


@pytest.mark.parametrize("last", ["last", "first"])
def test_ranks_join_after_different_numbers_of_steps(hvd, last):
    place = hvd.rank() if last == "last" else hvd.size() - 1 - hvd.rank()
    for step in range(2 + 3 * place):
        present = sum(2 + 3 * other > step for other in range(hvd.size()))  # who has joined counts as zeros
        handles = [hvd.allreduce_async(ones() * i, op=hvd.Sum, name=f"uneven.{step % 2}.{i}") for i in range(1, 6)]
        for i, handle in enumerate(handles, start=1):
            assert hvd.synchronize(handle).tolist() == [present * i] * 4
    assert hvd.join() == (hvd.size() - 1 if last == "last" else 0)
    # Named: unnamed tensors are numbered by what each rank has queued so far, which now differs, and would be waited for
    # for ever.
    assert hvd.allreduce(ones(), op=hvd.Sum, name="after join").tolist() == [hvd.size()] * 4
