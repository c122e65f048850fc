"""How busy a machine was with other work, from a /proc of our own."""

import os

import pytest

from hvdtrain.analysis.other_work import Look, look, other_cores, said

TICKS = os.sysconf("SC_CLK_TCK")


def proc(tmp_path, *cores: tuple[int, ...]):
    rows = [f"cpu{n} {' '.join(str(TICKS * seconds) for seconds in row)}" for n, row in enumerate(cores)]
    (tmp_path / "stat").write_text("\n".join(["cpu 9 9 9 9 9 9 9 9 9 9", *rows, "intr 5 6"]) + "\n")
    return tmp_path


def test_work_of_anybody_counts_and_idle_time_does_not(tmp_path):
    root = proc(tmp_path, (1, 2, 3, 1000, 2000, 4, 5, 6, 7, 0), (10, 0, 0, 50, 0, 0, 0, 0, 0, 0), (99,) * 10)
    assert look(root, {0, 1}).busy == 1 + 2 + 3 + 4 + 5 + 6 + 10
    assert look(root, {1}).busy == 10


@pytest.mark.parametrize("content", [None, "", "cpu0 x y\n", "cpu0 0 0 0 0 0 0 0 0 0 0\n"])
def test_a_kernel_that_does_not_say(content, tmp_path):
    if content is not None:
        (tmp_path / "stat").write_text(content)
    assert look(tmp_path, {0}).busy is None
    assert other_cores(look(tmp_path, {0}), Look(1e12, 5.0), 0.0) is None


def test_what_was_measured_is_no_other_work():
    assert other_cores(Look(10, 100), Look(20, 130), 20) == pytest.approx(1.0)
    assert other_cores(Look(10, 100), Look(20, 120), 21) == 0


def test_only_a_busy_machine_is_said():
    assert said([None, None], 2) == said([0.1, None, 0.19], 2) == said([], 2) == ()
    assert said([0.5], 2) == ("busy machine: other work took 0.5 of 2 cores",)
    assert said([0.0, 0.1, 1.2], 2) == ("busy machine: other work took 0.1 of 2 cores, at most 1.2",)
