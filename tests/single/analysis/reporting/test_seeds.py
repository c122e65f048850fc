"""Seeds of one configuration as one: which runs belong together, their mean and spread, and what the page says of them."""

import json

import pytest
from matplotlib.figure import Figure

from hvdtrain import report
from hvdtrain.analysis.reporting import curves, page, seeds
from hvdtrain.analysis.reporting.runs import read_runs
from hvdtrain.analysis.reporting.seeds import fold
from tests.single.analysis.reporting.run_records import END, WHOLE, Page, evaluation, leave, start, step

__all__ = ["leave"]  # a fixture


def ended(seed: int | None, accuracy: float = 0.9, pace: float = 1.0, losses=(3.0, 2.0, 1.0), **more) -> list[dict]:
    """A run with a step each `pace` seconds."""
    config = {"seed": seed, "output_dir": f"out-{seed}"} | more.pop("config", {})
    steps = [step(100.0 + pace * n, n, loss, samples_per_second=100 / pace) for n, loss in enumerate(losses, 1)]
    result = END | {"test_accuracy": accuracy, "train_seconds": 5.0 * pace, "samples_per_second": 100 / pace}
    return [start(100.0, config=config, **more), *steps, evaluation(105.0, accuracy), result]


def test_runs_that_differ_in_their_seed_alone_are_one(leave):
    host = [{"rank": 0, "host": "b", "pid": 2, "device": "cpu"}]
    found = fold(read_runs([
        leave("net-seed1", *ended(1)), leave("net-seed2", *ended(2, ranks=host)), leave("other", *ended(1, engine="ddp")),
        leave("net-seed3", *ended(3)), leave("again", *ended(3)), leave("killed", *ended(4)[:-1]),
        leave("none", *ended(None)), leave("slower", *ended(5, config={"lr": 0.5})),
        leave("two hosts", *ended(6, ranks=[*host, host[0] | {"host": "a"}])),
    ]))  # fmt: skip
    assert [(group.name, [run.name for run in group.runs]) for group in found] == [
        ("net, 3 seeds", ["net-seed1", "net-seed2", "net-seed3"]),
        *((name, [name]) for name in ("other", "again", "killed", "none", "slower", "two hosts")),
    ]
    assert [run.place for group in found for run in group.runs] == [0, 0, 0, 1, 2, 3, 4, 5, 6]


def test_each_run_alone_where_it_is_asked_for(leave):
    runs = read_runs([leave("a1", *ended(1)), leave("a2", *ended(2))])
    assert [group.name for group in fold(runs, each_run=True)] == ["a1", "a2"]
    assert [group.name for group in fold(runs)] == ["a, 2 seeds"]


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
    assert seeds.common(names) == said


def test_two_groups_never_share_a_name(leave):
    runs = read_runs([leave(f"x{n}", *ended(n % 2, config={"lr": n // 2})) for n in range(4)])
    assert [group.name for group in fold(runs)] == ["x, 2 seeds", "x, 2 seeds (2)"]


def test_the_mean_and_its_interval_are_students(leave):
    (group,) = fold(read_runs([leave(f"r{n}", *ended(n, accuracy)) for n, accuracy in enumerate((0.90, 0.92, 0.97))]))
    found = {figure.label: figure for figure in seeds.figures(group, lambda value, result: f"{value:.4f}")}
    # By hand: mean 0.93, s.d. 0.036056, t(2) = 4.303, so 0.93 -+ 4.303 * 0.036056 / sqrt(3).
    assert seeds.summary(found["test accuracy"]) == "0.9300 (95 %: 0.8404 to 1.0196; s.d. 0.0361, n = 3)"
    assert found["throughput"].values == [100.0] * 3
    assert "n = 1" in seeds.summary(found["training"]._replace(values=[5.0]))


def test_curves_of_other_places_are_put_together_where_all_have_values():
    line = seeds.mean_line([([1.0, 3.0, 5.0], [0.0, 2.0, 4.0]), ([2.0, 4.0], [3.0, 5.0])])
    assert (line.x[0], line.x[-1], len(line.x)) == (2.0, 4.0, seeds.POINTS)
    assert (line.y[0], line.y[-1]) == (pytest.approx(2.0), pytest.approx(4.0))
    assert line.spread[0] == pytest.approx(2**0.5)
    assert (
        seeds.mean_line([([1.0], [0.0]), ([2.0], [0.0])]) == seeds.mean_line([([], []), ([2.0], [0.0])]) == ([], [], [])
    )
    gap = seeds.mean_line([([1, 2], [1.0, float("nan")]), ([1, 2], [1.0, 1.0])])
    assert gap.y[0] == 1.0
    assert gap.y[1] != gap.y[1], "one seed that diverged is not left out of the mean"
    dots = seeds.mean_dots([([1.0, 5.0, 9.0], [1.0, 2.0, 3.0]), ([3.0, 7.0], [2.0, float("inf")])])
    assert (dots.x, dots.y[0], dots.spread[0]) == ([2.0, 6.0], 1.5, pytest.approx(0.5**0.5))
    assert dots.y[1] != dots.y[1]


def test_a_curve_has_the_band_of_its_seeds(leave):
    groups = fold(read_runs([leave("a", *ended(1, losses=(3, 2, 1))), leave("b", *ended(2, losses=(5, 4, 3)))]))
    figure = Figure()
    curves.curves(figure, groups, "loss", "samples")
    (axes,) = figure.axes
    lines = [list(line.get_ydata()) for line in axes.lines if len(line.get_ydata()) == 3]
    assert lines == [[4, 3, 2]]
    ground = axes.collections[0].get_paths()[0].vertices[:, 1]
    assert (min(ground), max(ground)) == (pytest.approx(2 - 2**0.5), pytest.approx(4 + 2**0.5))


def test_a_band_below_0_does_not_stretch_a_logarithmic_axis(leave):
    groups = fold(
        read_runs([leave("a", *ended(1, losses=(9, 0.5, 0.01))), leave("b", *ended(2, losses=(9, 0.5, 2.0)))])
    )
    figure = Figure()
    curves.curves(figure, groups, "loss", "samples")
    assert figure.axes[0].get_yscale() == "log"
    assert figure.axes[0].get_ylim()[0] == pytest.approx(0.008)


def test_time_shares_of_seeds_have_a_spread(leave):
    ranks = [dict(event="ranks", time=104.0, loading_seconds=[0, 0], compute_seconds=[c, c],
                  communication_seconds=[10 - c] * 2, elapsed_seconds=[10, 10]) for c in (6, 8)]  # fmt: skip
    records = [[*ended(n)[:-1], ranks[n], ended(n)[-1]] for n in range(2)]
    (group,) = fold(read_runs([leave(f"r{n}", *record) for n, record in enumerate(records)]))
    found = seeds.shares(group)
    assert found["compute"] == (pytest.approx(0.7), pytest.approx(0.02**0.5))
    assert set(found) == {"compute", "communication"}


def test_the_page_and_figures_for_papers(leave, tmp_path):
    there = [
        leave(f"{engine}-{n}", *ended(n, 0.9 + n / 100, engine=engine)) for engine in ("horovod", "ddp") for n in (1, 2)
    ]
    path = report.make(there, tmp_path / "report", ["svg", "pdf"])
    shown = Page(path.read_text())
    assert "Over seeds" in shown.text
    assert "91.50% (95 %: 85.15% to 97.85%; s.d. 0.71%, n = 2)" in shown.text
    assert "horovod, 2 seeds" in shown.text
    names = {path.name for path in (tmp_path / "report").iterdir()} - {"report.html"}
    stems = {name.partition(".")[0] for name in names}
    assert {"loss-over-samples", "seeds-test-accuracy", "time-shares", "throughput"} <= stems
    assert names == {f"{stem}.{kind}" for stem in stems for kind in ("png", "svg", "pdf")}
    curve = (tmp_path / "report" / "loss-over-seconds.svg").read_text()
    assert all(f">{label}</text>" in curve for label in ("loss", "time (s)", "ddp, 2 seeds"))
    again = report.make(there, tmp_path / "again", ["svg", "pdf"], each_run=True).read_text()
    assert "Over seeds" not in again
    kept = {path.name: path.read_bytes() for path in (tmp_path / "report").glob("*-over-*")}
    report.make(there, tmp_path / "report", ["svg", "pdf"])
    assert kept == {path.name: path.read_bytes() for path in (tmp_path / "report").glob("*-over-*")}


def test_without_other_seeds_nothing_is_said_of_them(leave):
    groups = fold(read_runs([leave("one", *WHOLE), leave("two", *WHOLE)]))
    assert "seeds" not in Page(page.build(groups, [])).text.lower()


@pytest.mark.parametrize("flags", ["--figures gif", "--figures svg,", "--figures"])
def test_formats_that_are_none(flags, leave):
    there = leave("run", *map(json.loads, map(json.dumps, WHOLE)))
    with pytest.raises(report.UserError, match=r"not one of svg, pdf|expected one argument"):
        report.parse([str(there), *flags.split()])
