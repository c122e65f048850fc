"""Who hangs, when there is no progress: a pure function of the ranks' reports.

A rank in a collective waits for other ranks; on a GPU, also one that is a step ahead of another. The cause is therefore a
rank outside of a collective, or one that does not answer. Outside, a rank has the time limit of its phase (evaluation,
compilation, ...), not counting time without a core.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from hvdtrain.guards.activity import BETWEEN, STEP, UPDATED
from hvdtrain.guards.timeouts import TIMES_STEP

MAY_BE_ALONE = (UPDATED.name, BETWEEN.name)  # phases in which programs let one rank work
# What the user can do if a rank that was ended was sound, as `str.format` takes it. seconds: twice the time that it had.
TO_ANNOUNCE = " (if it was at work: announce that by `with run.alone():`)"  # only in phases in which it counts
TO_WATCH_LONGER = " (if it was at work, and not hung: start with --watch {seconds:.0f})"
MOST_STARVED = 9.0  # time without a core extends a limit by at most 9 times the limit


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
    called: tuple[str, ...] = ()  # the last ones


class Diagnosis(NamedTuple):
    """Whether to end the job, or when to ask again."""

    headline: str | None  # why the job must end; None: it continues
    wait: float = 0.0  # seconds after which to ask again
    excused: float = 0.0  # seconds without progress that a lack of CPU cores explains


def different_collectives(reports: Mapping[int, Report], names: Sequence[str]) -> str | None:
    """Return the headline if ranks wait that have called different collectives at the same place in their order.

    All ranks call the same ones in the same order, so these wait for ever, however long each may wait. On a GPU, one rank
    may be in its 12th call while another is in its 10th: what both have called as their 10th is compared.
    """
    waiting = {rank: report for rank, report in sorted(reports.items()) if report.collective is not None}
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


def diagnose_hang(
    reports: Mapping[int, Report], names: Sequence[str], asker: int = 0, stopped: Collection[int] = (),
    remedy: str = "",
) -> Diagnosis:  # fmt: skip
    """Decide from the `reports` (by rank) whether to end the job. A rank without a report did not answer in time.

    names: name of each rank. asker: the rank that asked; it must have a report. stopped: ranks without a report that are
    known to be stopped (SIGSTOP); the job is ended without waiting for them. remedy: one of the above, or nothing.
    """
    hang = _Hang(reports, names, asker, stopped, remedy)
    return hang.different() or hang.no_answer() or hang.late() or hang.wait() or hang.all_in_a_collective()


class _Hang:
    """What the asker knows of a job without progress. Methods return None where there is no such case."""

    def __init__(
        self, reports: Mapping[int, Report], names: Sequence[str], asker: int, stopped: Collection[int], remedy: str
    ):
        self.reports, self.names, self.mine = dict(sorted(reports.items())), names, reports[asker]
        self.starved = sum(report.starved for report in reports.values())  # ranks may have waited for each other
        self.silent = [rank for rank in range(len(names)) if rank not in reports]
        self.stopped = [rank for rank in self.silent if rank in stopped]
        self._remedy = remedy
        # On a GPU, collectives are only queued. A rank that is ahead of another has queued that one's collective, and waits
        # for its GPU at some later line: to read a value, or because the queue is full.
        self.behind = min(report.step for report in reports.values())
        self.outside = {  # who is first is named first
            rank: report
            for rank, report in self.reports.items()
            if report.collective is None and not (report.asynchronous and report.step > self.behind)
        }

    def left(self, report: Report) -> float:
        """Return the seconds until the limit of this rank, which a lack of cores extends."""
        return report.limit + min(self.starved, MOST_STARVED * report.limit) - report.stalled

    def named(self, ranks: Sequence[int]) -> str:
        return " and ".join(self.names[rank] for rank in ranks)

    def since(self) -> str:
        """Return for how long there was no progress, as the end of a headline."""
        mine = self.mine
        if mine.phase in (STEP.name, UPDATED.name):
            return f"no step for {mine.stalled:.0f} s after step {mine.step}"
        return f"no progress for {mine.stalled:.0f} s in {mine.phase}, after step {mine.step}"

    def different(self) -> Diagnosis | None:
        """Whether ranks wait in different collectives."""
        different = different_collectives(self.reports, self.names)
        return None if different is None else Diagnosis(f"{different}; {self.since()}")

    def no_answer(self) -> Diagnosis | None:
        """Whether ranks do not answer for longer than they may.

        Ranks go through the phases together: a rank that does not answer gets the time limit of the asker's phase. Between
        epochs, only a rank that answers has the longer limit.
        """
        limit = self.mine.limit / TIMES_STEP if self.mine.phase == BETWEEN.name else self.mine.limit
        if not self.stopped and (not self.silent or self.left(self.mine._replace(limit=limit)) > 0):
            return None
        helps = not self.stopped and self._remedy != TO_ANNOUNCE
        advice = self._remedy.format(seconds=2 * self.mine.stalled) if helps else ""
        why = "(stopped, spinning outside Python, or cut off)"
        return Diagnosis(f"{self.named(self.stopped or self.silent)} does not answer {why}; {self.since()}{advice}")

    def late(self) -> Diagnosis | None:
        """Whether ranks that are in no collective are over their limits."""
        late = [rank for rank, report in self.outside.items() if self.left(report) <= 0]
        if not late:
            return None
        blamed = self.reports[late[0]]
        helps = self._remedy != TO_ANNOUNCE or blamed.phase in MAY_BE_ALONE
        advice = self._remedy.format(seconds=2 * blamed.stalled) if helps else ""
        return Diagnosis(f"{self.named(late)} keeps the others waiting, at {blamed.at}; {self.since()}{advice}")

    def wait(self) -> Diagnosis | None:
        """When to ask again; None if all ranks are in a collective for too long."""
        if self.silent or self.outside:
            waited_for = [*self.outside.values(), *([self.mine] if self.silent else [])]
            seconds = min(map(self.left, waited_for))
        else:  # the last one may have entered its collective just now
            seconds = max(map(self.left, self.reports.values()))
        return Diagnosis(None, seconds, min(self.starved, MOST_STARVED * self.mine.limit)) if seconds > 0 else None

    def all_in_a_collective(self) -> Diagnosis:
        last = [rank for rank, report in self.reports.items() if report.step == self.behind]
        if len(last) < len(self.reports):
            return Diagnosis(f"{self.named(last)} is behind, at {self.reports[last[0]].at}; {self.since()}")
        where = f"all ranks wait in a collective ({self.mine.collective})"
        return Diagnosis(f"{where}: look at the network between them; {self.since()}")
