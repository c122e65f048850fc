"""Verdicts on runs that are written here, line by line: what real programs (test_faults.py) seldom show."""

from pathlib import Path

import pytest

from hvdtrain.audit.attempts import Run, Trace
from hvdtrain.audit.verdicts import GUARANTEES, Case, compare_wholes, judge

STEPS = 12
HOLDS = {"ok", "not seen"}


def step(at, **other):
    """The line of step `at`, from 0. A checkpoint is written in each fourth one."""
    before, after = ([f"w{n}", [1, f"s{n}", float(n)]] for n in (at, at + 1))
    file = [at // 4, f"c{at // 4}", 100] if at >= 4 else []
    line = {"key": "SGD a 0", "first": False, "before": before, "after": after, "options": [{"lr": 0.5, "momentum": 0}]}
    line |= {"buffers": "b", "random": {"torch": at, "python": 1}, "rows": [[10 * at, at], [10 * at + 1, -at - 1]]}
    return line | {"loss": [f"{at}.5"], "scale": [], "file": file} | other


def run(start, end, code=0, ranks=1, **other):
    """A run of some of the steps, with an evaluation after steps 4, 8 and 12."""
    traces = {}
    for rank in range(ranks):
        trace = traces[rank] = Trace([step(at, **other) for at in range(start, end)])
        for line in trace.steps[:1]:
            line["first"] = True
        trace.evaluations = {n - start: [[f"in{n}", f"out{n}"]] for n in (4, 8, 12) if start < n <= end}
    return Run(code, 5.0, traces, Path("said"), [], {"c.pt": 100}, None)


def verdicts(resumed, killed=None, again=None, whole=None, **case):
    whole = whole or run(0, STEPS)
    return judge(Case(compare_wholes(whole, again or whole), killed or run(0, 10, -9), resumed, **case))


def failing(*arguments, **case):
    return {name: text for name, (status, text, _) in verdicts(*arguments, **case).items() if status == "fails"}


def test_nothing_fails_from_any_step_on():
    for start in range(4, 11):
        found = verdicts(run(start, STEPS))
        assert {verdict.status for verdict in found.values()} <= HOLDS, found
        assert found["work repeated"].text == f"{10 - start} steps"
        assert found["random numbers"].text == "torch"  # nothing draws from the other
    assert failing(run(11, STEPS)).keys() == {"resumes"}  # the killed run was not there


def test_a_rank_that_was_stopped_within_a_step_that_another_has_saved_has_lost_nothing():
    whole, killed, resumed = run(0, STEPS, ranks=2), run(0, 9, -9, ranks=2), run(9, STEPS, ranks=2)
    del killed.ranks[1].steps[8:]
    found = verdicts(resumed, killed, whole=whole)
    assert {verdict.status for verdict in found.values()} <= HOLDS, found
    del resumed.ranks[1].steps[0]["rows"][1]
    assert "1 lost" in verdicts(resumed, killed, whole=whole)["samples"].text
    killed, resumed = run(0, 1, -9, ranks=2), run(1, STEPS, ranks=2)
    del killed.ranks[1]  # within its first step
    assert verdicts(resumed, killed, whole=whole)["samples"].status == "ok"


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("c.pt.tmp", 1),
        ("tmpx3k_", 1),
        ("c.part", 1),
        ("temp-1", 1),
        ("c.new", 1),
        ("template.json", 0),
        ("partition", 0),
    ],
)
def test_which_names_are_those_of_temporary_files(name, told):
    resumed = run(4, STEPS)
    resumed.files[name] = 1
    assert failing(resumed).keys() == ({"left behind"} if told else set())


def test_whether_it_goes_on():
    empty = run(STEPS, STEPS)
    assert failing(run(8, 9, None)) == {"resumes": "it hangs: no end after 5 s and 1 steps"}
    assert verdicts(empty, run(0, STEPS, -9))["resumes"] == ("ok", "all steps were done", None)
    assert verdicts(empty)["resumes"] == ("fails", "it ends with 0 without a step, after 10 of 12", 11)
    assert failing(run(0, STEPS)) == {"resumes": "it starts over", "work repeated": "all 10 steps"}
    early = verdicts(run(0, STEPS), run(0, 3, -9))
    assert early["resumes"] == ("not seen", "it starts over: no checkpoint was there yet", None)
    for steps, there in ((6, False), (7, True)):  # written before the fifth step; until it is complete, it may be there
        assert bool(failing(run(0, STEPS), run(0, steps, -9))) == there
    bare = run(0, STEPS, file=[])
    text = "it starts over; nothing as large as the weights was written under {out}"
    over = {"whole": bare, "killed": run(0, 9, -9, file=[])}
    assert failing(bare, **over) == {"resumes": text, "work repeated": "all 9 steps"}
    for found in (early, verdicts(run(0, STEPS)), verdicts(bare, **over)):  # it repeats, and nothing was restored
        assert {name for name, one in found.items() if one.status == "ok"} == {"exit codes", "left behind"}
    assert failing(run(8, STEPS), run(0, 5, 0)) == {"resumes": failing(run(8, STEPS), run(0, 5, -9))["resumes"],
                                                    "exit codes": "0 after the kill, with 5 of 12 steps done"}  # fmt: skip
    assert failing(run(8, STEPS), run(0, STEPS, 0)) == {}
    assert failing(run(8, STEPS), run(0, 10, None)).keys() == {"exit codes"}


@pytest.mark.parametrize(("start", "steps", "fails"), [(2, 10, True), (3, 10, False), (2, 9, False), (0, 10, True)])
def test_a_newer_checkpoint_counts_once_it_was_there_for_three_steps(start, steps, fails):
    killed = run(0, steps, -9)
    for at, line in enumerate(killed.ranks[0].steps):
        line["file"] = [[], [1, "one", 100], [2, "two", 100]][(at >= 4) + (at >= 7)]
    said = failing(run(start, STEPS), killed).get("work repeated", "")
    assert said == (f"{steps - start} steps, although two was written before step 8" if fails else "")


def test_where_it_went_on_without_the_weights():
    for start in (5, 8, 10):
        for other, by in (({}, "the optimizer's count of steps"), ({"state": [0, "", 0]}, "samples"),
                          ({"state": [0, "", 0], "rows": []}, "the number of steps that followed")):  # fmt: skip
            resumed = run(start, STEPS)
            for line in resumed.ranks[0].steps:
                line["before"] = ["other", other.get("state", line["before"][1])]
                line["rows"] = other.get("rows", line["rows"])
            none = f"those of no step of the whole run; {by} say: before step {start + 1} (SGD)"
            assert failing(resumed)["weights"] == none


def test_where_weights_stay_the_same_the_rest_tells_the_step():
    """As with a learning rate of 0: optimizer state, samples, options and generators, each alone."""
    still, rows = ["w", [0, "", 0]], [[1, 1]]
    for name in ("before", "rows", "options", "random"):
        same = {"before": still, "after": still, "rows": rows, "options": [], "random": {"torch": 0}}
        whole, resumed = (run(start, STEPS, **{n: v for n, v in same.items() if n != name}) for start in (0, 8))
        for part in (whole, resumed):
            for line in part.ranks[0].steps:
                at = int(float(line["loss"][0]))
                line["options"] = [{"lr": at}] if name == "options" else line["options"]
                line["before"] = ["w", [1, f"s{at}", 0]] if name == "before" else line["before"]
        assert verdicts(resumed, whole=whole)["work repeated"].text == "2 steps", name


def test_nothing_is_ok_that_was_not_compared():
    """An optimizer that has another name than in the whole run; a program whose checkpoints are not seen."""
    for resumed in (run(8, STEPS, key="SGD a 1"), run(8, STEPS, first=False)):
        for line in resumed.ranks[0].steps:
            line["first"] = line["key"] == "SGD a 1"
        found = verdicts(resumed)
        assert (found["weights"].status, found["optimizer state"].status) == ("not seen", "not seen")
    found = verdicts(run(8, STEPS, file=[]), run(0, 10, -9, file=[]), whole=run(0, STEPS, file=[]))
    assert found["work repeated"] == ("not seen", "2 steps; no checkpoint was seen under {out}", None)


def test_the_first_whole_run_reads_weights_and_the_second_one_the_state():
    whole = run(0, STEPS)
    for line in whole.ranks[0].steps:
        line["before"][1] = [-1, "", 0]
    assert verdicts(run(8, STEPS), whole=whole, again=run(0, STEPS))["optimizer state"].status == "ok"


def test_each_difference_is_told():
    def one(name, value, at=2, start=8):
        resumed = run(start, STEPS)
        resumed.ranks[0].steps[at][name] = value
        return failing(resumed)

    assert one("options", [{"lr": 0.25, "momentum": 0}]) == {"learning rates": "step 11: lr 0.25 instead of 0.5"}
    assert one("options", [{"lr": 0.5, "momentum": 1}]) == {"learning rates": "step 11: momentum 1 instead of 0"}
    assert one("options", []) == {"learning rates": "step 11: the number of groups 0 instead of 1"}
    assert one("loss", ["7.0"]) == {"losses": "step 11: loss 7.0 instead of 10.5"}
    assert one("random", {"torch": 0, "python": 1}) == {}  # without effect
    assert one("buffers", "c", 0)["weights"] == "buffers of the model, such as running means, differ"
    assert one("before", ["w8", [0, "", 8.0]], 0) == {"optimizer state": "SGD: for 0 parameters instead of 1"}
    assert one("rows", [[101, -11], [100, 10]]) == {}  # in one batch
    assert one("rows", [[7, 10], [101, -11]])["augmentation"].startswith("other content in 1 of 8 uses")
    assert one("rows", [[1, 4]])["samples"] == "of 24, 2 lost, 1 repeated, from step 11 on"
    assert "saved between micro-batches, and gradients so far are lost" in GUARANTEES["samples"].cause
    other = "of 24, 2 lost, 0 repeated, 2 of content that the whole run never had, from step 11 on"
    assert one("rows", [[1, 77], [1, 78]])["samples"] == other
    other = "of 24, 2 lost, 1 repeated, 1 of content that the whole run never had, from step 11 on"
    assert one("rows", [[1, 4], [1, 78]])["samples"] == other
    resumed = run(8, STEPS)
    for line in resumed.ranks[0].steps:
        line["rows"] = [[content, None] for content, _ in line["rows"]]
    assert failing(resumed) == {}  # then samples are known by their content
    resumed = run(8, STEPS)
    rows = [line["rows"] for line in resumed.ranks[0].steps]
    for line, turned in zip(resumed.ranks[0].steps, reversed(rows), strict=True):
        line["rows"] = turned
    assert failing(resumed) == {"samples": "each as often, in another order, from step 9 on"}
    resumed = run(8, STEPS)
    resumed.ranks[0].steps[0]["random"] = {"torch": 0}
    resumed.ranks[0].steps[-1]["loss"] = ["x"]  # it has an effect, although the weights are the same
    assert failing(resumed).keys() == {"random numbers", "losses"}
    resumed.ranks[0].steps[-1] = step(11, after=["x", None])
    assert failing(resumed) == {"random numbers": "torch from step 9 on", "final weights": "other bits"}


def test_evaluations_and_ranks():
    silent, forgot = run(0, STEPS), run(8, STEPS, random={"torch": 0})
    silent.ranks[0].evaluations = {}
    assert failing(forgot, whole=silent) == {}  # a generator without effect, and no evaluation
    late, other, inputs = run(8, STEPS), run(8, STEPS), run(8, STEPS)
    late.ranks[0].evaluations = {}
    other.ranks[0].evaluations[4] = [["in12", "x"]]
    inputs.ranks[0].evaluations[4] = [["x", "x"]]
    said = [failing(one)["evaluations"] for one in (late, other, inputs)]
    assert said == [f"after step 12: {what}" for what in ("missing", "other results", "other inputs")]
    again = run(8, STEPS)
    again.ranks[0].evaluations[0] = [["in8", "out8"]]  # the one after the checkpoint, once more
    assert failing(again) == {}
    again.ranks[0].evaluations[0] = [["in8", "x"]]
    assert failing(again) == {"evaluations": "after step 8: other results"}
    two = {"whole": run(0, STEPS, ranks=2), "killed": run(0, 10, -9, ranks=2)}
    assert failing(run(8, STEPS), **two)["weights"] == "ranks [1] did not train"
    resumed = run(8, STEPS, ranks=2)
    resumed.ranks[1].steps[0]["loss"] = ["x"]
    assert failing(resumed, **two) == {"losses": "rank 1: step 9: loss x instead of 8.5"}
    found = verdicts(run(8, STEPS), other_ranks=True, **two)
    left = {name for name, verdict in found.items() if verdict.status == "left out"}
    assert left == {"gradient scaler", "random numbers", "augmentation", "losses", "evaluations", "final weights"}


def test_metrics_if_they_are_asked_for():
    whole, resumed = run(0, STEPS), run(8, STEPS)
    assert "metrics" not in verdicts(resumed)
    whole.metrics, resumed.metrics = {"log": "0.5"}, {}
    assert failing(resumed, whole=whole) == {"metrics": "none instead of 0.5 in log"}
    resumed.metrics = {"log": "0.5"}
    assert verdicts(resumed, whole=whole)["metrics"] == ("ok", "0.5", None)
    again = run(0, STEPS)
    again.metrics = {"log": "0.7"}
    assert verdicts(resumed, whole=whole, again=again)["metrics"].status == "left out"


def test_what_differs_between_two_whole_runs_is_left_out():
    whole = compare_wholes(run(0, STEPS), run(0, STEPS, random={"torch": 5, "python": 1}))
    assert (whole.first, whole.generators) == ("they differ from step 1 on: random numbers", set())
    turned = run(0, STEPS)
    for at in (2, 3):
        turned.ranks[0].steps[at]["rows"] = step(5 - at)["rows"]
    whole = compare_wholes(run(0, STEPS), turned)
    assert (whole.differs, whole.ordered, whole.first) == ({}, False, "they differ from step 3 on: samples")
    assert failing(run(9, STEPS), run(0, 10, -9), turned) == {}
    lost = run(8, STEPS)
    lost.ranks[0].steps[1]["rows"] = []
    assert failing(lost, again=turned)["samples"] == "of 24, 2 lost, 0 repeated"
    fewer = run(0, STEPS)
    fewer.ranks[0].steps[2]["rows"] = []
    assert verdicts(lost, again=fewer)["samples"] == ("left out", "two whole runs differ from step 3 on", None)
    for name, value in (("after", ["x", None]), ("loss", ["x"])):
        for at, left in ((7, "left out"), (8, "ok")):
            killed = run(0, 10, -9)
            killed.ranks[0].steps[at][name] = value
            assert verdicts(run(8, STEPS), killed)["final weights"].status == left, (name, at)
