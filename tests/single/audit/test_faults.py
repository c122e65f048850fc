"""Each fault of a program is told from every other, and a sound program from all: tests/audited/program.py has them."""

import copy
import shutil
import sys

import pytest

from hvdtrain.audit.attempts import Program
from hvdtrain.audit.verdicts import Case, compare_wholes, judge
from tests.audited import forked

PROGRAM = forked.__file__.replace("forked", "program")
LATER = {"losses", "evaluations", "final weights"}
# Of the second start alone: the guarantees that fail, and a part of what is said of the first of them.
AFTERWARDS = {
    "none": (set(), ""),
    "derived": (set(), ""),  # as Horovod's optimizers: a step within a step
    "nothing": ({"resumes", "work repeated"}, "it starts over"),
    "traceback": ({"resumes", "exit codes"}, "it ends with 1: ValueError: a checkpoint that this program can't read"),
    "weights": ({"weights", *LATER}, "of no step of the whole run; the optimizer's count of steps say: before step 16"),
    "buffers": ({"weights", *LATER - {"losses"}}, "buffers of the model, such as running means, differ"),
    "optimizer": ({"optimizer state", "learning rates", *LATER}, "AdamW: for 0 parameters instead of 6"),
    "scheduler": ({"learning rates", *LATER}, "step 17: lr 0.00628212 instead of 0.00586824"),
    "scaler": ({"gradient scaler", "losses"}, "step 16: scale and count 1024.0, 0 instead of 8192.0, 0"),
    "random": ({"random numbers", *LATER}, "torch from step 16 on"),
    "samples": ({"samples", "number of steps", *LATER}, "of 288, 0 lost, 24 repeated, from step 16 on"),
    "rest": ({"samples", "number of steps", *LATER}, "of 288, 72 lost, 0 repeated, from step 16 on"),
    "augmentation": ({"augmentation", *LATER}, "other content in 168 of 168 uses of the same samples, from step 16 on"),
    "loss": (LATER, "step 16: "),
    "average": ({"evaluations"}, "after step 24: other results"),
    "processes": ({"left behind"}, ", such as sleep 600"),
}  # fmt: skip
# Of both starts: the place and the kind of the kill, too.
THROUGHOUT = {
    "none": ("file", "one", set(), ""),
    "torn": ("file", "one", {"resumes", "exit codes"}, "it ends with 1: "),
    "files": ("file", "one", {"left behind"}, "1 temporary files, such as checkpoint.pt."),
    "two": ("between", "one", {"samples", "number of steps", *LATER}, "of 288, 0 lost, 24 repeated, from step 19 on"),
    "term": ("step", "term", {"exit codes"}, "0 after SIGTERM, with "),
    "older": ("step", "one", {"work repeated"}, "13 steps, although checkpoint.pt was written before step 13"),
}


class Audited:
    """Two whole runs of a sound program, and one that was killed after step 16."""

    def __init__(self, folder, server, ranks):
        self.folder, self.server, self.ranks = folder, server, ranks
        whole, again = self.run("whole", "none"), self.run("again", "none")
        assert (whole.code, again.code, sorted(whole.ranks)) == (0, 0, list(range(ranks)))
        self.whole = compare_wholes(whole, again)
        self.killed = self.run("killed", "none", kill={"place": "step", "number": 16, "rank": ranks - 1, "how": "one"})
        assert self.killed.code < 0

    def run(self, name, fault, out=None, kill=None, ranks=None):
        ranks = ranks or self.ranks
        line = [sys.executable, forked.__file__, "run", self.server, str(ranks), PROGRAM, "{out}", fault]
        program = Program(line, "none", self.folder, 60.0, leaving_seconds=2.0)
        return program.run(name, out or self.folder / f"out-{name}", ranks, 250.0, kill, name == "whole")

    def failing(self, killed, resumed, how="one", other_ranks=False):
        verdicts = judge(Case(self.whole, killed, resumed, how, other_ranks))
        wrong = {name: verdict.text for name, verdict in verdicts.items() if verdict.status == "fails"}
        return set(wrong), next(iter(wrong.values()), ""), verdicts


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.slow)])
def audited(request, server, tmp_path_factory):
    return Audited(tmp_path_factory.mktemp("audited"), server, request.param)


@pytest.mark.parametrize("fault", AFTERWARDS)
def test_told_apart(fault, audited):
    out = audited.folder / f"out-{fault}"
    shutil.copytree(audited.folder / "out-killed", out)
    expected, said = AFTERWARDS[fault]
    failing, text, verdicts = audited.failing(audited.killed, audited.run(fault, fault, out))
    assert (failing, said in text) == (expected, True), verdicts
    assert {verdict.status for verdict in verdicts.values()} <= {"ok", "fails", "not seen"}


@pytest.mark.parametrize("fault", THROUGHOUT)
def test_told_apart_by_a_kill_of_its_own(fault, audited):
    place, how, expected, said = THROUGHOUT[fault]
    number = {"step": 16, "file": 17, "between": 18}[place]
    kill = {"place": place, "number": number, "rank": None if place == "file" else 0, "how": how, "change": 2}
    kill["bytes"] = audited.whole.run.ranks[0].steps[-1]["file"][2] // 2
    name = f"{fault}-{place}"
    killed = audited.run(f"{name}-killed", fault, kill=kill)
    out = audited.folder / f"out-{name}-killed"
    failing, text, verdicts = audited.failing(killed, audited.run(f"{name}-resumed", fault, out), how)
    assert (failing, said in text) == (expected, True), verdicts
    if place == "file":
        assert kill["bytes"] in killed.files.values()  # the kernel has stopped in the middle of it
        assert killed.code < 0  # the program could clean up nothing


@pytest.mark.parametrize(
    ("fault", "expected", "said"),
    [
        ("none", set(), ""),
        ("weights", {"weights"}, "the optimizer's count of steps say: before step 16"),
        ("samples", {"samples"}, "of 288, 0 lost, 24 repeated"),
        ("rest", {"samples"}, "of 288, 72 lost, 0 repeated"),
    ],
)
def test_another_number_of_ranks(fault, expected, said, audited):
    """Samples are counted over all ranks; bits, and their order, are not compared."""
    if audited.ranks > 1:
        pytest.skip("from one rank to two: the reverse is read by the same lines")
    out = shutil.copytree(audited.folder / "out-killed", audited.folder / f"out-{fault}-two")
    resumed = audited.run(f"{fault}-two", fault, out, ranks=2)
    failing, text, verdicts = audited.failing(audited.killed, resumed, other_ranks=True)
    assert (failing, said in text) == (expected, True), verdicts
    left_out = {name for name, verdict in verdicts.items() if verdict.status == "left out"}
    assert left_out >= {"gradient scaler", "random numbers", "augmentation", "losses", "evaluations", "final weights"}


def test_nothing_is_judged_that_was_not_seen(audited):
    """Where two whole runs differ, by a seed of the clock: bits are left out, the order of samples and the rest are not."""
    if audited.ranks > 1:
        pytest.skip("on one rank: what is compared does not depend on their number")
    out = shutil.copytree(audited.folder / "out-killed", audited.folder / "out-unseeded")
    resumed = audited.run("unseeded", "unseeded", out)
    whole = compare_wholes(audited.whole.run, audited.run("again-unseeded", "unseeded"))
    verdicts = judge(Case(whole, audited.killed, resumed))
    left_out = {name for name, verdict in verdicts.items() if verdict.status == "left out"}
    assert left_out >= {"weights", "losses", "final weights", "random numbers", "gradient scaler", "optimizer state"}
    assert {verdicts[name].status for name in ("resumes", "samples", "learning rates", "number of steps")} == {"ok"}
    again = audited.run("none-again", "none", audited.folder / "out-killed")
    blind = copy.deepcopy((audited.whole, audited.killed, again))
    for run in (blind[0].run, *blind[1:]):
        for step in run.ranks[0].steps:
            step.update(rows=[], loss=[])
        run.ranks[0].evaluations.clear()
    verdicts = judge(Case(*blind))
    assert {verdicts[name].status for name in ("samples", "augmentation", "losses", "evaluations")} == {"not seen"}


def test_the_state_of_another_run(audited):
    kill = {"place": "step", "number": 30, "rank": 0, "how": "one"}
    audited.run("later", "none", kill=kill)
    failing, text, _ = audited.failing(audited.killed, audited.run("mixed-up", "none", audited.folder / "out-later"))
    assert failing == {"resumes"}
    assert text.startswith("it begins before step 28, and the killed run had done 16: it found another run's state.")
