"""The watches of many ranks in one process: real connections, no engine, no torch. Who leaves ends its thread."""

import contextlib
import errno
import os
import signal
import socket
import struct
import subprocess
import threading
import time
from pathlib import Path
from typing import NoReturn

import pytest

from hvdtrain.engines.files import allow_open_files
from hvdtrain.guards.activity import Activity
from hvdtrain.guards.connection import Channel, Peer, Peers, accept, listen_for_ranks, say_hello
from hvdtrain.guards.judge import HangTimeouts
from hvdtrain.guards.watch import Watch, WatchSettings
from hvdtrain.launching import processes
from hvdtrain.launching.exit_codes import stop_requests
from tests.single.unwritable import full_pipe
from tests.waiting import wait_for

FAST = dict(look=0.1, reply=1.0, grace=0.5, begin=0.3)
NOBODY = 2**22 + 1  # no process has this number


class Left(BaseException):
    """What a rank raises in place of ending its process."""


class Rank(Watch):
    """A rank without a process: what it would exit with stands in `code`."""

    def __init__(self, rank: int, size: int, channels, step_timeout: float = 0.5, timing: dict = FAST):
        self.code: int | None = None
        self.deaf = False  # its thread hears nothing
        self.said: list[str] = []
        peers = [Peer(f"h{other // 8}", "here", NOBODY) for other in range(size)]
        limits = HangTimeouts(step_timeout)
        settings = WatchSettings(limits, self.said.append, self.said.append, guest=True, leave=self._leave, **timing)
        super().__init__(Peers(rank, peers, channels), None, Activity(), settings)
        self.detector.starvation.seconds = lambda: 0.0  # all ranks' threads are this process's

    def _run(self) -> None:
        with contextlib.suppress(Left):
            super()._run()

    def _receive(self, rank: int, channel: Channel) -> None:
        if self.deaf:
            time.sleep(0.1)
        else:
            super()._receive(rank, channel)

    def _look(self) -> None:
        if not self.deaf:
            super()._look()

    def _leave(self, code: int) -> None:
        self.code = code
        for channel in self.peers.channels.values():
            channel.socket.close()
        raise Left

    def train(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.activity.begin_step(self.activity.step)
            self.activity.finish_step(self.activity.step + 1)


class Job:
    """Ranks that are connected as real ones are."""

    def __init__(self, size: int, steps: int = 0, **options):
        listeners, where = listen_for_ranks(["h0"] * size)
        got: dict[int, Channel] = {}
        hub = threading.Thread(target=lambda: got.update(accept(listeners, bytes(32), size)))
        hub.start()
        mine = {rank: {0: say_hello(where["h0"], bytes(32), rank)} for rank in range(1, size)}
        hub.join()
        for listener in listeners:
            listener.close()
        self.ranks = [Rank(rank, size, mine.get(rank, got), **options) for rank in range(size)]
        for rank in self.ranks:
            rank.start()
            rank.train(steps)

    def wait_until(self, what, seconds: float = 20.0) -> None:
        wait_for(what, lambda: [(rank.code, rank.said, rank.activity.phase) for rank in self.ranks[:4]], seconds)

    def ended(self) -> bool:
        return all(rank.code is not None for rank in self.ranks)

    def close(self) -> None:
        closing = [threading.Thread(target=rank.close) for rank in reversed(self.ranks)]
        for each in closing:
            each.start()
        for each in closing:
            each.join(20)


@pytest.fixture
def job():
    made: list[Job] = []

    def make(size: int, **options) -> Job:
        made.append(Job(size, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def wait_in(ranks, name: str = "gradients") -> None:
    for rank in ranks:
        rank.activity.collective = name


def test_the_rank_that_keeps_the_others_waiting_is_named_and_all_end(job, capfd):
    some = job(4, steps=1)
    wait_in(some.ranks[:2] + some.ranks[3:])
    some.wait_until(some.ended)
    assert {rank.code for rank in some.ranks} == {1}
    assert some.ranks[0].said[0].startswith("rank 2 on h0 keeps the others waiting, at ")
    assert "after step 1" in some.ranks[0].said[0]
    assert "rank 2 on h0: step 1, stands at" in capfd.readouterr().err


@pytest.mark.parametrize(("deaf", "launcher"), [(0, "torchrun"), (1, "torchrun"), (1, "mpirun")])
def test_torchrun_need_not_wait_for_a_rank_that_does_not_answer(deaf, launcher, job):
    """It would send SIGTERM, which that rank cannot obey, and wait for half a minute."""
    some = job(3)
    me = processes.Process(os.getpid(), processes.stat(os.getpid()).started, launcher)
    process = subprocess.Popen(["sleep", "600"])
    try:
        for rank in some.ranks:
            rank.train()
            rank.launchers = [me]
            rank.peers.all[deaf] = Peer("h0", "here", process.pid)
        wait_in(some.ranks)
        some.ranks[deaf].deaf = True
        some.wait_until(lambda: some.ranks[2].code == some.ranks[1 - deaf].code == 1)
        if launcher == "torchrun":
            assert process.wait(timeout=60) == -signal.SIGKILL  # the signal was sent; the kernel may take a moment
        else:
            assert process.poll() is None
    finally:
        process.kill()
        process.wait()


def test_rank_0_does_not_answer(job, capfd):
    some = job(3, steps=1)
    wait_in(some.ranks)
    some.ranks[0].deaf = True
    some.wait_until(lambda: some.ranks[1].code == some.ranks[2].code == 1)
    said = capfd.readouterr().err
    assert "hvdtrain: error: rank 0 on h0 does not answer (stopped, spinning outside Python, or cut off)" in said
    assert "rank 1 on h0: step 1, waits at" in said


def test_all_ranks_save_after_the_same_step(job):
    """Rank 0 says which, two steps ahead; here it is far ahead of the others otherwise, as long as nothing is announced."""
    some = job(5, step_timeout=60.0)
    hub, *others = some.ranks
    for step in (3, 7, 8):
        assert [rank.save.step for rank in some.ranks] == [None] * 5
        hub.save.make(step)
        hub.save.wait()
        assert [rank.save.step for rank in some.ranks] == [step] * 5
        for rank in [*others, hub]:
            rank.save.step = None


def test_a_rank_that_never_learns_when_to_save_is_named(job):
    some = job(3, steps=1)
    wait_in(some.ranks)
    some.ranks[1].deaf = True
    some.ranks[0].save.make(3)
    threading.Thread(target=some.ranks[0].save.wait, daemon=True).start()
    some.wait_until(lambda: some.ranks[0].code == 1)
    assert some.ranks[0].said[0].startswith("rank 1 on h0 does not answer")


@pytest.mark.parametrize("blocked", ["standard error", "metrics.jsonl", "source"])
def test_no_file_keeps_a_hung_job_from_ending(blocked, job, monkeypatch, tmp_path):
    """A paused pager; a file system that hangs."""
    reader, writer = full_pipe()
    some = job(3)
    if blocked == "standard error":
        monkeypatch.setattr("sys.stderr", os.fdopen(writer, "w", buffering=1, closefd=False))
    elif blocked == "metrics.jsonl":
        some.ranks[0].failed = lambda headline: os.write(writer, b"x")
    for rank in some.ranks:
        rank.train()
    wait_in(some.ranks[:2])
    source = tmp_path / "source.py"
    os.mkfifo(source)
    try:
        exec(compile("some.wait_until(some.ended)", source if blocked == "source" else "<none>", "exec"))
    finally:
        os.close(os.open(source, os.O_RDWR))  # who waits for it goes on
        source.unlink()
    assert {rank.code for rank in some.ranks} == {1}
    os.close(reader)  # what still waits for it fails
    os.close(writer)


def test_a_rank_that_hangs_when_all_others_have_left_ends(job, capfd, monkeypatch):
    monkeypatch.setattr("hvdtrain.guards.limits.others", list)  # threads of earlier tests
    some = job(2, step_timeout=0.1, steps=1)
    some.ranks[1].activity.update()
    some.ranks[0].close()
    some.wait_until(lambda: some.ranks[1].leaving is not None)
    leaving = some.ranks[1].leaving
    leaving._work.seen = lambda: False  # this process is at work
    some.wait_until(lambda: some.ranks[1].code == 1)
    assert "rank 1 on h0 does not end after training: it is at " in capfd.readouterr().err


def test_a_single_rank_may_serve_its_model_after_training(job):
    assert [rank.make_leaving().limit for rank in (*job(1).ranks, *job(2).ranks)] == [float("inf"), 5.0, 5.0]


@pytest.mark.parametrize(
    ("place", "process", "reset", "said"),
    [
        ("here", NOBODY, True, "died: its connection closed unexpectedly"),
        ("here", os.getpid(), True, "is cut off: its connection was lost, but its process runs"),
        ("there", NOBODY, False, "died: its connection closed unexpectedly"),
        ("there", NOBODY, True, "died or is cut off: its connection was lost ([Errno 104] Connection reset by peer)"),
    ],
    # Without the pid, which differs between workers of xdist.
    ids=["ended", "runs", "on another host", "reset from another host"],
)
def test_who_is_said_to_have_died(place, process, reset, said, job):
    some = job(2, step_timeout=60.0)
    some.ranks[0].peers.all[1] = Peer("h0", place, process)
    connection = some.ranks[1].peers.channels[0].socket
    some.ranks[1]._closing = True
    if reset:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        some.ranks[1].signals.wake()
        some.ranks[1]._thread.join()
        connection.close()
    else:
        connection.shutdown(socket.SHUT_RDWR)
    some.wait_until(lambda: some.ranks[0].code == 1)
    assert some.ranks[0].said == [f"rank 1 on h0 {said}"]


def test_an_error_is_said_without_its_control_characters(job):
    """It may name what a file has: escape codes would go to the terminal."""
    some = job(2, step_timeout=60.0)
    some.ranks[1].peers.channels[0].send("fail", "KeyError: 'a\x1b]0;title\x07\n'", False)
    some.wait_until(lambda: some.ranks[0].code == 1)
    assert some.ranks[0].said == [r"rank 1 on h0 failed: KeyError: 'a\x1b]0;title\x07 '"]


def test_no_error_ends_the_thread_and_a_signal_is_heard_after_it(job, monkeypatch, capfd):
    some = job(2, step_timeout=60.0)
    one = some.ranks[1]
    for rank in some.ranks:
        rank.train()
    monkeypatch.setattr(one, "_miss_launcher", lambda: {}[0])
    some.ranks[0].peers.channels[1].socket.sendall(b"no message\n")
    time.sleep(0.5)
    one.signals.wake(signal.SIGTERM)
    some.wait_until(lambda: some.ranks[0].stop_reason)
    assert some.ranks[0].stop_reason == "SIGTERM on rank 1 (h0)"
    assert one._thread.is_alive()
    said = capfd.readouterr().err
    assert 1 <= said.count("warning: the watchdog of rank 1 on h0 continues after an internal error:") <= 3


@pytest.mark.parametrize(("how", "code"), [("left", 143), ("died", 1)])
def test_a_stop_signal_after_the_connection_to_rank_0_has_closed(job, how, code):
    """It was a KeyError, after which the rank was deaf to signals and to the watchdog."""
    some = job(2, step_timeout=60.0, steps=1)
    if how == "left":
        some.ranks[0].close()
    else:
        some.ranks[0].peers.channels[1].socket.shutdown(socket.SHUT_RDWR)
    some.wait_until(lambda: 0 not in some.ranks[1].peers.channels)
    some.ranks[1].signals.wake(signal.SIGTERM)
    some.wait_until(lambda: some.ranks[1].code is not None)
    assert some.ranks[1].code == code


def lose_selector(rank: Rank, *, reused: bool = True) -> None:
    """As os.closerange(3, 256) does. reused: another file has its number. In this process, others would get a free one."""
    if not reused:

        def select(seconds: float) -> NoReturn:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))

        rank._selector.select = select
        return
    with Path(os.devnull).open() as other:
        os.dup2(other.fileno(), rank._selector.fileno())


@pytest.mark.parametrize("reused", [True, False])
def test_a_program_that_closes_every_file_ends_in_one_line(reused, job, capfd):
    """The thread asked the closed selector without a pause, and the rank hung at its end."""
    rank = job(2).ranks[1]
    lose_selector(rank, reused=reused)
    wait_for(lambda: rank.code is not None, "it to leave")
    rank._closing = True
    assert rank.code == 1
    assert "rank 1 on h0: the program has closed files that it did not open" in (said := capfd.readouterr().err)
    assert "Traceback" not in said


def test_a_program_that_closes_every_file_just_before_its_end_ends_in_one_line(job, capfd):
    rank = job(1, timing=FAST | dict(look=5.0)).ranks[0]  # its thread does not look before the end
    lose_selector(rank)
    with pytest.raises(Left):
        rank.close()
    assert rank.code == 1
    assert "the program has closed files that it did not open" in capfd.readouterr().err


def test_a_stop_is_known_to_all_ranks_and_obeyed_at_one_step(job):
    some = job(3, step_timeout=60.0, steps=1)
    some.ranks[2].signals.wake(signal.SIGUSR1)
    some.wait_until(lambda: all(rank.stop_reason for rank in some.ranks))
    some.ranks[0].stop.make(2)
    some.ranks[0].stop.wait()
    assert [rank.stop.step for rank in some.ranks] == [2, 2, 2]
    assert {rank.stop_reason for rank in some.ranks} == {"SIGUSR1 on rank 2 (h0)"}
    time.sleep(1)
    assert [rank.code for rank in some.ranks] == [None] * 3  # when to leave is then the main threads' matter
    some.ranks[1].close()
    assert stop_requests.pop() == "SIGUSR1 on rank 2 (h0)"  # for the exit, where another Ctrl-C is no traceback


@pytest.mark.parametrize("begun", [False, True])
def test_a_stop_before_the_first_step_is_over_ends_all_with_75(job, begun):
    some = job(3, timing=FAST | dict(look=0.05))
    for rank in some.ranks * begun:
        rank.activity.begin_step(0)
    some.ranks[1].signals.wake(signal.SIGTERM)
    some.wait_until(some.ended)
    assert {rank.code for rank in some.ranks} == {75}
    assert some.ranks[0].said == ["SIGTERM on rank 1 (h0)"]


def test_a_second_interrupt_leaves_at_once(job):
    some = job(2)
    for _ in range(2):
        some.ranks[1].signals.wake(signal.SIGINT)
    some.wait_until(lambda: some.ranks[1].code is not None)
    assert some.ranks[1].code == 130


def test_the_end_of_the_launcher_is_a_request_to_stop(job):
    some = job(2, step_timeout=60.0, steps=1)
    reader, writer = os.pipe()
    launcher = os.fork()
    if launcher == 0:
        os.close(writer)
        os.read(reader, 1)
        os._exit(0)
    started = processes.stat(launcher).started
    some.ranks[1].launchers = [processes.Process(os.getpid(), processes.stat(os.getpid()).started, "self")]
    some.ranks[1].launchers += [processes.Process(launcher, started, "torchrun")]
    time.sleep(0.5)
    assert some.ranks[0].stop_reason is None
    os.close(writer)  # it ends, and is a zombie until it is waited for
    some.wait_until(lambda: all(rank.stop_reason for rank in some.ranks))
    os.waitpid(launcher, 0)
    os.close(reader)
    assert some.ranks[0].stop_reason == f"the end of torchrun (pid {launcher}), which started rank 1 (h0)"


@pytest.mark.parametrize("size", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_hundreds_of_ranks_connect_train_and_are_judged(size, job):
    """All connect, train, are asked once in vain, train on, and are judged: one hangs, one stands in a long phase."""
    allow_open_files(6 * size + 800)  # both ends of each connection, and what wakes each thread
    some = job(size, step_timeout=2.0, timing=dict(look=1.0, reply=60.0, grace=3.0))  # of one process, with one GIL
    hangs, reads = size // 2, size - 1
    with contextlib.closing(some):  # before pytest looks at a failure, which a thousand threads would not let it do
        began = time.monotonic()
        while time.monotonic() - began < 1.5:
            for rank in some.ranks:
                rank.train()
            time.sleep(0.1)
        assert not some.ranks[0].said
        steps = some.ranks[0].activity.step
        wait_in(some.ranks[:hangs] + some.ranks[hangs + 1 : reads])
        with some.ranks[reads].activity.during("reading data"):
            some.wait_until(some.ended, 240)
        (said,) = some.ranks[0].said
        assert said.startswith(f"rank {hangs} on h{hangs // 8} keeps the others waiting, at ")
        assert f"after step {steps}" in said
        assert {rank.code for rank in some.ranks} == {1}
