"""Who hangs: a table of standstills and what is said of each, and hundreds of generated ones."""

import random

import pytest

from hvdtrain.guards.diagnosis import (
    MOST_STARVED,
    TO_ANNOUNCE,
    TO_WATCH_LONGER,
    Diagnosis,
    Report,
    diagnose_hang,
    different_collectives,
)

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
# the seconds after which to ask again.
SITUATIONS = {
    "one is outside": ([waiting(), outside()], {}, KEEPS),
    "one of a thousand": ([waiting(), outside(), *[waiting()] * 998], {}, KEEPS),
    "who asks is outside": ([outside(), waiting()], {}, KEEPS.replace("rank 1", "rank 0")),
    "who asks has updated": ([waiting(phase="the end of a step"), outside()], {}, KEEPS),
    "two are outside": ([waiting(), outside(at="a.py:1, f"), outside()], {},
                        "rank 1 on h0 and rank 2 on h0 keeps the others waiting, at a.py:1, f;..."),
    "one evaluates": ([waiting(), outside(**EVALUATES)], {}, 269.0),
    "one has evaluated for too long": ([waiting(400.0), outside(300.0, **EVALUATES)], {}, "rank 1 on h0 keeps..."),
    "one goes on evaluating": ([waiting(4000.0), outside(0.25, **EVALUATES)], {}, 299.75),
    "one hangs beside one that saves": ([waiting(), outside(), outside(5.0, phase="checkpoint", limit=600.0)], {}, KEEPS),
    "one is silent in a step": ([waiting(), None], {}, SILENT),
    "one is silent in an evaluation": ([outside(**EVALUATES), None], {}, 269.0),
    "one is silent in an evaluation, stopped": (
        [outside(**EVALUATES), None, None], dict(stopped={2}),
        "rank 2 on h0 does not answer (stopped, spinning outside Python, or cut off); no progress for 31 s in evaluation, "
        "after step 7"),
    "one is silent between epochs, where all come together": ([waiting(**BETWEEN), None], {}, "rank 1 on h0 does not..."),
    "cores are short": ([waiting(starved=10.0), outside(starved=20.0)], {}, Diagnosis(None, 29.0, 30.0)),
    "cores are short, nearly nine times the limit": ([waiting(299.0, starved=1e6), outside(299.0)], {}, 1.0),
    "cores are short, for longer": ([waiting(300.0, starved=1e6), outside(300.0)], {}, "rank 1 on h0 keeps..."),
    "all wait": ([waiting(), waiting()], {}, "all ranks wait in a collective (loss): look at the network between them;..."),
    "all wait, one has just come": ([waiting(), waiting(1.0)], {}, 29.0),
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
    "gpu: one reads": ([waiting(**GRADIENTS), on_gpu(**READS)], {}, 569.0),
    "gpu: one reads for too long": ([waiting(601.0, **GRADIENTS), on_gpu(601.0, **READS)], {}, "rank 1 on h0 keeps..."),
    "gpu: one reads, the others are a step ahead": ([on_gpu(**NEXT), on_gpu(**READS), on_gpu(**NEXT)], {}, 569.0),
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
    "gpu: one has just come": ([on_gpu(**NEXT), on_gpu(1.0)], {}, 29.0),
    "cpu: nobody is ahead of a rank that hangs": ([outside(**NEXT), outside()], {},
                                                  "rank 0 on h0 and rank 1 on h0 keeps..."),
}  # fmt: skip


@pytest.mark.parametrize("what", SITUATIONS)
def test_what_is_said_of_a_standstill(what):
    reports, known, expected = SITUATIONS[what]
    answered = {rank: report for rank, report in enumerate(reports) if report is not None}
    diagnosis = diagnose_hang(answered, names(len(reports)), **known)
    if isinstance(expected, Diagnosis):
        assert diagnosis == expected
    elif isinstance(expected, float):
        assert (diagnosis.headline, diagnosis.wait) == (None, expected)
    elif expected.endswith("..."):
        assert diagnosis.headline.startswith(expected.removesuffix("..."))
    else:
        assert diagnosis.headline == expected


def drawn(chance: random.Random) -> dict[int, Report]:
    """Return reports as ranks might give them; rank 0 asks, and has waited for a step's limit. Some do not answer."""
    ranks = chance.choice((1, 2, 3, 8, 64))
    reports = {}
    for rank in range(ranks):
        phase = chance.choice(list(LIMITS))
        collective = chance.choice((None, "loss", "loss", "guard.replicas"))
        stalled = chance.uniform(0, 2) * LIMITS[phase] if rank else 30 + chance.expovariate(1 / 100)
        starved = chance.choice((0.0, 0.0, 5.0, 1000.0))
        at = f"f{rank}.py:1, f"
        reports[rank] = Report(chance.choice((7, 7, 7, 8)), phase, LIMITS[phase], stalled, starved, collective, at)
        if rank and chance.random() < 0.1:
            del reports[rank]
    return reports


def test_whoever_is_blamed_has_had_its_time_and_nobody_waits_for_ever():
    for seed in range(300):
        chance = random.Random(seed)
        reports = drawn(chance)
        ranks = max(reports) + 1 + chance.randrange(2)  # the last may be silent, too
        who = names(ranks)
        starved = sum(report.starved for report in reports.values())

        def overdue(report: Report, starved: float = starved) -> bool:
            return report.stalled >= report.limit + min(starved, MOST_STARVED * report.limit)

        diagnosis = diagnose_hang(reports, who)
        shuffled = dict(sorted(reports.items(), key=lambda item: chance.random()))
        assert diagnose_hang(shuffled, who) == diagnosis  # whoever answered first
        asked = 0
        while diagnosis.headline is None:
            assert 0 < diagnosis.wait <= 600 * (1 + MOST_STARVED)
            # No one had a reason to be blamed yet, and after that time nobody has moved.
            assert not any(overdue(report) and report.collective is None for report in reports.values())
            later = {rank: r._replace(stalled=r.stalled + diagnosis.wait + 1e-6) for rank, r in reports.items()}
            reports, asked = later, asked + 1
            assert asked <= len(LIMITS) * ranks
            diagnosis = diagnose_hang(reports, who)
        # Exactly those who are to blame are named before the first comma or semicolon.
        blamed = {
            rank for rank in range(ranks) if who[rank] + " " in diagnosis.headline.split(",")[0].split(";")[0] + " "
        }
        silent = set(range(ranks)) - set(reports)
        if "does not answer" in diagnosis.headline:
            assert blamed == silent
            assert overdue(reports[0])
        elif "keeps the others waiting" in diagnosis.headline:
            assert blamed
            assert all(overdue(reports[rank]) and reports[rank].collective is None for rank in blamed)
        else:
            assert not silent
            assert all(overdue(report) and report.collective for report in reports.values())


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
    assert diagnose_hang(reports, names(len(ranks))).headline == (said and said + "; no step for 1 s after step 7")
    if expected is None:
        assert said is None
    else:
        two = ", ".join(f"rank {rank} on h0 in {collective} at w.py:1, w" for rank, collective in expected)
        assert said == f"ranks wait in different collectives ({two}): all must call the same ones"


def test_ranks_that_call_the_same_in_the_same_order_never_differ():
    for seed in range(100):
        chance = random.Random(3000 + seed)
        order = [chance.choice((LOSS, SYNC, SAVE, EVALUATE)) for _ in range(40)]
        reports = {}
        for rank in range(chance.choice((2, 3, 8))):
            calls = chance.randint(20, 40)
            reports[rank] = in_order(calls, *order[calls - chance.randint(1, 8) : calls])
        assert different_collectives(reports, names(len(reports))) is None
