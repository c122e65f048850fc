"""The page and its plots: of runs of every kind, with hostile names, and nothing that a browser would run."""

import json

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hvdtrain import report
from hvdtrain import report as page
from hvdtrain.engines.errors import UserError
from hvdtrain.output.recorded_runs import Attempt, RecordedRun, read_runs
from tests.single.examples import changed, tried
from tests.single.output.run_records import (
    HOSTILE,
    KINDS,
    LANGUAGE,
    LOSS,
    WHOLE,
    Page,
    evaluation,
    leave,
    start,
    step,
    steps,
)

__all__ = ["leave"]  # a fixture


@pytest.fixture(autouse=True)
def coarse(monkeypatch):
    monkeypatch.setattr("hvdtrain.report.DPI", 40)  # as good for what is looked at here


PICTURES = {
    "classifier": ["Loss (line: training, dots: test set)", "Accuracy (line: training, dots: test set)"],
    "regression": ["Loss (line: training, dots: test set)"],
    "language": ["Loss (line: training, dots: validation set)",
        "Perplexity (dots: validation set, triangles: evaluations)"],
    "gan": ["Critic loss (line: training)", "Generator loss (line: training)"],
}  # fmt: skip
SHOWN = {
    "classifier": {"test accuracy": "90.00% of 500", "test loss": "0.4 of 500", "samples/s": "51"},
    "regression": {"test loss": "0.5 of 500", "best test loss": "0.25 in epoch 1"},
    "language": {"validation loss": "1.5 of 500", "perplexity": "4.48 of 500", "tokens/s": "1,000,000"},
    "gan": {"training critic loss": "2", "training generator loss": "0.5"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_of_any_kind_is_shown_and_nothing_is_called_damaged(kind, leave, tmp_path):
    there = leave("run", *KINDS[kind])
    (run,) = read_runs([there])
    assert (run.notes, run.state) == ([], "ended")
    figures = page.figures(run)
    assert {name: figures[name] for name in SHOWN[kind]} == SHOWN[kind]
    assert not {name for name in figures if "accuracy" in name and kind != "classifier"}
    shown = Page(report.make_report([there], tmp_path / "report").read_text())
    rate, time = (
        "Samples per second, over all ranks (line: training)",
        "Time by phase: share of the time spent training",
    )
    assert shown.pictures == [*PICTURES[kind], rate, *[time] * (kind == "classifier")]
    images = [source for source in shown.sources if source.startswith("data:image/png;base64,iVBORw0KGgo")]
    assert len(images) == len(shown.pictures)
    assert all(source.startswith("data:") for source in shown.sources)
    assert not shown.tags & {"script", "iframe", "object", "embed", "form"}


def empty_axes():
    from matplotlib.figure import Figure

    return Figure().subplots()


def test_the_whole_time_has_the_start_of_the_process_as_the_summary_has_it():
    """It said 0.122 s, and the summary 5.17."""
    attempt = Attempt(began=5.0, before=0.0, ran=0.122)
    run = RecordedRun("run", attempts=[attempt], summary={"total_seconds": 5.17})
    assert page.figures(run)["in all"] == "5.2 s"


def test_runs_of_all_kinds_are_compared(leave, tmp_path):
    shown = Page(
        report.make_report([leave(kind, *lines) for kind, lines in KINDS.items()], tmp_path / "report").read_text()
    )
    assert {"Loss (line: training, dots: test set, triangles: validation set)", "Critic loss (line: training)"} <= set(
        shown.pictures
    )
    assert shown.row("test loss") == ["0.4 of 500", "0.5 of 500", "-", "-"]
    assert shown.row("best test loss") == ["-", "0.25 in epoch 1", "-", "-"]


def test_hostile_names_stay_text(leave, tmp_path):
    there = leave(HOSTILE.replace("/", ""), start(100.0, config={HOSTILE: HOSTILE}, reason=HOSTILE, engine=HOSTILE,
                  ranks=[{"host": HOSTILE}], automatic=[HOSTILE], versions={HOSTILE: HOSTILE}), *WHOLE[1:-1],
                  {"event": "error", "time": 107.0, "kind": "failure", "message": HOSTILE})  # fmt: skip
    shown = Page(report.make_report([there, leave("other", *WHOLE)], tmp_path / "report").read_text())
    assert "script" not in shown.tags
    assert not shown.handlers
    assert shown.text.count(HOSTILE) >= 6
    assert "<script>alert(1)<script>" in shown.text, "the directory"


def test_hostile_and_many_names_of_values(leave, tmp_path, monkeypatch):
    monkeypatch.setattr(page, "MOST_VALUES", 5)
    named = {f"value {n}": lambda n: 0.5 for n in range(7)} | dict.fromkeys((HOSTILE, "../up", "%"), lambda n: 1)
    metrics = {HOSTILE: {"direction": "min", "percent": True}, "../up": LOSS["loss"], "%": LOSS["loss"]}
    there = leave(
        "run", start(100.0, metrics=metrics), *steps(**named), evaluation(105.0, 1, HOSTILE, **{HOSTILE: 1.0})
    )
    shown = Page(report.make_report([there], tmp_path / "report").read_text())
    assert "script" not in shown.tags
    assert HOSTILE.replace("_", " ") in shown.text
    assert {"../up (line: training)", "% (line: training)", "Value 0 (line: training)"} <= set(shown.pictures)
    assert len(shown.pictures) == 5 + 1
    assert "value 6" in shown.text, "said that it is not drawn"
    assert {path.name for path in tmp_path.iterdir()} == {"run", "report"}


def test_two_sets_of_data_are_told_apart(leave):
    lines = [evaluation(104.5, 1, "validation", loss=0.5), evaluation(105.0, 1, loss=0.6)]
    (run,) = read_runs([leave("run", start(100.0, metrics=LOSS), *steps(), *lines)])
    assert page.caption([run], "loss") == "Loss (line: training, dots: validation set, triangles: test set)"
    assert list(page.figures(run))[:2] == ["validation loss", "test loss"]


@pytest.mark.parametrize(
    ("metric", "values", "scale"),
    [
        (LOSS["loss"], (2.4, 1.0, 0.4), "linear"),
        (LOSS["loss"], (2.4, 0.5, 0.25), "log"),
        (LOSS["loss"], (2.0, 0.0), "linear"),
        ({"direction": "max", "percent": True}, (0.1, 0.6, 0.9), "linear"),
    ],
)
def test_the_axis_fits_the_values(metric, values, scale, leave):
    lines = [step(101.0 + n, n, None, score=value) for n, value in enumerate(values, 1)]
    found = read_runs([leave("run", start(100.0, metrics={"score": metric}), *lines)])
    axes = empty_axes()
    page.draw_values(axes, found, "score", "samples")
    assert axes.get_yscale() == scale
    axes.figure.draw_without_rendering()
    assert not [label for label in axes.get_yticklabels(which="both") if "$" in label.get_text()]
    assert axes.lines[0].get_xydata().tolist() == [[64.0 * n, value] for n, value in enumerate(values, 1)]


@pytest.mark.parametrize(
    "lines",
    [WHOLE[:1], [*WHOLE[:2], step(102.0, 2, float("nan")), step(103.0, 3, float("inf"))], [WHOLE[0], *WHOLE[5:]]],
    ids=["no step", "not finite", "no loss of training"],
)
def test_little_or_nothing_can_be_drawn(lines, leave, tmp_path):
    shown = Page(report.make_report([leave("run", *lines)], tmp_path / "report").read_text())
    assert ("img" in shown.tags) == (len(lines) > 1)


def test_what_cannot_be_written_or_drawn_is_said_with_the_remedy(leave, tmp_path, monkeypatch):
    there = leave("run", *WHOLE)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"--output-dir .* cannot be written .*: name another"):
        report.make_report([there], tmp_path / "file")
    monkeypatch.setattr("sys.argv", ["hvdtrain.report", str(there), "--output-dir", str(tmp_path / "to")])
    monkeypatch.setattr("hvdtrain.report.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'hvdtrain\[plot\]'$"):
        report.main()
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    with pytest.raises(UserError, match="start it without a launcher"):
        report.main()


@tried(15)
@given(data=st.data())
def test_any_record_with_metrics_makes_a_page(data, tmp_path):
    whole = [line | {"elapsed": line["time"] - 90.0} for line in LANGUAGE]
    resumed = {"event": "resume", "time": 120.0, "step": 2}
    lines = data.draw(changed([*whole, whole[0], resumed, *whole[1:]]))
    assume(isinstance(lines, list))
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    try:
        found = read_runs([tmp_path])
    except UserError:  # no line with a start
        return
    page.build(found, [])
    for name in page.names_to_draw(found):
        page.draw_values(empty_axes(), found, name, "seconds")


def test_two_plots_stand_side_by_side_and_curves_can_be_told_apart():
    def lines(axes) -> None:
        for place, name in enumerate(("horovod $x$ & <co>", "ddp", "a name that is longer than the others")):
            axes.plot([1, 2], [place, 1], label=name, **page.look(place))

    one, two = (int.from_bytes(page.png([lines] * count)[16:20]) for count in (1, 2))
    assert two == 2 * one
    looks = [page.look(place) for place in range(12)]
    assert len({(look["color"], look["linestyle"]) for look in looks}) == 12
    assert len({look["color"] for look in looks[:6]}) == 6
