"""Who hangs: hundreds of generated standstills, and what must follow from each."""

import random

import pytest

from hvdtrain.hangs.activity import Activity
from hvdtrain.hangs.diagnosis import (
    MOST_STARVED,
    TO_ANNOUNCE,
    TO_WATCH_LONGER,
    Report,
    diagnose_hang,
    different_collectives,
)
from hvdtrain.hangs.messages import Stand, decode, encode

LIMITS = {"step": 30.0, "evaluation": 300.0, "first step": 600.0}


def names(ranks: int) -> list[str]:
    return [f"rank {rank} on h{rank // 4}" for rank in range(ranks)]


def waiting(stalled: float = 31.0, **fields) -> Report:
    return Report(**dict(step=7, phase="step", limit=30.0, stalled=stalled, collective="loss", at="w.py:1, w") | fields)


def outside(stalled: float = 31.0, **fields) -> Report:
    return waiting(stalled, **dict(collective=None, at="o.py:2, o") | fields)


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


def test_the_diagnosis_does_not_depend_on_who_comes_first():
    for seed in range(100):
        chance = random.Random(1000 + seed)
        reports = drawn(chance)
        who = names(max(reports) + 1)
        shuffled = dict(sorted(reports.items(), key=lambda item: chance.random()))
        assert diagnose_hang(shuffled, who) == diagnose_hang(reports, who)


def test_ranks_are_named_in_their_order_whoever_answered_first():
    reports = {2: outside(at="b.py:2, g"), 0: waiting(), 1: outside(at="a.py:1, f")}
    assert diagnose_hang(reports, names(3)).headline.startswith(
        "rank 1 on h0 and rank 2 on h0 keeps the others waiting, at a.py:1, f;"
    )


@pytest.mark.parametrize("ranks", [2, 3, 8, 1000])
@pytest.mark.parametrize("culprit", [0, 1])
def test_the_one_outside_is_named_with_its_place(ranks, culprit):
    reports = {rank: waiting() for rank in range(ranks)} | {culprit: outside()}
    said = diagnose_hang(reports, names(ranks)).headline
    assert said == f"rank {culprit} on h0 keeps the others waiting, at o.py:2, o; no step for 31 s after step 7"


def test_a_rank_in_a_long_phase_is_given_its_time_while_the_others_wait_for_it():
    reports = {0: waiting(), 1: outside(phase="evaluation", limit=300.0)}
    assert diagnose_hang(reports, names(2)) == (None, 269.0, 0.0)
    reports = {0: waiting(400.0), 1: outside(300.0, phase="evaluation", limit=300.0)}
    assert "rank 1 on h0 keeps the others waiting" in diagnose_hang(reports, names(2)).headline


def test_progress_inside_a_phase_begins_its_time_anew():
    reports = {0: waiting(4000.0), 1: outside(0.2, phase="evaluation", limit=300.0)}
    assert diagnose_hang(reports, names(2)).wait == pytest.approx(299.8)


def test_the_rank_that_hangs_is_named_though_another_is_in_a_long_phase():
    reports = {0: waiting(), 1: outside(), 2: outside(5.0, phase="checkpoint", limit=600.0)}
    assert diagnose_hang(reports, names(3)).headline.startswith("rank 1 on h0 keeps")


def test_silence_is_blamed_at_once_in_a_step_and_later_in_a_long_phase_unless_known_to_be_stopped():
    assert diagnose_hang({0: waiting()}, names(2)).headline.startswith("rank 1 on h0 does not answer")
    long = {0: outside(31.0, phase="evaluation", limit=300.0)}
    assert diagnose_hang(long, names(2)).wait == 269.0
    assert "rank 2 on h0 does not answer" in diagnose_hang(long, names(3), stopped={2}).headline
    assert "; no progress for 31 s in evaluation, after step 7" in diagnose_hang(long, names(3), stopped={2}).headline


def test_a_lack_of_cores_is_waited_for_up_to_nine_limits():
    reports = {0: waiting(31.0, starved=10.0), 1: outside(31.0, starved=20.0)}
    assert diagnose_hang(reports, names(2)) == (None, 29.0, 30.0)
    reports = {0: waiting(299.0, starved=1e6), 1: outside(299.0)}
    assert diagnose_hang(reports, names(2)).wait == pytest.approx(1.0)
    reports = {0: waiting(300.0, starved=1e6), 1: outside(300.0)}
    assert "keeps the others waiting" in diagnose_hang(reports, names(2)).headline


def test_all_wait():
    together = {0: waiting(), 1: waiting()}
    assert "all ranks wait in a collective (loss): look at the network" in diagnose_hang(together, names(2)).headline
    assert diagnose_hang({0: waiting(), 1: waiting(1.0)}, names(2)).wait == 29.0  # the last has come just now
    behind = {0: waiting(), 1: waiting(step=6)}
    assert diagnose_hang(behind, names(2)).headline.startswith("rank 1 on h0 is behind, at w.py:1, w")
    different = {0: waiting(), 1: waiting(collective="guard.replicas"), 2: waiting()}
    said = diagnose_hang(different, names(3)).headline
    assert "(rank 0 on h0 in loss, rank 1 on h0 in guard.replicas): all must call the same ones" in said


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


def test_more_patience_or_more_time_never_turns_an_end_into_a_wait_or_back():
    """Who is blamed now is blamed later too, and who is not would not be with longer limits."""
    for seed in range(100):
        chance = random.Random(2000 + seed)
        reports = drawn(chance)
        who = names(max(reports) + 1)
        later = {rank: report._replace(stalled=report.stalled + 5.0) for rank, report in reports.items()}
        patient = {rank: report._replace(limit=report.limit + 5.0) for rank, report in reports.items()}
        if diagnose_hang(reports, who).headline is not None:
            assert diagnose_hang(later, who).headline is not None
        else:
            assert diagnose_hang(patient, who).headline is None


@pytest.mark.parametrize(
    ("phase", "announced"),
    [("step", False), ("the end of a step", True), ("between epochs", True), ("evaluation", False)],
)
def test_how_to_announce_work_of_one_rank_is_said_where_programs_do_it(phase, announced):
    reports = {0: waiting(), 1: outside(phase=phase)}
    assert ("no step for" in diagnose_hang({0: waiting(phase=phase), 1: outside()}, names(2)).headline) == (
        phase in ("step", "the end of a step")
    )
    assert ("run.alone()" in diagnose_hang(reports, names(2), remedy=TO_ANNOUNCE).headline) == announced
    assert "announce" not in diagnose_hang(reports, names(2)).headline


@pytest.mark.parametrize("reports", [{0: waiting(), 1: outside()}, {0: waiting()}], ids=["answers", "does not answer"])
def test_a_script_whose_rank_was_sound_is_told_a_longer_limit(reports):
    """Twice the 31 s for which it made no progress. A rank that is stopped by a signal was not at work."""
    hint = " (if it was at work, and not hung: start with --watch 62)"
    assert diagnose_hang(reports, names(2), remedy=TO_WATCH_LONGER).headline.endswith("after step 7" + hint)
    assert "--watch" not in diagnose_hang({0: waiting()}, names(2), stopped=[1], remedy=TO_WATCH_LONGER).headline


def test_between_epochs_a_rank_that_does_not_answer_has_the_limit_of_a_step():
    """Rank 0 has come to the collective that ends an evaluation; rank 1 holds Python's lock. It had 54 s instead of 5."""
    assert (
        "rank 1 on h0 does not answer"
        in diagnose_hang({0: waiting(phase="between epochs", limit=300.0)}, names(2)).headline
    )


def on_gpu(stalled: float = 31.0, **fields) -> Report:
    """A rank whose GPU computes behind its back, at a line that has nothing to do with other ranks."""
    return outside(stalled, **dict(asynchronous=True, at="train.py:9, loss.item()") | fields)


READS = dict(phase="reading data", limit=600.0, at="data.py:3, read")
NEXT = dict(step=8)
GPU_SHAPED = [
    # reports by rank, and whom the headline begins with; None: the job goes on
    # rank 1 still reads its data; the others have queued the step, and wait in the guard's read of the gradients
    ([waiting(asynchronous=True, collective="gradients"), on_gpu(**READS)], None),
    ([waiting(601.0, asynchronous=True, collective="gradients"), on_gpu(601.0, **READS)], "rank 1 on h0 keeps the others"),
    # ... or are a step ahead, and wait at a line of the script that reads the loss
    ([on_gpu(**NEXT), on_gpu(**READS), on_gpu(**NEXT)], None),
    ([on_gpu(601.0, **NEXT), on_gpu(601.0, **READS), on_gpu(601.0, **NEXT)], "rank 1 on h0 keeps the others"),
    # ... or in the queue of kernels, in the backward pass of the next step
    ([on_gpu(**NEXT, at="autograd:1, backward"), on_gpu(at="o.py:2, o")], "rank 1 on h0 keeps the others waiting, at o.py"),
    ([on_gpu(at="o.py:2, o"), on_gpu(**NEXT), waiting(asynchronous=True, **NEXT)], "rank 0 on h0 keeps the others waiting"),
    # two of four hang in their own code
    ([on_gpu(**NEXT), on_gpu(), on_gpu(), on_gpu(**NEXT)], "rank 1 on h0 and rank 2 on h0 keeps the others waiting"),
    # one does not answer at all (stopped, or in a call of CUDA that holds the lock of Python)
    ([on_gpu(**NEXT), None, on_gpu(**NEXT)], "rank 1 on h0 does not answer"),
    # the network between GPUs: all are in the same place, or all have queued everything
    ([waiting(asynchronous=True, collective="gradients")] * 3, "all ranks wait in a collective (gradients): look at"),
    ([waiting(asynchronous=True, collective="gradients"), waiting(asynchronous=True, collective="gradients", **NEXT)],
     "rank 0 on h0 is behind, at w.py:1, w"),
    # one has only just come
    ([on_gpu(**NEXT), on_gpu(1.0)], None),
    # an evaluation or a compilation of one rank has its time
    ([on_gpu(**NEXT), on_gpu(phase="compilation", limit=600.0)], None),
    # the same on CPUs: nobody is ahead of a rank that hangs, so both hang
    ([outside(**NEXT), outside()], "rank 0 on h0 and rank 1 on h0 keeps the others waiting"),
]  # fmt: skip


@pytest.mark.parametrize(("reports", "expected"), GPU_SHAPED)
def test_on_gpus_those_who_wait_for_their_gpu_are_not_blamed(reports, expected):
    """With collectives that are only queued, every rank but the one that hangs waits at a line of its own."""
    answered = {rank: report for rank, report in enumerate(reports) if report is not None}
    said = diagnose_hang(answered, names(len(reports))).headline
    assert said is None if expected is None else said is not None and said.startswith(expected), said


def test_the_monitor_says_whether_the_device_works_on_by_itself():
    activity = Activity()
    activity.asynchronous = True
    report = on_gpu(calls=3, called=("a", "b"))
    assert decode(encode(Stand(report, [])).rstrip()) == Stand(report, [])
