"""The watchdog's verdict on a standstill: a pure function of the ranks' reports. No clock, no socket, no thread.

A rank in a collective waits for another one; so the one to blame stands outside, or does not answer. Outside, each rank has
the limit of the phase that it is in (evaluation, compilation, ...), and time without a core does not count.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

MOST_STARVED = 9.0  # limits that are added at most for the time in which ranks were ready to run and had no core


class Report(NamedTuple):
    """What one rank says of its main thread. All but `step` and `phase` in seconds."""

    step: int
    phase: str
    limit: float  # so long may the main thread make no progress in this phase
    stalled: float  # so long it has made none
    starved: float = 0.0  # so long, of these, its threads were ready to run and had no core, added up
    waits_in: str | None = None  # the collective in which it waits for other ranks; None: it is outside
    at: str = ""  # FILE:LINE, FUNCTION


class Verdict(NamedTuple):
    headline: str | None  # why the job must end; None: it need not
    wait: float = 0.0  # seconds after which to ask again
    excused: float = 0.0  # seconds of this standstill for which a lack of cores is the reason


def judge(
    reports: Mapping[int, Report], names: Sequence[str], asker: int = 0, stopped: Collection[int] = ()
) -> Verdict:
    """Return what follows from the `reports`, by rank; a rank without one did not answer in time.

    names: what to call each rank. asker: who asked; its own report is there. stopped: ranks without a report that are known
    to be stopped (SIGSTOP), so that they need no patience.
    """
    starved = sum(report.starved for report in reports.values())  # one may have waited for the other
    mine = reports[asker]
    excused = min(starved, MOST_STARVED * mine.limit)

    def left(report: Report) -> float:
        return report.limit + min(starved, MOST_STARVED * report.limit) - report.stalled

    def named(ranks: Sequence[int]) -> str:
        return " and ".join(names[rank] for rank in ranks)

    if mine.phase == "step":
        since = f"; no step for {mine.stalled:.0f} s after step {mine.step}"
    else:
        since = f"; no progress for {mine.stalled:.0f} s in {mine.phase}, after step {mine.step}"
    silent = [rank for rank in range(len(names)) if rank not in reports]
    # Ranks go through the phases together: who does not answer is given the time that the asker's phase may take.
    if silent and (set(silent) & set(stopped) or left(mine) <= 0):
        blamed = [rank for rank in silent if rank in stopped] or silent
        return Verdict(f"{named(blamed)} does not answer (stopped, spinning outside Python, or cut off){since}")
    outside = {rank: report for rank, report in reports.items() if report.waits_in is None}
    late = [rank for rank, report in outside.items() if left(report) <= 0]
    if late:
        return Verdict(f"{named(late)} keeps the others waiting, at {reports[late[0]].at}{since}")
    if silent:
        return Verdict(None, min(left(report) for report in [mine, *outside.values()]), excused)
    if outside:
        return Verdict(None, min(map(left, outside.values())), excused)
    # All wait for each other. Who came last may have come just now.
    longest = max(map(left, reports.values()))
    if longest > 0:
        return Verdict(None, longest, excused)
    behind = min(report.step for report in reports.values())
    last = [rank for rank, report in reports.items() if report.step == behind]
    if len(last) < len(reports):
        return Verdict(f"{named(last)} is behind, at {reports[last[0]].at}{since}")
    where = {reports[rank].waits_in: rank for rank in sorted(reports, reverse=True)}
    if len(where) > 1:
        (first, one), (second, other) = sorted(where.items(), key=lambda item: item[1])[:2]
        two = f"{names[one]} in {first}, {names[other]} in {second}"
        return Verdict(f"ranks wait in different collectives ({two}): all must call the same ones{since}")
    return Verdict(f"all ranks wait in a collective ({mine.waits_in}): look at the network between them{since}")
