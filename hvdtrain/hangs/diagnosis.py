"""Who hangs, when there is no progress: a pure function of the ranks' reports.

A rank in a collective waits for other ranks; on a GPU, also one that is a step ahead of another. The cause is therefore a
rank outside of a collective, or one that does not answer. Outside, a rank has the time limit of its phase (evaluation,
compilation, ...), not counting time without a core.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from hvdtrain.engines.activity import BETWEEN, STEP, UPDATED
from hvdtrain.hangs.timeouts import TIMES_STEP

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
    reports = dict(sorted(reports.items()))  # who comes first is named first
    starved = sum(report.starved for report in reports.values())  # ranks may have waited for each other
    mine = reports[asker]
    excused = min(starved, MOST_STARVED * mine.limit)

    def left(report: Report) -> float:
        return report.limit + min(starved, MOST_STARVED * report.limit) - report.stalled

    def named(ranks: Sequence[int]) -> str:
        return " and ".join(names[rank] for rank in ranks)

    if mine.phase in (STEP.name, UPDATED.name):
        since = f"; no step for {mine.stalled:.0f} s after step {mine.step}"
    else:
        since = f"; no progress for {mine.stalled:.0f} s in {mine.phase}, after step {mine.step}"
    if (different := different_collectives(reports, names)) is not None:
        return Diagnosis(different + since)
    silent = [rank for rank in range(len(names)) if rank not in reports]
    # Ranks go through the phases together: a rank that does not answer gets the time limit of the asker's phase.
    # Between epochs, only a rank that answers has the longer limit.
    asker_limit = mine.limit / TIMES_STEP if mine.phase == BETWEEN.name else mine.limit
    if silent and (set(silent) & set(stopped) or left(mine._replace(limit=asker_limit)) <= 0):
        deaf = [rank for rank in silent if rank in stopped]
        advice = "" if deaf or remedy == TO_ANNOUNCE else remedy.format(seconds=2 * mine.stalled)
        return Diagnosis(
            f"{named(deaf or silent)} does not answer (stopped, spinning outside Python, or cut off){since}{advice}"
        )
    # On a GPU, collectives are only queued. A rank that is ahead of another has queued that one's collective, and waits for
    # its GPU at some later line: to read a value, or because the queue is full.
    behind = min(report.step for report in reports.values())
    outside = {
        rank: report
        for rank, report in reports.items()
        if report.collective is None and not (report.asynchronous and report.step > behind)
    }
    late = [rank for rank, report in outside.items() if left(report) <= 0]
    if late:
        blamed = reports[late[0]]
        helps = remedy != TO_ANNOUNCE or blamed.phase in MAY_BE_ALONE
        advice = remedy.format(seconds=2 * blamed.stalled) if helps else ""
        return Diagnosis(f"{named(late)} keeps the others waiting, at {blamed.at}{since}{advice}")
    if silent:
        return Diagnosis(None, min(left(report) for report in [mine, *outside.values()]), excused)
    if outside:
        return Diagnosis(None, min(map(left, outside.values())), excused)
    # All ranks are in a collective. The last one may have entered it just now.
    longest = max(map(left, reports.values()))
    if longest > 0:
        return Diagnosis(None, longest, excused)
    last = [rank for rank, report in reports.items() if report.step == behind]
    if len(last) < len(reports):
        return Diagnosis(f"{named(last)} is behind, at {reports[last[0]].at}{since}")
    return Diagnosis(f"all ranks wait in a collective ({mine.collective}): look at the network between them{since}")
