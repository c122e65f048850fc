"""How long ranks may keep others waiting, and what a rank says of itself. Without a clock: the test says how time passes."""

import contextlib
import os
from collections.abc import Collection

import pytest

from hvdtrain.guards import detector
from hvdtrain.guards.activity import UNREAD, Activity
from hvdtrain.guards.connection import Peer, Peers
from hvdtrain.guards.detector import ASK_SECONDS, Detector
from hvdtrain.guards.judge import HangTimeouts
from tests.single.unwritable import full_pipe


class Known(Peers):
    """Ranks of which it is known which are stopped by a signal."""

    def __init__(self, me: int, size: int, stopped: Collection[int]):
        super().__init__(me, [Peer("here", "here", 0)] * size, {})
        self.stopped = stopped

    def name(self, rank: int) -> str:
        return f"rank {rank}"

    def is_stopped(self, rank: int) -> bool:
        return rank in self.stopped


class Job:
    """Ranks without threads and connections: `run` looks once a second, and hands over what they ask and answer.

    deaf: ranks that do not answer, and do not look either. All have finished their first step, whose limit is 30 s.
    """

    def __init__(
        self, size: int, deaf: Collection[int] = (), stopped: Collection[int] = (), guest: bool = False,
        timeouts: HangTimeouts = HangTimeouts(30.0),  # noqa: B008 # immutable
    ):  # fmt: skip
        self.deaf, self.ended, self.now = deaf, [], 0.0
        self.phases = contextlib.ExitStack()
        self.activities = [Activity() for _ in range(size)]
        self.detectors = [
            Detector(Known(rank, size, stopped), activity, timeouts, 3.0, guest)
            for rank, activity in enumerate(self.activities)
        ]
        for each in self.detectors:
            each.starvation.seconds = lambda: 0.0
            each.work.seen = lambda: True
        for activity in self.activities:
            activity.begin_step(0)
            activity.finish_step(1)
        self.run(1)

    def _ask(self, asker: int) -> None:
        others = range(len(self.detectors)) if asker == 0 else [0]
        for rank in set(others) - {asker, *self.deaf}:
            self.detectors[asker].reports[rank] = self.detectors[rank].report()

    def run(self, seconds: int) -> None:
        for _ in range(seconds):
            if not self.ended:
                self.now += 1.0
                for rank, each in enumerate(self.detectors):
                    if rank not in self.deaf:
                        seen = each.look(self.now, 1.0, connected=True)
                        if seen.ask:
                            self._ask(rank)
                        if seen.end is not None:
                            self.ended.append((rank, seen.end, self.now))

    def wait(self, ranks: Collection[int]) -> None:
        for rank in ranks:
            self.activities[rank].collective = "gradients"


def in_phase(name: str, seconds: float | None = None):
    def enter(job: Job) -> None:
        job.phases.enter_context(job.activities[1].during(name, seconds))

    return enter


def works(*pattern: bool):
    """Whether rank 1 is seen at work, second by second; the last one stays."""

    def enter(job: Job) -> None:
        left = list(pattern)
        job.detectors[1].work.seen = lambda: left.pop(0) if len(left) > 1 else left[0]

    return enter


def calls(method: str):
    return lambda job: getattr(job.activities[1], method)()


ASKED, AUTO = HangTimeouts(30.0), HangTimeouts(None, patient=True)
ANNOUNCE = " (if it was at work: announce that by `with run.alone():`)"
# By name: whether it is a script; its limits; what rank 1 does while rank 0 waits for it; the seconds after which the job
# ends; what the user can do.
LATE = {
    "a step": (False, ASKED, [], 30, ""),
    "a compilation": (False, ASKED, [calls("begin_compilation")], 600, ""),
    "reading data": (False, ASKED, [in_phase("reading data")], 600, ""),
    "an evaluation": (False, ASKED, [in_phase("evaluation")], 300, ""),
    "a phase with a limit": (False, ASKED, [in_phase("mine", 45.0)], 45, ""),
    "a phase with a limit below that of a step": (False, ASKED, [in_phase("mine", 1.0)], 30, ""),
    "between epochs": (False, ASKED, [calls("leave_steps")], 300, ANNOUNCE),
    "after the update, at work": (False, ASKED, [calls("update")], 300, ANNOUNCE),
    "after the update": (False, ASKED, [calls("update"), works(False)], 30, ANNOUNCE),
    "after the update, in gradients again": (False, ASKED, [calls("update"), calls("compute")], 30, ""),
    "a script sleeps": (True, AUTO, [works(False)], 30, "--watch"),
    "a script works": (True, AUTO, [works(True)], 3600, "--watch"),
    "a script works after the update": (True, AUTO, [calls("update")], 3600, "--watch"),
    "a script works for 100 s, then sleeps": (True, AUTO, [works(*[True] * 100, False)], 130, "--watch"),
    "a script writes a line every 15 s": (True, AUTO, [works(*([True] + [False] * 14) * 9, False)], 35, "--watch"),
    "a script works two seconds of three": (True, AUTO, [works(*[True, True, False] * 2000)], 3600, "--watch"),
    "a script starts, and sleeps": (True, AUTO, [calls("__init__"), works(False)], 600, "--watch"),
    "a script starts, and downloads": (True, AUTO, [calls("__init__"), works(True)], 3600, "--watch"),
    "a script works, with a limit that was asked for": (True, ASKED, [works(True)], 30, "--watch"),
}


@pytest.mark.parametrize("what", LATE)
def test_the_rank_that_others_wait_for_has_the_time_of_what_it_does(what, capfd):
    guest, timeouts, enters, seconds, remedy = LATE[what]
    job = Job(2, guest=guest, timeouts=timeouts)
    for enter in enters:
        enter(job)
    job.run(1)
    job.wait([0])
    job.run(8000)
    ((rank, headline, at),) = job.ended
    assert rank == 0
    assert headline.startswith("rank 1 keeps the others waiting, at ")
    assert seconds <= at - 1 <= seconds + 6
    assert capfd.readouterr().err.count("warning: rank 1 works alone for ") == (seconds == 3600)
    if guest:
        longer = int(headline.rpartition("(if it was at work, and not hung: start with --watch ")[2].rstrip(")"))
        assert 2 * seconds <= longer <= 2 * seconds + 12
    else:
        assert headline.endswith(remedy or "after step 1")


def test_a_script_of_which_no_rank_works_outside_of_a_collective_is_ended():
    """Ranks that wait in MPI use all of a core."""
    job = Job(2, guest=True, timeouts=AUTO)
    job.wait([0, 1])
    job.run(100)
    assert job.ended[0][1].startswith("all ranks wait in a collective")


@pytest.mark.parametrize("late", [0, 12])
def test_ranks_in_different_collectives_are_told_before_any_limit(late):
    """late: seconds after rank 0 until the other comes to its collective."""
    job = Job(2)
    for activity in job.activities:
        activity.call("gradients")
    job.activities[0].call("evaluate.names")
    job.activities[1].collective = None
    job.run(late)
    job.activities[1].call("synchronize")
    job.run(100)
    ((rank, headline, at),) = job.ended
    assert rank == 0
    assert headline.startswith("ranks wait in different collectives (rank 0 in evaluate.names at ")
    assert headline.endswith(f"all must call the same ones; no step for {at - 1:.0f} s after step 1")
    assert at - 1 <= 2 * max(late, ASK_SECONDS) + 2 < 30


def test_a_collective_that_takes_long_is_no_difference():
    job = Job(2)
    for activity in job.activities:
        activity.call("gradients")
    job.activities[0].call("loss")  # the first has its result, and the other has not
    job.run(29)
    assert job.ended == []


def test_the_first_step_has_its_own_limit_and_heartbeats_do_not_end_it():
    job = Job(2)
    job.activities[1].__init__()
    job.activities[1].heartbeat()
    job.activities[1].begin_step(0)
    job.activities[1].heartbeat()
    job.run(1)
    job.wait([0])
    job.run(500)
    assert not job.ended
    job.activities[1].finish_step(1)
    job.run(100)
    assert job.ended[0][1].startswith("rank 1 keeps the others waiting")


def test_progress_within_a_phase_begins_its_time_anew():
    job = Job(2)
    in_phase("evaluation")(job)
    job.wait([0])
    for _ in range(20):
        job.run(250)
        job.activities[1].heartbeat()
    assert not job.ended
    job.run(310)
    assert job.ended[0][1].startswith("rank 1 keeps the others waiting")


@pytest.mark.parametrize(
    ("deaf", "stopped", "ends"),
    [(1, [], [0, "rank 1 does not answer", 34]), (1, [1], [0, "rank 1 does not answer", 34]),
     (0, [], [1, "rank 0 does not answer", 40]), (0, [0], [1, "rank 0 does not answer", 34])],
)  # fmt: skip
def test_a_rank_that_does_not_answer_is_named_by_rank_0_and_rank_0_by_the_others(deaf, stopped, ends):
    """The others leave the decision to rank 0 for two times three seconds, unless it is known to be stopped."""
    job = Job(3, deaf=[deaf], stopped=stopped)
    job.wait(range(3))
    job.run(100)
    rank, headline, at = job.ended[0]
    assert (rank, headline[: len(ends[1])]) == (ends[0], ends[1])
    assert abs(at - 1 - ends[2]) <= 1


@pytest.mark.parametrize(("stopped", "ends"), [([1], 34), ([], 604)])
def test_a_rank_that_never_reported_is_named_after_a_steps_limit_if_it_is_known_to_be_stopped(stopped, ends):
    """All are in start-up, which has ten minutes."""
    job = Job(2, deaf=[1], stopped=stopped)
    job.activities[0].__init__()
    job.wait([0])
    job.run(700)
    ((rank, headline, at),) = job.ended
    assert (rank, headline[:22]) == (0, "rank 1 does not answer")
    assert abs(at - 1 - ends) <= 4


def test_between_epochs_rank_0_has_no_longer_to_answer_than_in_a_step():
    job = Job(2, deaf=[0])
    job.activities[1].leave_steps()
    job.run(100)
    assert job.ended[0][:2] == (1, "rank 0 does not answer (stopped, spinning outside Python, or cut off)")
    assert job.now <= 45


def test_other_phases_and_waiting_make_no_step_longer():
    job = Job(2)
    mine, activity = job.detectors[0], job.activities[0]
    with activity.during("checkpoint"):
        job.run(20)
    job.run(1)
    assert mine.longest == 0.0
    job.wait([0])
    with job.activities[1].during("evaluation"):
        job.run(100)
        activity.collective = None
        activity.finish_step(2)
        job.run(1)
        assert mine.longest == 0.0
    mine.starvation.seconds = lambda: 6.0  # it had no core for so long
    job.run(8)
    activity.finish_step(3)
    job.run(1)
    assert mine.longest == 2.0


def test_a_rank_whose_output_nobody_reads_has_time_and_says_so(monkeypatch):
    reader, writer = full_pipe()
    assert not detector.output_is_read([writer])
    os.read(reader, 2**20)
    assert detector.output_is_read([writer])
    monkeypatch.setattr(detector, "output_is_read", lambda: True)
    job = Job(1)
    assert job.detectors[0].report().limit == 30.0
    monkeypatch.setattr(detector, "output_is_read", lambda: False)
    report = job.detectors[0].report()
    assert report.limit == HangTimeouts(30.0).phase(UNREAD, 0.0) == 600.0
    assert report.at.endswith(" (its output is not read: a paused pager, or Ctrl-S)")
    job.wait([0])
    assert job.detectors[0].report().limit == 30.0
    os.close(reader)
    os.close(writer)
