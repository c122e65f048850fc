"""Whom to blame when there is no progress, or how long to wait: pure functions of time limits and of the ranks' reports.

A rank in a collective waits for other ranks; on a GPU, also one that is a step ahead of another. The cause is therefore a
rank outside of a collective, or one that does not answer. Outside, a rank has the time limit of its phase (evaluation,
compilation, ...), not counting time without a core.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from hvdtrain.guards.activity import BETWEEN, STEP, UPDATED, Phase

LEAST_SECONDS, TIMES_LONGEST = 30.0, 20.0  # automatic limit of a step: at least 30 s, 20 times the longest step so far
TIMES_LONGEST_ASKED = 3.0  # a limit that was asked for is raised to 3 times the longest step so far
TIMES_STEP = 10.0  # limit of long phases, and of a rank at work: 10 times the limit of a step,
# or this number of seconds, if that is more:
PHASE_SECONDS = {
    "start-up": 600.0,
    "first step": 600.0,
    "compilation": 600.0,
    "reading data": 600.0,
    "output that nobody reads": 600.0,
    "work of one rank": 600.0,
}
WORKING_SECONDS = 3600.0  # or this, for a rank at work in a script that cannot say what it is doing
MOST_STARVED = 9.0  # time without a core extends a limit by at most 9 times the limit
MAY_BE_ALONE = (UPDATED.name, BETWEEN.name)  # phases in which programs let one rank work
# What the user can do if a rank that was ended was sound, as `str.format` takes it. seconds: twice the time that it had.
TO_ANNOUNCE = " (if it was at work: announce that by `with run.alone():`)"  # only in phases in which it counts
TO_WATCH_LONGER = " (if it was at work, and not hung: start with --watch {seconds:.0f})"


class HangTimeouts(NamedTuple):
    """How long a rank may make no progress, in seconds. asked: in a step, as given by --step-timeout; None: derived from the
    longest step; 0: no limit. patient: a rank at work has WORKING_SECONDS in any phase."""

    asked: float | None = None
    patient: bool = False

    @property
    def off(self) -> bool:
        """Whether there is no limit."""
        return self.asked == 0

    def start_up(self) -> float:
        """Return the limit of start-up, before the ranks are connected."""
        return float("inf") if self.off else max(PHASE_SECONDS["start-up"], TIMES_STEP * (self.asked or 0.0))

    def step(self, longest: float) -> float:
        """Return the limit of a step. longest: the longest step so far."""
        least, times = (self.asked, TIMES_LONGEST_ASKED) if self.asked else (LEAST_SECONDS, TIMES_LONGEST)
        return max(least, times * longest)

    def phase(self, phase: Phase, longest: float) -> float:
        """Return the limit of `phase` without progress."""
        step = self.step(longest)
        if phase.name == STEP.name:
            return step
        if phase.seconds is not None:
            return max(phase.seconds, step)
        return max(PHASE_SECONDS.get(phase.name, 0.0), TIMES_STEP * step)

    def working(self, longest: float) -> float:
        """Return the limit without progress of a rank that is seen at work."""
        return max(TIMES_STEP * self.step(longest), WORKING_SECONDS if self.patient else 0.0)

    def leaving(self, longest: float) -> float:
        """Return the limit of a rank's end, after training."""
        return float("inf") if self.off else TIMES_STEP * self.step(longest)


class Report(NamedTuple):
    """The state of a rank's main thread. Times are in seconds."""

    step: int
    phase: str
    limit: float  # time limit without progress in this phase
    stalled: float  # time without progress
    starved: float = 0.0  # within `stalled`: ready to run, but without a core; summed over threads
    collective: str | None = None  # the collective in which it waits for other ranks; None: it is not in a collective
    at: str = ""  # the program's innermost line: FILE:LINE, FUNCTION
    asynchronous: bool = False  # its device works on after a call has returned
    calls: int = 0  # how many collectives it has called
    called: Sequence[str] = ()  # the last ones


class Verdict(NamedTuple):
    """Whether to end the job."""

    headline: str | None  # why the job must end; None: it continues
    excused: float = 0.0  # seconds without progress that a lack of CPU cores explains


def different_collectives(reports: Mapping[int, Report], names: Sequence[str]) -> str | None:
    """Return the headline if ranks wait that have called different collectives at the same place in their order.

    All ranks call the same ones in the same order, so these wait for ever, however long each may wait.
    """
    waiting = {rank: report for rank, report in sorted(reports.items()) if report.collective is not None}
    # On a GPU, one rank may be in its 12th call while another is in its 10th. What both called as their 10th is compared.
    place = min((report.calls for report in waiting.values()), default=0)
    first: dict[str, int] = {}  # collective at this place -> rank
    for rank, report in waiting.items():
        ahead = report.calls - place
        if ahead < len(report.called):
            first.setdefault(report.called[-1 - ahead], rank)
    if len(first) < 2:
        return None
    two = ", ".join(f"{names[rank]} in {name} at {waiting[rank].at}" for name, rank in list(first.items())[:2])
    return f"ranks wait in different collectives ({two}): all must call the same ones"


def judge(
    reports: Mapping[int, Report], names: Sequence[str], asker: int = 0, stopped: Collection[int] = (),
    remedy: str = "",
) -> Verdict:  # fmt: skip
    """Decide from the `reports` (by rank) whether to end the job. A rank without a report did not answer in time.

    names: name of each rank. asker: the rank that asked; it must have a report. stopped: ranks without a report that are
    known to be stopped (SIGSTOP); the job is ended without waiting for them. remedy: one of the above, or nothing.
    """
    reports, mine = dict(sorted(reports.items())), reports[asker]  # who is first is named first
    starved = sum(report.starved for report in reports.values())  # ranks may have waited for each other
    since = f"no progress for {mine.stalled:.0f} s in {mine.phase}, after step {mine.step}"
    if mine.phase in (STEP.name, UPDATED.name):
        since = f"no step for {mine.stalled:.0f} s after step {mine.step}"

    def left(report: Report) -> float:
        """Return the seconds until the limit of this rank, which a lack of cores extends."""
        return report.limit + min(starved, MOST_STARVED * report.limit) - report.stalled

    def named(ranks: Sequence[int]) -> str:
        return " and ".join(names[rank] for rank in ranks)

    if different := different_collectives(reports, names):
        return Verdict(f"{different}; {since}")

    # Ranks go through the phases together: a rank that does not answer gets the time limit of the asker's phase. Between
    # epochs, only a rank that answers has the longer limit.
    silent = [rank for rank in range(len(names)) if rank not in reports]
    known = [rank for rank in silent if rank in stopped]
    limit = mine.limit / TIMES_STEP if mine.phase == BETWEEN.name else mine.limit
    if known or (silent and left(mine._replace(limit=limit)) <= 0):
        advice = remedy.format(seconds=2 * mine.stalled) if not known and remedy != TO_ANNOUNCE else ""
        why = "(stopped, spinning outside Python, or cut off)"
        return Verdict(f"{named(known or silent)} does not answer {why}; {since}{advice}")

    # On a GPU, collectives are only queued. A rank that is ahead of another has queued that one's collective, and waits for
    # its GPU at some later line: to read a value, or because the queue is full.
    behind = min(report.step for report in reports.values())
    outside = {
        rank: report
        for rank, report in reports.items()
        if report.collective is None and not (report.asynchronous and report.step > behind)
    }
    if late := [rank for rank, report in outside.items() if left(report) <= 0]:
        blamed = reports[late[0]]
        helps = remedy != TO_ANNOUNCE or blamed.phase in MAY_BE_ALONE
        advice = remedy.format(seconds=2 * blamed.stalled) if helps else ""
        return Verdict(f"{named(late)} keeps the others waiting, at {blamed.at}; {since}{advice}")

    # The last one may have entered its collective just now.
    if silent or outside or max(map(left, reports.values())) > 0:
        return Verdict(None, min(starved, MOST_STARVED * mine.limit))

    last = [rank for rank, report in reports.items() if report.step == behind]
    if len(last) < len(reports):
        return Verdict(f"{named(last)} is behind, at {reports[last[0]].at}; {since}")
    return Verdict(f"all ranks wait in a collective ({mine.collective}): look at the network between them; {since}")
