"""The page and its plots: of runs of every kind, with hostile names, and nothing that a browser would run."""

import json

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hvdtrain import report
from hvdtrain.analysis.reporting import page, pictures
from hvdtrain.analysis.reporting.runs import Attempt, RecordedRun, read_runs
from hvdtrain.engines.errors import UserError
from tests.single.analysis.reporting.run_records import (
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
from tests.single.examples import changed, tried

__all__ = ["leave"]  # a fixture


@pytest.fixture(autouse=True)
def coarse(monkeypatch):
    monkeypatch.setattr("hvdtrain.analysis.plotting.DPI", 40)  # as good for what is looked at here


PICTURES = {
    "classifier": ["Loss over samples", "Loss over seconds", "Accuracy over samples", "Accuracy over seconds"],
    "regression": ["Loss over samples", "Loss over seconds"],
    "language": ["Loss over samples", "Loss over seconds", "Perplexity over samples", "Perplexity over seconds"],
    "gan": [f"{name} loss over {axis}" for name in ("Critic", "Generator") for axis in ("samples", "seconds")],
    "watched": [],
}
SHOWN = {
    "classifier": {"test accuracy": "90.00% of 500", "test loss": "0.4000 of 500", "throughput": "51 samples/s"},
    "regression": {"test loss": "0.5000 of 500", "best test loss": "0.2500 in epoch 1"},
    "language": {"validation loss": "1.5000 of 500", "perplexity": "4.4800 of 500",
                 "throughput": "51 samples/s, 1,000,000 tokens/s"},
    "gan": {"training critic loss": "2.0000", "training generator loss": "0.5000"},
    "watched": {"in all": "2 s", "throughput": "40 steps/s", "steps": "40"},
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_of_any_kind_is_shown_and_nothing_is_called_damaged(kind, leave, tmp_path):
    there = leave("run", *KINDS[kind])
    (run,) = read_runs([there])
    assert (run.notes, run.state) == ([], "ended")
    figures = page.figures(run)
    assert {name: figures[name] for name in SHOWN[kind]} == SHOWN[kind]
    assert not {name for name in figures if "accuracy" in name and kind != "classifier"}
    shown = Page(report.make([there], tmp_path / "report").read_text())
    assert shown.pictures == [*PICTURES[kind], "Time by phase", *["Throughput"] * (kind != "watched")]
    images = [source for source in shown.sources if source.startswith("data:image/png;base64,iVBORw0KGgo")]
    assert len(images) == len(shown.pictures)
    assert all(source.startswith("data:") for source in shown.sources)
    assert not shown.tags & {"script", "iframe", "object", "embed", "form"}
    assert ("Learning" in shown.text) == (kind != "watched")


def empty_axes():
    from matplotlib.figure import Figure

    return Figure().subplots()


def test_the_whole_time_has_the_start_of_the_process_as_the_summary_has_it():
    """It said 0.122 s, and the summary 5.17."""
    attempt = Attempt(began=5.0, before=0.0, ran=0.122)
    run = RecordedRun("run", attempts=[attempt], summary={"total_seconds": 5.17})
    run.train.append({"step": 3.0, "samples": None, "values": {}})
    assert page.figures(run)["in all"] == "5.17 s"


def test_times_below_a_second_are_not_thousandths():
    axes = empty_axes()
    axes.plot([0.0, 0.1], [1, 2])
    pictures.finish(axes, "seconds")
    assert axes.get_xlabel() == "time (s)"
    assert axes.xaxis.get_major_formatter()(0.05) != "50m"


def test_runs_of_all_kinds_are_compared(leave, tmp_path):
    shown = Page(report.make([leave(kind, *lines) for kind, lines in KINDS.items()], tmp_path / "report").read_text())
    drawn = {"Loss over steps", "Critic loss over steps", "Throughput"}
    assert drawn <= set(shown.pictures), "one of them counts no samples"
    assert shown.row("test loss") == ["0.4000 of 500", "0.5000 of 500", "-", "-", "-"]
    assert shown.row("best test loss") == ["-", "0.2500 in epoch 1", "-", "-", "-"]
    assert shown.row("steps") == ["-", "-", "-", "-", "40"]


def test_hostile_names_stay_text(leave, tmp_path):
    there = leave(HOSTILE.replace("/", ""), start(100.0, config={HOSTILE: HOSTILE}, reason=HOSTILE, engine=HOSTILE,
                  ranks=[{"host": HOSTILE}], automatic=[HOSTILE], versions={HOSTILE: HOSTILE}), *WHOLE[1:-1],
                  {"event": "error", "time": 107.0, "kind": "failure", "message": HOSTILE})  # fmt: skip
    shown = Page(report.make([there, leave("other", *WHOLE)], tmp_path / "report").read_text())
    assert "script" not in shown.tags
    assert not shown.handlers
    assert shown.text.count(HOSTILE) >= 6
    assert "<script>alert(1)<script>" in shown.text, "the directory"


def test_hostile_and_many_names_of_values(leave, tmp_path, monkeypatch):
    monkeypatch.setattr(pictures, "MOST_VALUES", 5)
    named = {f"value {n}": lambda n: 0.5 for n in range(7)} | dict.fromkeys((HOSTILE, "../up", "%"), lambda n: 1)
    metrics = {HOSTILE: {"direction": "min", "percent": True}, "../up": LOSS["loss"], "%": LOSS["loss"]}
    there = leave(
        "run", start(100.0, metrics=metrics), *steps(**named), evaluation(105.0, 1, HOSTILE, **{HOSTILE: 1.0})
    )
    shown = Page(report.make([there], tmp_path / "report").read_text())
    assert "script" not in shown.tags
    assert HOSTILE.replace("_", " ") in shown.text
    assert {"../up over samples", "% over samples", "Value 0 over seconds"} <= set(shown.pictures)
    assert len(shown.pictures) == 2 * 5 + 2
    assert "value 6" in shown.text, "said that it is not drawn"
    assert {path.name for path in tmp_path.iterdir()} == {"run", "report"}


def test_two_sets_of_data_are_told_apart(leave):
    lines = [evaluation(104.5, 1, "validation", loss=0.5), evaluation(105.0, 1, loss=0.6)]
    (run,) = read_runs([leave("run", start(100.0, metrics=LOSS), *steps(), *lines)])
    assert pictures.caption([run], "loss") == "line: training, dots: validation set, hollow: test set"
    assert list(page.figures(run))[:2] == ["validation loss", "test loss"]


@pytest.mark.parametrize(
    ("metric", "values", "scale", "limits"),
    [
        (LOSS["loss"], (2.4, 1.0, 0.4), "linear", None),
        (LOSS["loss"], (2.4, 0.5, 0.1), "log", None),
        (LOSS["loss"], (2.0, 0.0), "linear", None),
        # Percents: from a tenth of training on.
        ({"direction": "max", "percent": True}, (0.1, *[0.6, 0.8] * 10), "linear", (0.58, 0.82)),
        ({"direction": "min", "percent": True}, (0.9, *[0.2, 0.1] * 10), "linear", (0.09, 0.21)),
    ],
)
def test_the_axis_fits_the_values(metric, values, scale, limits, leave):
    lines = [step(101.0 + n, n, None, score=value) for n, value in enumerate(values, 1)]
    (run,) = read_runs([leave("run", start(100.0, metrics={"score": metric}), *lines)])
    axes = empty_axes()
    pictures.scale(axes, [run], "score")
    assert axes.get_yscale() == scale
    if limits:
        assert axes.get_ylim() == pytest.approx(limits)


def test_every_evaluation_of_a_percentage_lies_within_the_plot(leave, tmp_path, recwarn):
    # Their dots are not clipped: outside of the axes, they would leave no room for the axes and their numbers.
    lines = [step(100.0 + n, n, accuracy=0.1 if n == 1 else 0.9) for n in range(1, 21)]
    there = leave("run", start(100.0), *lines[:1], evaluation(101.5, 1, accuracy=0.2), *lines[1:])
    axes = empty_axes()
    pictures.scale(axes, read_runs([there]), "accuracy")
    assert axes.get_ylim() == pytest.approx((0.13, 0.97))
    report.make([there], tmp_path / "report")
    assert [str(warning.message) for warning in recwarn] == []


def test_long_curves_get_a_running_mean():
    assert pictures.running_mean([1.0, 3.0, 5.0, 2.0], 2) == [1, 2, 4, 3.5]


@pytest.mark.parametrize(
    "lines",
    [WHOLE[:1], [*WHOLE[:2], step(102.0, 2, float("nan")), step(103.0, 3, float("inf"))], [WHOLE[0], *WHOLE[5:]]],
    ids=["no step", "not finite", "no loss of training"],
)
def test_little_or_nothing_can_be_drawn(lines, leave, tmp_path):
    shown = Page(report.make([leave("run", *lines)], tmp_path / "report").read_text())
    assert ("img" in shown.tags) == (len(lines) > 1)


def test_what_cannot_be_written_or_drawn_is_said_with_the_remedy(leave, tmp_path, monkeypatch):
    there = leave("run", *WHOLE)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"--output-dir .* cannot be written .*: name another"):
        report.make([there], tmp_path / "file")
    monkeypatch.setattr("sys.argv", ["hvdtrain.report", str(there), "--output-dir", str(tmp_path / "to")])
    monkeypatch.setattr("hvdtrain.analysis.plotting.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'hvdtrain\[plot\]'$"):
        report.main()
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    with pytest.raises(UserError, match="start it without a launcher"):
        report.main()


@tried(40)
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
    for name in pictures.names_to_draw(found)[0]:
        pictures.draw_values(empty_axes(), found, name, "seconds")
