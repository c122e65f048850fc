"""Several seeds of one configuration: which runs are combined, and their mean and spread."""

import pytest
from matplotlib.figure import Figure

from hvdtrain import report
from hvdtrain.analysis.reporting import groups, page, pictures
from hvdtrain.analysis.reporting.groups import fold
from hvdtrain.analysis.reporting.runs import read_runs
from tests.single.analysis.reporting.run_records import WHOLE, Page, end, evaluation, leave, start, step

__all__ = ["leave"]  # a fixture


def ended(seed: int | None, accuracy: float = 0.9, losses=(2.0, 1.0), **more) -> list[dict]:
    """A run that has ended, with this seed."""
    config = {"seed": seed, **more.pop("config", {})}
    lines = [step(100.0 + n, n, loss) for n, loss in enumerate(losses, 1)]
    return [start(100.0, config=config, **more), *lines, evaluation(105.0, loss=0.4, accuracy=accuracy),
            end(test_accuracy=accuracy, samples_per_second=100.0)]  # fmt: skip


def test_runs_that_differ_in_their_seed_alone_are_one(leave):
    host = [{"rank": 0, "host": "b", "pid": 2, "device": "cpu"}]
    runs = read_runs([
        leave("net-seed1", *ended(1)), leave("net-seed2", *ended(2, ranks=host)), leave("other", *ended(1, engine="ddp")),
        leave("net-seed3", *ended(3)), leave("again", *ended(3)), leave("killed", *ended(4)[:-1]),
        leave("none", *ended(None)), leave("slower", *ended(5, config={"lr": 0.5})),
        leave("two hosts", *ended(6, ranks=[*host, host[0] | {"host": "a"}])),
    ])  # fmt: skip
    assert [(group.name, [run.name for run in group.runs]) for group in fold(runs)] == [
        ("net, 3 seeds", ["net-seed1", "net-seed2", "net-seed3"]),
        *((name, [name]) for name in ("other", "again", "killed", "none", "slower", "two hosts")),
    ]
    assert len(fold(runs, each_run=True)) == len(runs)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["mnist-seed1", "mnist-seed12"], "mnist"),
        (["h2-10", "h2-11"], "h2"),
        (["lr0.01-1", "lr0.01-2"], "lr0.01"),
        (["out/ddp/seed1", "out/ddp/seed2"], "out/ddp"),
        (["first", "second"], "first"),
        (["1", "2"], "1"),
    ],
)
def test_a_group_has_what_its_names_have_in_common(names, said):
    assert groups.common(names) == said


def test_two_groups_never_share_a_name(leave):
    runs = read_runs([leave(f"x{n}", *ended(n % 2, config={"lr": n // 2})) for n in range(4)])
    assert [group.name for group in fold(runs)] == ["x, 2 seeds", "x, 2 seeds (2)"]


def test_the_mean_and_its_interval_are_students(leave):
    runs = read_runs([leave(f"r{n}", *ended(n, accuracy)) for n, accuracy in enumerate((0.90, 0.92, 0.97))])
    shown = Page(page.over_seeds(fold(runs)))
    # By hand: mean 0.93, s.d. 0.036056, t(2) = 4.303, so 0.93 -+ 4.303 * 0.036056 / sqrt(3).
    assert shown.row("test accuracy") == ["93.00% (95 %: 84.04% to 101.96%; s.d. 3.61%, n = 3)"]
    assert shown.row("seeds") == ["0, 1, 2"]
    assert page.with_interval([5.0], str) == "5.0 (n = 1)"


def test_the_mean_of_curves_is_point_by_point_and_keeps_gaps():
    nan = float("nan")
    x, y, spread = groups.mean_curve([([1.0, 5.0, 9.0], [1.0, nan, 3.0]), ([3.0, 7.0], [2.0, 1.0])])
    assert (x, y[0], spread[0]) == ([2.0, 6.0], 1.5, pytest.approx(0.5**0.5))
    assert y[1] != y[1], "one seed that diverged is not left out of the mean"


def test_a_curve_has_the_band_of_its_seeds(leave):
    runs = [leave("a", *ended(1, losses=(3, 2, 1))), leave("b", *ended(2, losses=(5, 4, 3)))]
    axes = Figure().subplots()
    pictures.draw_values(axes, fold(read_runs(runs)), "loss", "samples")
    assert [4, 3, 2] in [list(line.get_ydata()) for line in axes.lines]
    ground = axes.collections[0].get_paths()[0].vertices[:, 1]
    assert (min(ground), max(ground)) == (pytest.approx(2 - 2**0.5), pytest.approx(4 + 2**0.5))


def test_the_page_and_figures_for_papers(leave, tmp_path):
    there = [
        leave(f"{engine}-{n}", *ended(n, 0.9 + n / 100, engine=engine)) for engine in ("horovod", "ddp") for n in (1, 2)
    ]
    shown = Page(report.make(there, tmp_path / "report", ["svg", "pdf"]).read_text())
    assert shown.row("test accuracy")[0] == "91.50% (95 %: 85.15% to 97.85%; s.d. 0.71%, n = 2)"
    assert "horovod, 2 seeds" in shown.text
    names = {path.name for path in (tmp_path / "report").iterdir()} - {"report.html"}
    stems = {name.partition(".")[0] for name in names}
    assert {"loss-over-samples", "accuracy-over-seconds", "time-shares", "throughput"} <= stems
    assert names == {f"{stem}.{kind}" for stem in stems for kind in ("png", "svg", "pdf")}
    curve = (tmp_path / "report" / "loss-over-seconds.svg").read_text()
    assert all(f">{label}</text>" in curve for label in ("loss", "time (s)", "ddp, 2 seeds"))


def test_without_other_seeds_nothing_is_said_of_them(leave):
    found = fold(read_runs([leave("one", *WHOLE), leave("two", *WHOLE)]))
    assert "seeds" not in Page(page.build(found, [])).text.lower()


@pytest.mark.parametrize("flags", ["--figures gif", "--figures svg,", "--figures"])
def test_formats_that_are_none(flags, leave):
    with pytest.raises(report.UserError, match=r"not one of svg, pdf|expected one argument"):
        report.parse([str(leave("run", *WHOLE)), *flags.split()])
