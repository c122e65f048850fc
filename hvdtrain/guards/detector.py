"""How long this rank has made no progress, and what to do about it: ask the others where they are, wait, or end the job.

If rank 0 has made no progress for the time limit of a step, it asks every rank for a report, and decides (diagnosis.py). The
others decide only if rank 0 does not answer. Earlier, rank 0 compares the collectives in which ranks wait: no time helps
if these differ. Called by the monitor's thread.
"""

import select
import traceback
from collections.abc import Collection, Mapping
from typing import NamedTuple

from hvdtrain.engines.lines import say_within
from hvdtrain.guards import flight
from hvdtrain.guards.activity import BETWEEN, STEP, UNREAD, UPDATED, Activity, Phase
from hvdtrain.guards.diagnosis import (
    MOST_STARVED,
    TO_ANNOUNCE,
    TO_WATCH_LONGER,
    Report,
    diagnose_hang,
    different_collectives,
)
from hvdtrain.guards.messages import Stand
from hvdtrain.guards.peers import Peers
from hvdtrain.guards.settings import Settings
from hvdtrain.guards.stacks import main_stack, where, worth_printing
from hvdtrain.guards.timeouts import TIMES_STEP
from hvdtrain.guards.work import Starvation, Work

COMPARE_SECONDS = 5.0  # without progress until rank 0 first compares the collectives of all ranks; then twice as long


class Seen(NamedTuple):
    """What a look has shown, and what follows. moved: the main thread has made progress."""

    moved: bool = False
    ask: bool = False  # ask the ranks that this one is connected to for their reports
    end: str | None = None  # why the job must end


class Detector:
    """The detector of one rank."""

    def __init__(self, peers: Peers, activity: Activity, settings: Settings):
        self.rank, self.peers, self.names, self.activity = peers.me, peers, peers.names(), activity
        self.timeouts, self.reply, self.guest = settings.timeouts, settings.timing.reply, settings.guest
        self.longest = 0.0  # seconds of the longest step so far
        self.reports: dict[int, Stand] = {}  # the answers, by rank
        self.asked_at: float | None = None
        self._ask_again = 0.0
        self._compare_at = COMPARE_SECONDS  # seconds without progress
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
        moved = moves != self._seen
        if moved:
            # Other phases do not count for the longest step, nor does waiting for a rank in one.
            took = self._stalled - max(starved, self._excused)
            if self._phase == STEP and took < self.timeouts.step(self.longest):
                self.longest = max(self.longest, took)
            self._seen, self._stalled, self._idle, self._reported = moves, 0.0, 0.0, False
            self.asked_at, self._ask_again, self._excused, self.reports = None, 0.0, 0.0, {}
            self._compare_at = COMPARE_SECONDS
            self.starvation.reset()
        else:
            self._stalled += elapsed
            if self._may_work(phase):
                # Not 0 at once: a thread or child process that writes a line every ten seconds is no evidence.
                self._idle = max(0.0, self._idle - elapsed) if self.work.seen() else self._idle + elapsed
        self._phase = phase
        waits = connected and not moved and not self.timeouts.off
        return self._decide(now, starved) if waits else Seen(moved)

    def _may_work(self, phase: Phase) -> bool:
        """Return whether work that is seen extends the limit of this phase."""
        return phase is UPDATED or (self.timeouts.patient and self.activity.collective is None)

    def _decide(self, now: float, starved: float) -> Seen:
        """Return what follows from a look without progress. starved: seconds without a core."""
        limit = self.timeouts.step(self.longest)
        # Rank 0 decides first, if it can.
        late = 0.0 if self.rank == 0 or self.peers.is_stopped(0) else 2 * self.reply
        if self._stalled < limit + late or now < self._ask_again:
            return self._compare()
        if self.asked_at is None:
            self.asked_at, self.reports = now, {self.rank: self.report()}
            return Seen(ask=True)
        # If this rank lacks a core, other ranks on its host may lack one, too.
        silent = now - self.asked_at > self.reply + min(starved, MOST_STARVED * self.reply)
        if self.rank == 0 and (silent or len(self.reports) == len(self.names)):
            return self._judge(now)
        if self.rank != 0 and 0 in self.reports:
            self.asked_at, self._ask_again = None, now + limit  # rank 0 is alive, and will decide
        elif self.rank != 0 and silent:
            # Ranks go through the phases together: rank 0 may be in a phase in which it cannot answer.
            phase = STEP if self._phase is BETWEEN else self._phase
            if self.peers.is_stopped(0) or self._stalled >= self.timeouts.phase(phase, self.longest) + late:
                return Seen(end=f"{self.names[0]} does not answer (stopped, spinning outside Python, or cut off)")
            self.asked_at, self._ask_again = None, now + self.reply
        return Seen()

    def _compare(self) -> Seen:
        """On rank 0, while it waits for others: end the job if ranks wait for different collectives."""
        if self.rank != 0 or self.activity.collective is None:
            return Seen()
        if self._stalled >= self._compare_at:
            self._compare_at, self.reports = 2 * self._stalled, {}
            return Seen(ask=True)
        if len(self.reports) == len(self.names) - 1:  # all have answered
            self.reports[0] = self.report()
            reports = {rank: stand.report for rank, stand in self.reports.items()}
            if different_collectives(reports, self.names):
                return Seen(end=diagnose_hang(reports, self.names).headline)
        return Seen()

    def _judge(self, now: float) -> Seen:
        """End the job, unless the reports show a reason for the delay; then ask again later."""
        self.reports[self.rank] = self.report()
        reports = {rank: stand.report for rank, stand in self.reports.items()}
        stopped = [rank for rank in range(len(self.names)) if rank not in reports and self.peers.is_stopped(rank)]
        remedy = TO_WATCH_LONGER if self.guest else TO_ANNOUNCE
        diagnosis = diagnose_hang(reports, self.names, self.rank, stopped, remedy)
        if diagnosis.headline is not None:
            return Seen(end=diagnosis.headline)
        if self.timeouts.patient and not self._reported:
            self._tell_of_work(reports)
        self._excused = diagnosis.excused
        # At the latest after the limit of a step: a rank in a long phase may hang in a step by then.
        self.asked_at, self._ask_again = None, now + max(min(diagnosis.wait, self.timeouts.step(self.longest)), 0.05)
        return Seen()

    def _tell_of_work(self, reports: Mapping[int, Report]) -> None:
        """Print a line, once, if a rank has worked for longer than its phase may take, and than ten steps."""
        for rank, report in reports.items():
            known = self.timeouts.phase(Phase(report.phase), self.longest)
            long = max(known, TIMES_STEP * self.timeouts.step(self.longest))
            if report.collective is None and report.stalled >= long:
                self._reported = True
                limit = self.timeouts.working(self.longest)
                say_within(
                    f"warning: {self.names[rank]} works alone for {report.stalled:.0f} s, at {report.at}; the others wait. "
                    f"It is ended after {limit:.0f} s: a longer limit is --watch {2 * limit:.0f}\n"
                )

    def report(self) -> Stand:
        """Return a report about the main thread, and the innermost frames of its stack."""
        stack, activity = main_stack(), self.activity
        phase, stalled, at = activity.phase, 0.0 if activity.moves != self._seen else self._stalled, where(stack)
        step = self.timeouts.step(self.longest)
        allowed = self.timeouts.phase(phase, self.longest)
        if self._may_work(phase):
            least = step if phase is UPDATED else allowed
            allowed = max(least, stalled + min(step - self._idle, self.timeouts.working(self.longest) - stalled))
        if activity.collective is None and not output_is_read():
            allowed = max(allowed, self.timeouts.phase(UNREAD, self.longest))
            at += " (its output is not read: a paused pager, or Ctrl-S)"
        starved, waits, asynchronous = self.starvation.seconds(), activity.collective, activity.asynchronous
        report = Report(activity.step, phase.name, allowed, stalled, starved, waits, at, asynchronous, *activity.called)
        return Stand(report, traceback.format_list(worth_printing(stack, self.guest)), flight.last())


def output_is_read(descriptors: Collection[int] = (1, 2)) -> bool:
    """Return whether writing to standard output and standard error would not block now."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLOUT)
    return len(poll.poll(0)) == len(descriptors)
