"""Who hangs: a table of standstills and what is said of each, and generated ones."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.guards.activity import START, STEP, Phase
from hvdtrain.guards.judge import (
    MOST_STARVED,
    PHASE_SECONDS,
    TO_ANNOUNCE,
    TO_WATCH_LONGER,
    HangTimeouts,
    Report,
    Verdict,
    different_collectives,
    judge,
)

# ---- how long each phase may take


@pytest.mark.parametrize(
    ("asked", "longest", "step"), [(None, 0.0, 30.0), (None, 2.0, 40.0), (5.0, 1.0, 5.0), (5.0, 2.0, 6.0)]
)
def test_a_step_and_what_follows_from_it(asked, longest, step):
    timeouts = HangTimeouts(asked)
    assert timeouts.step(longest) == timeouts.phase(STEP, longest) == step
    assert timeouts.phase(Phase("evaluation"), longest) == timeouts.leaving(longest) == 10 * step
    assert timeouts.phase(Phase("checkpoint", 0.0), longest) == step  # a rank that hangs there has no longer limit
    assert timeouts.phase(Phase("work of one rank", 3600.0), longest) == 3600.0


@pytest.mark.parametrize("name", list(PHASE_SECONDS))
def test_a_phase_that_is_known_to_be_long_has_ten_minutes_or_ten_steps(name):
    assert HangTimeouts(5.0).phase(Phase(name), 0.0) == 600.0
    assert HangTimeouts(100.0).phase(Phase(name), 0.0) == 1000.0


def test_start_up_has_its_limit_before_the_ranks_are_connected_too():
    assert HangTimeouts(5.0).start_up() == HangTimeouts(5.0).phase(START, 0.0) == 600.0


def test_no_limit_is_none_anywhere():
    assert HangTimeouts(0.0).off
    assert HangTimeouts(0.0).start_up() == HangTimeouts(0.0).leaving(1.0) == float("inf")


# ---- who is blamed

LIMITS = {"step": 30.0, "evaluation": 300.0, "first step": 600.0}


def names(ranks: int) -> list[str]:
    return [f"rank {rank} on h{rank // 4}" for rank in range(ranks)]


def waiting(stalled: float = 31.0, **fields) -> Report:
    return Report(**dict(step=7, phase="step", limit=30.0, stalled=stalled, collective="loss", at="w.py:1, w") | fields)


def outside(stalled: float = 31.0, **fields) -> Report:
    return waiting(stalled, **dict(collective=None, at="o.py:2, o") | fields)


def on_gpu(stalled: float = 31.0, **fields) -> Report:
    """A rank whose GPU computes behind its back, at a line that has nothing to do with other ranks."""
    return outside(stalled, **dict(asynchronous=True, at="train.py:9, loss.item()") | fields)


EVALUATES = dict(phase="evaluation", limit=300.0)
BETWEEN = dict(phase="between epochs", limit=300.0)
READS = dict(phase="reading data", limit=600.0, at="data.py:3, read")
NEXT = dict(step=8)
GRADIENTS = dict(asynchronous=True, collective="gradients")
ANNOUNCE, WATCH = dict(remedy=TO_ANNOUNCE), dict(remedy=TO_WATCH_LONGER)
ALONE = " (if it was at work: announce that by `with run.alone():`)"
LONGER = " (if it was at work, and not hung: start with --watch 62)"
KEEPS = "rank 1 on h0 keeps the others waiting, at o.py:2, o; no step for 31 s after step 7"
SILENT = "rank 1 on h0 does not answer (stopped, spinning outside Python, or cut off); no step for 31 s after step 7"
# Reports by rank, rank 0 asks; None: does not answer. What else is known. The whole line, its beginning (before "..."), or
# None: the job continues.
SITUATIONS = {
    "one is outside": ([waiting(), outside()], {}, KEEPS),
    "one of a thousand": ([waiting(), outside(), *[waiting()] * 998], {}, KEEPS),
    "who asks is outside": ([outside(), waiting()], {}, KEEPS.replace("rank 1", "rank 0")),
    "who asks has updated": ([waiting(phase="the end of a step"), outside()], {}, KEEPS),
    "two are outside": ([waiting(), outside(at="a.py:1, f"), outside()], {},
                        "rank 1 on h0 and rank 2 on h0 keeps the others waiting, at a.py:1, f;..."),
    "one evaluates": ([waiting(), outside(**EVALUATES)], {}, None),
    "one has evaluated for too long": ([waiting(400.0), outside(300.0, **EVALUATES)], {}, "rank 1 on h0 keeps..."),
    "one goes on evaluating": ([waiting(4000.0), outside(0.25, **EVALUATES)], {}, None),
    "one hangs beside one that saves": ([waiting(), outside(), outside(5.0, phase="checkpoint", limit=600.0)], {}, KEEPS),
    "one is silent in a step": ([waiting(), None], {}, SILENT),
    "one is silent in an evaluation": ([outside(**EVALUATES), None], {}, None),
    "one is silent in an evaluation, stopped": (
        [outside(**EVALUATES), None, None], dict(stopped={2}),
        "rank 2 on h0 does not answer (stopped, spinning outside Python, or cut off); no progress for 31 s in evaluation, "
        "after step 7"),
    "one is silent between epochs, where all come together": ([waiting(**BETWEEN), None], {}, "rank 1 on h0 does not..."),
    "cores are short": ([waiting(starved=10.0), outside(starved=20.0)], {}, Verdict(None, 30.0)),
    "cores are short, nearly nine times the limit": ([waiting(299.0, starved=1e6), outside(299.0)], {}, None),
    "cores are short, for longer": ([waiting(300.0, starved=1e6), outside(300.0)], {}, "rank 1 on h0 keeps..."),
    "all wait": ([waiting(), waiting()], {}, "all ranks wait in a collective (loss): look at the network between them;..."),
    "all wait, one has just come": ([waiting(), waiting(1.0)], {}, None),
    "all wait, one a step behind": ([waiting(), waiting(step=6)], {}, "rank 1 on h0 is behind, at w.py:1, w;..."),
    # what the user can do if the rank was sound
    "hint: not in a step": ([waiting(), outside()], ANNOUNCE, KEEPS),
    "hint: after the update": ([waiting(), outside(phase="the end of a step")], ANNOUNCE, KEEPS + ALONE),
    "hint: between epochs": ([waiting(), outside(phase="between epochs")], ANNOUNCE, KEEPS + ALONE),
    "hint: not in an evaluation": ([waiting(), outside(phase="evaluation")], ANNOUNCE, KEEPS),
    "hint: a script": ([waiting(), outside()], WATCH, KEEPS + LONGER),
    "hint: a silent script": ([waiting(), None], WATCH, SILENT + LONGER),
    "hint: not for one that was stopped": ([waiting(), None], WATCH | dict(stopped=[1]), SILENT),
    # On GPUs, collectives are only queued: every rank but the one that hangs waits at a line of its own.
    "gpu: one reads": ([waiting(**GRADIENTS), on_gpu(**READS)], {}, None),
    "gpu: one reads for too long": ([waiting(601.0, **GRADIENTS), on_gpu(601.0, **READS)], {}, "rank 1 on h0 keeps..."),
    "gpu: one reads, the others are a step ahead": ([on_gpu(**NEXT), on_gpu(**READS), on_gpu(**NEXT)], {}, None),
    "gpu: and for too long": (
        [on_gpu(601.0, **NEXT), on_gpu(601.0, **READS), on_gpu(601.0, **NEXT)], {}, "rank 1 on h0 keeps..."),
    "gpu: one waits for its queue": ([on_gpu(**NEXT, at="autograd:1, backward"), on_gpu(at="o.py:2, o")], {},
                                  KEEPS.replace("step 7", "step 8")),
    "gpu: the first hangs": ([on_gpu(at="o.py:2, o"), on_gpu(**NEXT), waiting(asynchronous=True, **NEXT)], {},
                             "rank 0 on h0 keeps the others waiting, at o.py:2, o;..."),
    "gpu: two of four hang": ([on_gpu(**NEXT), on_gpu(), on_gpu(), on_gpu(**NEXT)], {},
                              "rank 1 on h0 and rank 2 on h0 keeps..."),
    "gpu: one is silent": ([on_gpu(**NEXT), None, on_gpu(**NEXT)], {}, "rank 1 on h0 does not answer..."),
    "gpu: the network": ([waiting(**GRADIENTS)] * 3, {}, "all ranks wait in a collective (gradients): look at..."),
    "gpu: one behind": ([waiting(**GRADIENTS), waiting(**GRADIENTS, **NEXT)], {}, "rank 0 on h0 is behind, at w.py:1, w..."),
    "gpu: one has just come": ([on_gpu(**NEXT), on_gpu(1.0)], {}, None),
    "cpu: nobody is ahead of a rank that hangs": ([outside(**NEXT), outside()], {},
                                                  "rank 0 on h0 and rank 1 on h0 keeps..."),
}  # fmt: skip


@pytest.mark.parametrize("what", SITUATIONS)
def test_what_is_said_of_a_standstill(what):
    reports, known, expected = SITUATIONS[what]
    answered = {rank: report for rank, report in enumerate(reports) if report is not None}
    verdict = judge(answered, names(len(reports)), **known)
    if isinstance(expected, Verdict):
        assert verdict == expected
    elif expected is None:
        assert verdict.headline is None
    elif expected.endswith("..."):
        assert verdict.headline.startswith(expected.removesuffix("..."))
    else:
        assert verdict.headline == expected


SECONDS = st.floats(0, 700)


@st.composite
def standstills(draw) -> tuple[dict[int, Report], int]:
    """Reports as ranks might give them, and the number of ranks; rank 0 asks, and some others do not answer."""
    ranks, reports = draw(st.integers(1, 9)), {}
    for rank in range(ranks):
        phase = draw(st.sampled_from(list(LIMITS)))
        collective = draw(st.sampled_from((None, "loss", "guard.replicas")))
        starved, step = draw(st.sampled_from((0.0, 0.0, 5.0, 1000.0))), draw(st.sampled_from((7, 7, 8)))
        if rank == 0 or draw(st.integers(0, 9)):
            reports[rank] = Report(step, phase, LIMITS[phase], draw(SECONDS), starved, collective, f"f{rank}.py:1, f")
    return reports, ranks


@given(standstills())
def test_whoever_is_blamed_has_had_its_time_and_nobody_waits_for_ever(standstill):
    reports, ranks = standstill
    who = names(ranks)
    starved = sum(report.starved for report in reports.values())

    def overdue(report: Report) -> bool:
        return report.stalled >= report.limit + min(starved, MOST_STARVED * report.limit)

    verdict = judge(reports, who)
    assert judge(dict(reversed(reports.items())), who) == verdict  # whoever answered first
    for _ in range(1000):
        if verdict.headline is not None:
            break
        # No one had a reason to be blamed yet, and after some time nobody has moved.
        assert not any(overdue(report) and report.collective is None for report in reports.values())
        reports = {rank: report._replace(stalled=report.stalled + 60.0) for rank, report in reports.items()}
        verdict = judge(reports, who)
    assert verdict.headline is not None
    # Exactly those who are to blame are named before the first comma or semicolon.
    blamed = {rank for rank in range(ranks) if who[rank] + " " in verdict.headline.split(",")[0].split(";")[0] + " "}
    silent = set(range(ranks)) - set(reports)
    if "does not answer" in verdict.headline:
        assert blamed == silent
        assert overdue(reports[0])
    elif "keeps the others waiting" in verdict.headline:
        assert blamed
        assert all(overdue(reports[rank]) and reports[rank].collective is None for rank in blamed)
    else:
        assert not silent
        assert all(overdue(report) and report.collective for report in reports.values())


@given(standstills(), st.data())
def test_a_rank_that_waits_where_another_waits_is_never_blamed(standstill, data):
    """Only with all of them: in a collective, at the same step."""
    reports, ranks = standstill
    twins = data.draw(st.lists(st.sampled_from(sorted(reports)), min_size=1, unique=True))
    reports |= {rank: reports[rank]._replace(collective="loss", step=7) for rank in twins}
    headline = judge(reports, names(ranks)).headline
    if headline is not None and "all ranks wait" not in headline and "is behind" not in headline:
        blamed = headline.split(",")[0].split(";")[0] + " "
        assert not any(names(ranks)[rank] + " " in blamed for rank in twins)


# ---- ranks that call other collectives


def in_order(calls: int, *called: str, **fields) -> Report:
    """A rank that waits in the last one of `called`, which is its collective number `calls`."""
    return waiting(**dict(collective=called[-1], calls=calls, called=called) | fields)


LOSS, SYNC, SAVE, EVALUATE = "loss", "synchronize", "guard.replicas", "evaluate.names"
ORDERS = {  # reports by rank; the ranks and collectives that are named
    "the same place": ([in_order(7, LOSS, SYNC), in_order(7, LOSS, SYNC)], None),
    "one is ahead": ([in_order(8, LOSS, SYNC, SAVE), in_order(7, LOSS, SYNC), in_order(8, SYNC, SAVE)], None),
    "the root of broadcasts is far ahead": ([in_order(90, "k", "l"), in_order(7, LOSS, SYNC)], None),
    "one evaluates alone": ([in_order(8, SYNC, EVALUATE), in_order(8, SYNC, SYNC)], ((0, EVALUATE), (1, SYNC))),
    "which is ahead of another": (
        [in_order(9, SYNC, EVALUATE, LOSS), in_order(8, SYNC, SYNC), in_order(8, SYNC, SYNC)], ((0, EVALUATE), (1, SYNC))),
    "one of those that answered": ([in_order(8, SYNC), None, in_order(8, SAVE)], ((0, SYNC), (2, SAVE))),
    "one still computes": ([in_order(8, SYNC, EVALUATE), outside(calls=7, called=(SYNC,))], None),
    "a script whose calls are not seen": ([waiting(collective="synchronize"), waiting(collective=LOSS)], None),
}  # fmt: skip


@pytest.mark.parametrize("case", ORDERS)
def test_other_collectives_at_the_same_place_are_told_at_once(case):
    ranks, expected = ORDERS[case]
    reports = {rank: report._replace(stalled=1.0) for rank, report in enumerate(ranks) if report is not None}
    said = different_collectives(reports, names(len(ranks)))
    assert judge(reports, names(len(ranks))).headline == (said and said + "; no step for 1 s after step 7")
    if expected is None:
        assert said is None
    else:
        two = ", ".join(f"rank {rank} on h0 in {collective} at w.py:1, w" for rank, collective in expected)
        assert said == f"ranks wait in different collectives ({two}): all must call the same ones"


@given(st.lists(st.sampled_from((LOSS, SYNC, SAVE, EVALUATE)), min_size=8), st.data())
def test_ranks_that_call_the_same_in_the_same_order_never_differ(order, data):
    reports = {}
    for rank in range(data.draw(st.integers(2, 8))):
        calls = data.draw(st.integers(1, len(order)))
        reports[rank] = in_order(calls, *order[calls - data.draw(st.integers(1, min(8, calls))) : calls])
    assert different_collectives(reports, names(len(reports))) is None
