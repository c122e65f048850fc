"""How long this rank has made no progress, and what to do about it: ask the others where they are, wait, or end the job.

While rank 0 makes no progress, it asks every rank for a report every few seconds, and judges them (judge.py): at once if it
waits in a collective, because no time helps ranks that wait in different ones; else from the limit of a step on. The others
judge only whether rank 0 answers. Called by the thread of watch.py.
"""

import select
from collections.abc import Collection
from typing import NamedTuple

from hvdtrain.engines.lines import say_within
from hvdtrain.guards.activity import BETWEEN, STEP, UNREAD, UPDATED, Activity, Phase
from hvdtrain.guards.connection import Peers
from hvdtrain.guards.evidence import Starvation, Work, main_stack, where
from hvdtrain.guards.judge import (
    MOST_STARVED,
    TIMES_STEP,
    TO_ANNOUNCE,
    TO_WATCH_LONGER,
    HangTimeouts,
    Report,
    judge,
)

ASK_SECONDS = (
    5.0  # without progress, until rank 0 first asks, and between two times; at most half of the limit of a step
)


class Seen(NamedTuple):
    """What a look has shown, and what follows. moved: the main thread has made progress."""

    moved: bool = False
    ask: bool = False  # ask the ranks that this one is connected to for their reports
    end: str | None = None  # why the job must end


class Detector:
    """The detector of one rank. reply: seconds for a rank to answer. guest: the program does not use hvdtrain."""

    def __init__(self, peers: Peers, activity: Activity, timeouts: HangTimeouts, reply: float, guest: bool = False):
        self.rank, self.peers, self.names, self.activity = peers.me, peers, peers.names(), activity
        self.timeouts, self.reply, self.guest = timeouts, reply, guest
        self.longest = 0.0  # seconds of the longest step so far
        self.reports: dict[int, Report] = {}  # the answers, by rank
        self.asked_at: float | None = None  # the time, until the answers are judged
        self._ask_next = 0.0  # seconds without progress
        self._seen, self._stalled = 0, 0.0  # `activity.moves` at the last look; seconds since it changed
        self._phase = activity.phase  # phase in which the main thread made its last progress
        self._idle = 0.0  # seconds without progress in which this rank was not at work, less those in which it was
        self._reported = False  # the user knows of the rank that works while the others wait
        self._excused = 0.0  # seconds without progress that a lack of CPU cores on any rank explains
        self.work, self.starvation = Work(), Starvation()

    def look(self, now: float, elapsed: float, connected: bool) -> Seen:
        """Look whether the main thread has made progress, `elapsed` seconds after the last look."""
        starved = self.starvation.seconds()
        moves, phase = self.activity.moves, self.activity.phase
        if moves != self._seen:
            # Other phases do not count for the longest step, nor does waiting for a rank in one.
            took = self._stalled - max(starved, self._excused)
            if self._phase == STEP and took < self.timeouts.step(self.longest):
                self.longest = max(self.longest, took)
            self._seen, self._stalled, self._idle, self._reported = moves, 0.0, 0.0, False
            self.asked_at, self._ask_next, self._excused, self.reports = None, 0.0, 0.0, {}
            self.starvation.reset()
            self._phase = phase
            return Seen(moved=True)
        self._stalled += elapsed
        if self._may_work(phase):
            # Not 0 at once: a thread or child process that writes a line every ten seconds is no evidence.
            self._idle = max(0.0, self._idle - elapsed) if self.work.seen() else self._idle + elapsed
        self._phase = phase
        if not connected or self.timeouts.off:
            return Seen()
        # If this rank lacks a core, other ranks on its host may lack one, too.
        patience = self.reply + min(starved, MOST_STARVED * self.reply)
        silent = self.asked_at is not None and now - self.asked_at > patience
        return self._judge_all(now, silent) if self.rank == 0 else self._doubt_rank_0(now, silent)

    def _may_work(self, phase: Phase) -> bool:
        """Return whether work that is seen extends the limit of this phase."""
        return phase is UPDATED or (self.timeouts.patient and self.activity.collective is None)

    def _judge_all(self, now: float, silent: bool) -> Seen:
        """On rank 0: ask, and end the job, unless the reports show a reason for the delay; then ask again later."""
        limit = self.timeouts.step(self.longest)
        if self.asked_at is None:
            pause = min(ASK_SECONDS, limit / 2)
            # In a collective, it asks early: no time helps ranks that wait in different ones.
            first = pause if self.activity.collective is not None else limit
            if self._stalled < max(first, self._ask_next):
                return Seen()
            self.asked_at, self._ask_next, self.reports = now, self._stalled + pause, {}
            return Seen(ask=True)
        if not silent and len(self.reports.keys() | {0}) < len(self.names):
            return Seen()
        self.reports[0] = self.report()
        missing = [rank for rank in range(len(self.names)) if rank not in self.reports]
        stopped = [rank for rank in missing if self._stalled >= limit and self.peers.is_stopped(rank)]
        verdict = judge(self.reports, self.names, 0, stopped, TO_WATCH_LONGER if self.guest else TO_ANNOUNCE)
        if verdict.headline is not None:
            return Seen(end=verdict.headline)
        if self.timeouts.patient and not self._reported:
            self._tell_of_work()
        self._excused, self.asked_at = verdict.excused, None
        return Seen()

    def _doubt_rank_0(self, now: float, silent: bool) -> Seen:
        """On another rank: end the job if rank 0, which decides first if it can, does not answer."""
        limit, stopped = self.timeouts.step(self.longest), self.peers.is_stopped(0)
        # Rank 0 decides first, if it can: it knows where all ranks are.
        late = 0.0 if stopped else 2 * self.reply
        if self.asked_at is None:
            if self._stalled < max(limit + late, self._ask_next):
                return Seen()
            self.asked_at, self.reports = now, {self.rank: self.report()}
            return Seen(ask=True)
        if 0 in self.reports:
            self.asked_at, self._ask_next = None, self._stalled + limit
        elif silent:
            # Ranks go through the phases together: rank 0 may be in a phase in which it cannot answer.
            phase = STEP if self._phase is BETWEEN else self._phase
            if stopped or self._stalled >= self.timeouts.phase(phase, self.longest) + late:
                return Seen(end=f"{self.names[0]} does not answer (stopped, spinning outside Python, or cut off)")
            self.asked_at, self._ask_next = None, self._stalled + self.reply
        return Seen()

    def _tell_of_work(self) -> None:
        """Print a line, once, if a rank has worked for longer than its phase may take, and than ten steps."""
        for rank, report in self.reports.items():
            known = self.timeouts.phase(Phase(report.phase), self.longest)
            long = max(known, TIMES_STEP * self.timeouts.step(self.longest))
            if report.collective is None and report.stalled >= long:
                self._reported = True
                limit = self.timeouts.working(self.longest)
                say_within(
                    f"warning: {self.names[rank]} works alone for {report.stalled:.0f} s, at {report.at}; the others wait. "
                    f"It is ended after {limit:.0f} s: a longer limit is --watch {2 * limit:.0f}\n"
                )

    def report(self) -> Report:
        """Return a report about the main thread."""
        activity = self.activity
        phase, stalled, at = activity.phase, 0.0 if activity.moves != self._seen else self._stalled, where(main_stack())
        step = self.timeouts.step(self.longest)
        allowed = self.timeouts.phase(phase, self.longest)
        if self._may_work(phase):
            least = step if phase is UPDATED else allowed
            allowed = max(least, stalled + min(step - self._idle, self.timeouts.working(self.longest) - stalled))
        if activity.collective is None and not output_is_read():
            allowed = max(allowed, self.timeouts.phase(UNREAD, self.longest))
            at += " (its output is not read: a paused pager, or Ctrl-S)"
        starved, waits, asynchronous = self.starvation.seconds(), activity.collective, activity.asynchronous
        calls, called = activity.called
        return Report(activity.step, phase.name, allowed, stalled, starved, waits, at, asynchronous, calls, called)


def output_is_read(descriptors: Collection[int] = (1, 2)) -> bool:
    """Return whether writing to standard output and standard error would not block now."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLOUT)
    return len(poll.poll(0)) == len(descriptors)
