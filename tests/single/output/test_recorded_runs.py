"""Reading what runs have left, however damaged, and the page of it: nothing in it that a browser would run."""

import json
import os
from html.parser import HTMLParser

import pytest
from matplotlib.figure import Figure

from hvdtrain import report
from hvdtrain import report as page
from hvdtrain.engines.errors import UserError
from hvdtrain.output.metric_names import Metric, Series, named_values, recorded_metrics
from hvdtrain.output.recorded_runs import Attempt, RecordedRun, differing, read_runs, results, time_shares

HOSTILE = "<script>alert(1)</script>\"'&$\\frac{$"
LOSS = {"loss": {"direction": "min", "percent": False}}
ACCURACY = {"accuracy": {"direction": "max", "percent": True}}


def start(time: float, **more) -> dict:
    config = {"batch_size": 64, "lr": 0.01, "compression": "none", "output_dir": str(time)} | more.pop("config", {})
    ranks = [{"rank": 0, "host": "a", "pid": 1, "device": "cpu"}]
    return {"event": "start", "time": time, "world_size": 2, "engine": "horovod", "dataset": "digits", "config": config,
            "versions": {"torch": "2.15"}, "ranks": ranks, "metrics": ACCURACY | LOSS} | more  # fmt: skip


def step(time: float, number: int, loss: float | None = 1.0, **more) -> dict:
    return {"event": "train", "time": time, "epoch": 1, "step": number, "samples": 64 * number, "loss": loss,
            "samples_per_second": 100.0} | more  # fmt: skip


def steps(count: int = 4, **named) -> list[dict]:
    """`named`: from a step's number to a value."""
    return [step(100.0 + n, n, **{k: of(n) for k, of in named.items()}) for n in range(1, count + 1)]


def evaluation(time: float, epoch: int = 1, prefix: str = "test", **values) -> dict:
    return {"event": "evaluate", "time": time, "epoch": epoch, "prefix": prefix, "count": 500} | values


RANKS = {"event": "ranks", "time": 104.5, "epoch": 1, "loading_seconds": [1, 0], "compute_seconds": [2, 3],
         "communication_seconds": [1, 1], "elapsed_seconds": [5, 4]}  # fmt: skip


def end(**more) -> dict:
    return {"event": "end", "time": 110.0, "samples": 256, "train_seconds": 5.0, "samples_per_second": 51.2} | more


WHOLE = [
    start(100.0), *steps(accuracy=lambda n: n / 5), evaluation(104.5, 1, loss=0.5, accuracy=0.8),
    evaluation(105.0, 2, loss=0.4, accuracy=0.9), RANKS, end(test_accuracy=0.9, test_loss=0.4, test_count=500),
]  # fmt: skip
REGRESSION = [start(100.0, metrics=LOSS), *steps(), evaluation(104.5, 1, loss=0.25), evaluation(105.0, 2, loss=0.5),
              end(test_loss=0.5, test_count=500)]  # fmt: skip
LANGUAGE = [
    start(100.0, metrics=LOSS | {"perplexity": {"direction": "min", "percent": False}}),
    *steps()[:2], evaluation(102.5, 1, "validation", loss=2.0, perplexity=7.389),
    *steps()[2:], evaluation(105.0, 2, "", validation_loss=1.5, perplexity=4.48),
    end(validation_loss=1.5, validation_count=500, perplexity=4.48, tokens_per_second=1e6),
]  # fmt: skip
GAN = [
    start(100.0, metrics=LOSS),
    *steps(loss=lambda n: None, critic_loss=lambda n: 1.5 * n - 4, generator_loss=lambda n: 0.5),
    end(),
]
KINDS = {"classifier": WHOLE, "regression": REGRESSION, "language": LANGUAGE, "gan": GAN}


@pytest.fixture
def leave(tmp_path):
    """Write a run's metrics.jsonl, events or raw lines, and return its directory."""

    def write(name: str, *lines):
        directory = tmp_path / name
        directory.mkdir(parents=True)
        texts = [line if isinstance(line, str) else json.dumps({"elapsed": line.get("time"), **line}) for line in lines]
        (directory / "metrics.jsonl").write_text("\n".join(texts) + "\n")
        return directory

    return write


class Page(HTMLParser):
    """What a browser would make of a page: tags, where they point, text, and the rows of its tables."""

    def __init__(self, html: str):
        super().__init__()
        self.tags, self.sources, self.handlers, self.text = set(), [], [], ""
        self.rows: list[list[str]] = []
        self.pictures: list[str] = []
        self._cell = False
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self.sources += [v for k, v in attributes if k in ("src", "href", "xlink:href", "action", "data")]
        self.handlers += [k for k, _ in attributes if k.startswith("on")]
        if tag == "img":
            self.pictures.append(dict(attributes)["alt"])
        if tag == "tr":
            self.rows.append([])
        self._cell = tag in ("th", "td")
        if self._cell:
            self.rows[-1].append("")

    def handle_data(self, data):
        self.text += data
        if self._cell and self.rows and self.rows[-1]:
            self.rows[-1][-1] += data

    def handle_endtag(self, tag):
        self._cell = self._cell and tag not in ("th", "td")

    def row(self, name: str) -> list[str]:
        """Return the cells of the first row with this name."""
        return next(row[1:] for row in self.rows if row and row[0] == name)


def test_what_differs_stands_in_front(leave):
    other = start(200.0, world_size=4, engine="ddp", config={"batch_size": 32, "new_flag": True})
    found = read_runs([leave("one", *WHOLE), leave("two", other, *WHOLE[1:])])
    assert differing(found) == ["ranks", "engine", "batch_size", "new_flag"]
    assert [run.config.get("new_flag") for run in found] == [None, "True"]
    assert differing(found[:1]) == []
    rows = [row[0] for row in Page(page.build(found, [])).rows]
    assert rows.index("batch-size") < rows.index("test accuracy")


def test_runs_of_one_name_are_told_apart(leave):
    directories = [leave("a/run", *WHOLE), leave("b/run", *WHOLE)]
    assert [run.name for run in read_runs(directories)] == [str(path) for path in directories]


def resume(time: float, step: int) -> dict:
    return {"event": "resume", "time": time, "step": step, "samples": 64 * step, "epoch": 1}


def test_a_restart_takes_lost_steps_back_and_leaves_the_pause_out(leave):
    lines = (
        start(100.0), step(101.0, 1), {"event": "checkpoint", "time": 101.5, "file": "x", "step": 1},
        step(102.0, 2, loss=7.0), step(103.0, 3, loss=7.0), evaluation(103.0, accuracy=0.5),
        start(1000.0), resume(1000.5, 1), step(1002.0, 2), step(1003.0, 3), evaluation(1004.0, accuracy=0.6),
        end(time=1005.0, train_seconds=7.0),
    )  # fmt: skip
    # The processes had started 2 and 3 seconds before.
    since = [line | {"elapsed": line["time"] - (98 if line["time"] < 999 else 997)} for line in lines]
    (run,) = read_runs([leave("run", *since)])
    assert [(m.step, m.event["loss"], m.seconds) for m in run.of_training()] == [(1, 1, 1), (2, 1, 5), (3, 1, 6)]
    assert [(a.step, a.samples, a.before) for a in run.attempts] == [(0, 0, 0), (1, 64, 3)]
    assert [(m.event["accuracy"], m.samples) for m in run.of_training(False)] == [(0.6, 192)], "not the lost one"
    assert (page.figures(run)["training"], page.figures(run)["in all"]) == ("7.0 s", "13.0 s")
    assert page.figures(run)["state"] == "ended, 1 restart, from step 1"
    axes = Figure().subplots()
    page.draw_values(axes, [run], "loss", "seconds")
    drawn = [line.get_xydata().tolist() for line in axes.lines if line.get_linewidth() == 0.8]
    assert drawn == [[[1, 1], [2, 7], [3, 7]], [[5, 1], [6, 1]]], "a line for each attempt, with the lost steps"


def test_a_start_with_nothing_to_resume_takes_every_step_again(leave):
    lines = start(100.0), step(101.0, 1), step(102.0, 2), start(200.0), step(203.0, 1)
    (run,) = read_runs([leave("run", *lines)])
    assert [(moment.step, moment.seconds) for moment in run.moments] == [(1, 5)]
    lost, first = evaluation(102.5, step=2, accuracy=0.9), evaluation(201.0, step=0, accuracy=0.1)
    (run,) = read_runs([leave("evaluated", *lines[:3], lost, lines[3], first, lines[4])])
    assert [(moment.step, moment.event["event"]) for moment in run.moments] == [(0, "evaluate"), (1, "train")]


def test_a_clock_that_is_set_meanwhile_changes_no_duration(leave):
    def at(line: dict, elapsed: float, jump: float = 0.0) -> dict:
        return line | {"time": line["time"] + jump, "elapsed": elapsed}

    day = 86_400.0
    lines = [at(WHOLE[0], 3.0), at(WHOLE[1], 4.0), at(WHOLE[2], 5.0, day), at(WHOLE[3], 6.0, -day),
             at(start(300.0), 2.0), at(resume(300.5, 3), 2.5), at(step(301.0, 4), 4.0, day),
             at(end(time=302.0), 5.0, day)]  # fmt: skip
    (run,) = read_runs([leave("run", *lines)])
    assert [moment.seconds for moment in run.moments] == [1.0, 2.0, 3.0, 5.0]
    assert [(attempt.before, attempt.ran) for attempt in run.attempts] == [(0.0, 3.0), (3.0, 3.0)]


@pytest.mark.parametrize(
    ("lines", "note"),
    [
        (WHOLE[:-1], "the record has no end: the run was killed, or is still running"),
        (WHOLE[:1], "no step was recorded"),
        (WHOLE[:3], "no evaluation yet"),
        ([*WHOLE[:3], '{"event": "tra', *WHOLE[3:]], "left out unreadable lines (line 4)"),
        ([*WHOLE[:3], "[" * 100_000, "[1]", "\x00\xff", '{"event": ["train"], "time": 1}', *WHOLE[3:]], "(line 4, 5, 6, 7)"),
        ([*WHOLE[:3], step(104.0, 3, loss="low"), *WHOLE[3:]], "(line 4)"),
        ([*WHOLE[:3], step(104.0, 10**400), *WHOLE[3:]], "(line 4)"),
        ([*WHOLE[:3], step(104.0, float("inf")), start(9.0, world_size=float("inf")), *WHOLE[3:]], "(line 4, 5)"),
        ([*WHOLE[:3], resume(9.0, float("nan")), *WHOLE[3:]], "(line 4)"),
        ([*WHOLE[:-1], {"event": "stop", "time": 106.0, "reason": "SIGTERM"}], "stopped on request (SIGTERM)"),
        ([*WHOLE[:-1], {"event": "error", "time": 106.0, "kind": "watchdog", "message": "rank 1 hangs"}], "rank 1 hangs"),
        ([*WHOLE[:2], step(102.0, 2, float("nan")), step(103.0, 3, float("inf"))], "no evaluation yet"),
    ],
    ids=["no end", "no step", "no evaluation", "half a line", "junk", "text", "huge", "endless", "not a number", "stop",
         "error", "nan"],
)  # fmt: skip
def test_an_incomplete_run_is_shown_with_a_note(lines, note, leave):
    assert note in Page(page.build(read_runs([leave("run", *lines)]), [])).text


def test_a_line_that_is_just_being_written_is_no_damage(leave):
    there = leave("run", *WHOLE[:4])
    with (there / "metrics.jsonl").open("a") as file:
        file.write('{"event": "train", "ti')
    (run,) = read_runs([there])
    assert run.notes[0] == "the record has no end: the run was killed, or is still running"


@pytest.mark.parametrize(
    ("prepare", "complaint"),
    [
        (lambda path: None, "is not a directory: name the --output-dir of a run"),
        (lambda path: path.mkdir(), "has no metrics.jsonl: name the --output-dir"),
        (lambda path: (path.mkdir(), (path / "metrics.jsonl").mkdir()), "cannot be read (a pipe or a device, not a file)"),
        (lambda path: (path.mkdir(), (path / "metrics.jsonl").write_bytes(b"\x80\x00junk\n")), "has no run in it"),
        (lambda path: (path.mkdir(), os.mkfifo(path / "metrics.jsonl")), "cannot be read (a pipe or a device, not a file)"),
        (lambda path: (path.mkdir(), (path / "metrics.jsonl").symlink_to("/dev/zero")), "cannot be read (a pipe or"),
        (lambda path: path.symlink_to(path), "is not a directory"),
        (lambda path: os.mkfifo(path), "is not a directory"),
    ],
    ids=["nothing", "empty", "directory", "junk", "pipe", "endless", "loop", "all a pipe"],
)  # fmt: skip
@pytest.mark.timeout(20)
def test_what_is_no_run_is_said_with_the_remedy(prepare, complaint, tmp_path):
    prepare(tmp_path / "out")
    with pytest.raises(UserError, match=r"name|make it readable") as caught:
        report.make_report([tmp_path / "out"], tmp_path / "report")
    assert complaint in str(caught.value)
    assert not (tmp_path / "report").exists()


@pytest.mark.timeout(60)
def test_a_record_without_its_last_line_has_the_summary(leave):
    there = leave("run", *WHOLE[:-1])
    (there / "summary.json").write_text(json.dumps({"test_accuracy": 0.91, "test_count": 500, "train_seconds": 3.0}))
    (run,) = read_runs([there])
    assert run.state == "ended"
    assert page.figures(run)["test accuracy"] == "91.00% of 500"
    assert run.notes == ["the record stops before the end of the run: the results are from summary.json"]
    (there / "summary.json").unlink()
    os.mkfifo(there / "summary.json")
    assert "summary.json is damaged: left out" in read_runs([there])[0].notes


def test_the_best_evaluation_is_one_with_a_number(leave):
    nan, inf = float("nan"), float("inf")
    lines = [evaluation(101.0 + n, n, loss=loss) for n, loss in enumerate((nan, 0.5, 0.2, inf, 0.3), 1)]
    (run,) = read_runs([leave("run", start(100.0, metrics=LOSS), *steps(), *lines)])
    assert results(run) == {"test loss": "0.3 of 500", "best test loss": "0.2 in epoch 3"}


def test_what_is_recorded_beside_a_scripts_values_is_no_value():
    beside = dict(loss_rank0=1.0, learning_rate=0.1, loading_share=0.5, flag=True, word="x", none=None, elapsed=3.0)
    line = step(1.0, 1, loss=float("inf"), huge=10**400, sharpe=2, resident_bytes=[1], **beside)
    assert named_values(line, {}) == {"loss": float("inf"), "sharpe": 2.0}
    named = Metric("min")
    assert named_values(line, {"loading_share": named, "step": named}).keys() == {"loss", "sharpe", "loading_share"}


@pytest.mark.parametrize(
    ("told", "metrics"),
    [
        (ACCURACY | LOSS, {"accuracy": Metric("max", True), "loss": Metric("min")}),
        ({"a": {}, "b": {"direction": []}, "c": "min", "step": LOSS["loss"]}, {}),
        ({"a": {"direction": "max", "percent": "yes"}}, {"a": Metric("max")}),
        ({}, {}),
        (None, {}),
        ([["loss", "min"]], {}),
    ],
)
def test_metrics_are_read_as_far_as_they_can_be(told, metrics):
    assert recorded_metrics({"metrics": told}) == metrics


@pytest.mark.parametrize("metrics", [LOSS, {"validation_loss": LOSS["loss"]}])
def test_a_metric_may_be_named_with_its_data_or_without(metrics, leave):
    lines = [start(100.0, metrics=metrics), *steps(), evaluation(105.0, 1, "", validation_loss=0.5)]
    (run,) = read_runs([leave("run", *lines, end(validation_loss=0.5))])
    assert results(run) == {"validation loss": "0.5 of 500"}
    assert run.moments[-1].values == {Series("validation", "loss"): 0.5}


def test_time_shares_per_rank(leave):
    whole = [line for line in WHOLE if line is not RANKS]
    damaged = [RANKS | {"loading_seconds": "soon"}, RANKS | {"loading_seconds": [-1, 0]}]
    found = read_runs([leave("one", *whole), leave("two", *WHOLE), leave("three", *whole[:-1], *damaged, end())])
    assert time_shares(found[0]) == time_shares(found[2]) == []
    zero, one = time_shares(found[1])
    assert zero == pytest.approx({"loading": 0.2, "compute": 0.4, "communication": 0.2, "other": 0.2})
    assert one["other"] == 0


@pytest.mark.parametrize("seconds", [float("inf"), float("nan"), 10**400, "soon"], ids=str)
def test_durations_that_are_no_durations(seconds, leave):
    last = end(train_seconds=seconds, total_seconds=seconds, samples=seconds, samples_per_second=seconds)
    (run,) = read_runs([leave("run", *WHOLE[:-1], last)])
    assert page.figures(run).get("training", "-") == "-"


# ---- the page and its plots


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


def test_two_plots_stand_side_by_side_and_curves_can_be_told_apart():
    def lines(axes) -> None:
        for place, name in enumerate(("horovod $x$ & <co>", "ddp", "a name that is longer than the others")):
            axes.plot([1, 2], [place, 1], label=name, **page.look(place))

    one, two = (int.from_bytes(page.png([lines] * count)[16:20]) for count in (1, 2))
    assert two == 2 * one
    looks = [page.look(place) for place in range(12)]
    assert len({(look["color"], look["linestyle"]) for look in looks}) == 12
    assert len({look["color"] for look in looks[:6]}) == 6
