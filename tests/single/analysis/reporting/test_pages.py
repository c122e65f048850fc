"""Reading what runs have left, however damaged, and a page that shows it without ever running it."""

import base64
import json
import os

import pytest
from matplotlib.figure import Figure

from hvdtrain import report
from hvdtrain.analysis.reporting import curves, page, pictures
from hvdtrain.analysis.reporting.runs import differing, read_runs, samples_at, shown, time_shares
from hvdtrain.analysis.reporting.seeds import fold
from hvdtrain.engines.errors import UserError
from hvdtrain.engines.single import SerialEngine
from hvdtrain.training.records.misclassified import record_mistakes
from tests.single.analysis.reporting.run_records import END, HOSTILE, WHOLE, Page, evaluation, leave, start, step

__all__ = ["leave"]  # a fixture


def made(tmp_path, *directories) -> Page:
    return Page(report.make(directories, tmp_path / "report").read_text())


def test_a_page_and_its_pictures(leave, tmp_path):
    shown = made(tmp_path, leave("run", *WHOLE))
    assert "90.00%" in shown.text
    assert "51/s" in shown.text
    assert not shown.tags & {"script", "iframe", "object", "embed", "form"}
    assert all(source.startswith(("data:", "#")) for source in shown.sources)
    names = {"loss-over-samples", "loss-over-seconds", "accuracy-over-samples", "accuracy-over-seconds",
             "time-shares", "throughput"}  # fmt: skip
    assert {path.stem for path in (tmp_path / "report").glob("*.png")} == names
    for path in (tmp_path / "report").glob("*.png"):
        assert path.read_bytes().startswith(b"\x89PNG")


def test_hostile_names_stay_text(leave, tmp_path):
    there = leave(HOSTILE.replace("/", ""), start(100.0, config={HOSTILE: HOSTILE}, reason=HOSTILE, engine=HOSTILE,
                  ranks=[{"host": HOSTILE}], automatic=[HOSTILE], versions={HOSTILE: HOSTILE}), *WHOLE[1:-1],
                  {"event": "error", "time": 107.0, "kind": "failure", "message": HOSTILE})  # fmt: skip
    shown = made(tmp_path, there, leave("other", *WHOLE))
    assert "script" not in shown.tags
    assert not shown.handlers
    assert shown.text.count(HOSTILE) >= 6
    assert "<script>alert(1)<script>" in shown.text  # the directory, in a picture's legend and as a title


def test_colours_and_letters_follow_the_page(leave, tmp_path):
    found = read_runs([leave("run", *WHOLE)])
    for picture in pictures.draw_all(fold(found), tmp_path):
        assert picture.svg.startswith("<svg viewBox=")
        assert "DejaVu" not in picture.svg
        assert pictures.INK not in picture.svg.lower()
        assert "var(--ink)" in picture.svg
    variables = {name for name in pictures.VARIABLES.values() if f"{name}:" in page.style()}
    assert variables == set(pictures.VARIABLES.values())


def test_what_differs_stands_in_front(leave):
    found = read_runs([
        leave("one", *WHOLE),
        leave("two", start(200.0, world_size=4, engine="ddp", config={"batch_size": 32, "new_flag": True}), *WHOLE[1:]),
    ])  # fmt: skip
    assert differing(found) == ["ranks", "engine", "batch_size", "new_flag"]
    assert [run.config.get("new_flag") for run in found] == [None, "yes"]
    assert differing(found[:1]) == []
    rows = Page(page.comparison(found)).text
    assert rows.index("batch-size") < rows.index("test accuracy")


def test_runs_of_one_name_are_told_apart(leave, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    directories = [leave("a/run", *WHOLE), leave("b/run", *WHOLE)]
    assert [run.name for run in read_runs(directories)] == [str(path) for path in directories]


def test_a_restart_takes_lost_steps_back_and_leaves_the_pause_out(leave):
    (run,) = read_runs([leave(
        "run", start(100.0), step(101.0, 1), {"event": "checkpoint", "time": 101.5, "file": "x", "step": 1},
        step(102.0, 2, loss=7.0), step(103.0, 3, loss=7.0),
        start(1000.0), {"event": "resume", "time": 1000.5, "step": 1, "samples": 64, "epoch": 1},
        step(1002.0, 2), step(1003.0, 3), evaluation(1004.0), END | {"time": 1005.0},
    )])  # fmt: skip
    assert [(event["step"], event["loss"], event["seconds"]) for event in run.train] == [
        (1, 1, 1),
        (2, 1, 5),
        (3, 1, 6),
    ]
    assert [event["step"] for event in run.lost] == [3, 2]
    assert [(a.step, a.samples, a.before) for a in run.attempts] == [(0, 0, 0), (1, 64, 3)]
    assert run.evaluations[0]["samples"] == 192
    assert run.state == "ended"
    told = Page(page.history(run)).text
    assert "after step 1 (64 samples)" in told
    assert "not running in between14 min 57 s" in told


def test_the_whole_time_of_a_restarted_run_is_that_of_all_its_attempts(leave):
    end = END | {"time": 1005.0, "train_seconds": 7.0, "total_seconds": 6.0}
    (run,) = read_runs([leave("run", start(100.0), step(103.0, 1), start(1000.0), step(1004.0, 2), end)])
    assert page.figures(run)["training"] == ("7 s", "8 s with evaluation and checkpoints")


def test_an_evaluation_that_was_lost_is_made_again(leave):
    resume = {"event": "resume", "time": 200.5, "step": 1, "samples": 64, "epoch": 1}
    (run,) = read_runs([leave("run", start(100.0), step(101.0, 1), step(102.0, 2), evaluation(103.0, 0.5),
                              start(200.0), resume, step(201.0, 2), evaluation(202.0, 0.6))])  # fmt: skip
    assert [event["accuracy"] for event in run.evaluations] == [0.6]


def test_checkpoints_stand_between_the_recorded_steps(leave):
    (run,) = read_runs([leave("run", start(100.0), step(101.0, 1), step(102.0, 5), step(103.0, 9))])
    assert samples_at(run, [0, 1, 3, 9, 12]) == [0, 64, 192, 576, 576]
    assert samples_at(run, []) == []


def test_the_running_mean_leaves_gaps_out():
    nan = float("nan")
    means = curves.running_mean([1.0, 3.0, nan, 5.0, nan, nan, 2.0], 2)
    assert means == pytest.approx([1, 2, 3, 5, 5, nan, 2], nan_ok=True)


@pytest.mark.parametrize(
    ("losses", "scale"), [((2.4, 1.0, 0.4), "linear"), ((2.4, 0.5, 0.1), "log"), ((2.0, 0.0), "linear")]
)
def test_a_first_loss_far_above_the_others_makes_the_axis_logarithmic(losses, scale, leave):
    (run,) = read_runs([leave("run", start(100.0), *(step(101.0 + n, n, loss) for n, loss in enumerate(losses, 1)))])
    axes = Figure().subplots()
    curves.scale_loss(axes, [run], "loss")
    assert axes.get_yscale() == scale


def test_the_axis_of_accuracy_ends_at_100_percent_and_begins_where_training_is_under_way(leave):
    steps = [step(101.0 + n, n, accuracy=0.1 if n == 1 else 0.9) for n in range(1, 21)]
    (run,) = read_runs([leave("run", start(100.0), *steps, evaluation(130.0, 0.96))])
    axes = Figure().subplots()
    curves.scale_percent(axes, [run], "accuracy", "max")
    assert axes.get_ylim() == pytest.approx((0.85, 1.0))
    assert axes.yaxis.get_major_formatter()(1.0000000000000002, 0) == "100 %"


def test_a_start_with_nothing_to_resume_takes_every_step_again(leave):
    (run,) = read_runs([leave("run", start(100.0), step(101.0, 1), step(102.0, 2), start(200.0), step(203.0, 1))])
    assert [(event["step"], event["seconds"]) for event in run.train] == [(1, 5)]
    assert len(run.lost) == 2


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
        ([*WHOLE[:3], {"event": "resume", "time": 9.0, "step": float("nan"), "samples": 1}, *WHOLE[3:]], "(line 4)"),
        ([*WHOLE[:-1], {"event": "stop", "time": 106.0, "reason": "SIGTERM"}], "stopped on request (SIGTERM)"),
        ([*WHOLE[:-1], {"event": "error", "time": 106.0, "kind": "watchdog", "message": "rank 1 hangs"}], "rank 1 hangs"),
        ([*WHOLE[:2], step(102.0, 2, float("nan")), step(103.0, 3, float("inf"))], "no evaluation yet"),
    ],
    ids=["no end", "no step", "no evaluation", "half a line", "junk", "text", "huge", "endless", "not a number", "stop",
         "error", "nan"],
)  # fmt: skip
def test_an_incomplete_run_is_shown_with_a_note(lines, note, leave):
    assert note in Page(page.build(fold(read_runs([leave("run", *lines)])), [])).text


@pytest.mark.parametrize(
    "lines",
    [WHOLE[:1], [*WHOLE[:2], step(102.0, 2, float("nan")), step(103.0, 3, float("inf"))], [WHOLE[0], *WHOLE[5:]]],
    ids=["no step", "not finite", "no loss of training"],
)
def test_little_or_nothing_can_be_drawn(lines, leave, tmp_path):
    shown = made(tmp_path, leave("run", *lines))
    assert ("svg" in shown.tags) == (len(lines) > 1)


@pytest.mark.parametrize(
    ("prepare", "complaint"),
    [
        (lambda path: None, "is not a directory: name the --output-dir of a run"),
        (lambda path: path.mkdir(), "has no metrics.jsonl: name the --output-dir"),
        (lambda path: (path.mkdir(), (path / "metrics.jsonl").mkdir()), "cannot be read (Is a directory)"),
        (lambda path: (path.mkdir(), (path / "metrics.jsonl").write_bytes(b"\x80\x00junk\n")), "has no run in it"),
        (
            lambda path: (path.mkdir(), os.mkfifo(path / "metrics.jsonl")),
            "cannot be read (a pipe or a device, not a file)",
        ),
        (
            lambda path: (path.mkdir(), (path / "metrics.jsonl").symlink_to("/dev/zero")),
            "cannot be read (a pipe or a device",
        ),
        (lambda path: path.symlink_to(path), "is not a directory"),
        (lambda path: os.mkfifo(path), "is not a directory"),
    ],
    ids=["nothing", "empty", "directory", "junk", "pipe", "endless", "loop", "all a pipe"],
)
@pytest.mark.timeout(20)
def test_what_is_no_run_is_said_with_the_remedy(prepare, complaint, tmp_path):
    prepare(tmp_path / "out")
    with pytest.raises(UserError, match=r"name|make it readable") as caught:
        report.make([tmp_path / "out"], tmp_path / "report")
    assert complaint in str(caught.value)
    assert not (tmp_path / "report").exists()


def test_a_page_that_cannot_be_written(leave, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot be written .*: name another"):
        report.make([leave("run", *WHOLE)], tmp_path / "file")


def test_under_a_launcher_with_several_ranks_it_refuses(leave, monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setattr("sys.argv", ["hvdtrain.report", str(leave("run", *WHOLE))])
    with pytest.raises(UserError, match="start it without a launcher"):
        report.main()


def test_without_matplotlib_it_says_what_to_install(leave, tmp_path, monkeypatch):
    monkeypatch.setattr("hvdtrain.analysis.plotting.find_spec", lambda name: None)
    monkeypatch.setattr(
        "sys.argv", ["hvdtrain.report", str(leave("run", *WHOLE)), "--output-dir", str(tmp_path / "to")]
    )
    with pytest.raises(UserError, match=r"pip install 'hvdtrain\[plot\]'$"):
        report.main()


def test_time_shares_per_rank_where_they_were_recorded(leave):
    ranks = {"event": "ranks", "time": 104.5, "epoch": 1, "loading_seconds": [1, 0], "compute_seconds": [2, 3],
             "communication_seconds": [1, 1], "elapsed_seconds": [5, 4]}  # fmt: skip
    found = read_runs([leave("one", *WHOLE), leave("two", *WHOLE[:-1], ranks, END), leave("three", *WHOLE[:-1],
                      ranks | {"loading_seconds": "soon"}, END)])  # fmt: skip
    alone = [("rank 0", pytest.approx({"loading": 0.1, "compute": 0.6, "communication": 0.3}))]
    assert time_shares(found[0]) == time_shares(found[2]) == alone
    (first, zero), (second, one) = time_shares(found[1])
    assert (first, second) == ("rank 0", "rank 1")
    assert zero == pytest.approx({"loading": 0.2, "compute": 0.4, "communication": 0.2, "other": 0.2})
    assert one["other"] == 0


RECORD = dict(time=105.0, confusion=[[3, 1], [0, 4]], shape=[2, 2], mistakes=[
    dict(index=7, label=0, predicted=1, loss=2.5, pixels=base64.b64encode(bytes(4)).decode())
])  # fmt: skip


def test_mistakes_are_shown(leave, tmp_path):
    there = leave("run", *WHOLE)
    (there / "mistakes.json").write_text(json.dumps(RECORD))
    shown = made(tmp_path, there)
    assert "1 of 8 are wrong" in shown.text
    (image,) = (source for source in shown.sources if source.startswith("data:image/png"))
    assert base64.b64decode(image.partition(",")[2]).startswith(b"\x89PNG")
    assert {"confusion-1", "mistakes-1"} <= {path.stem for path in (tmp_path / "report").glob("*.png")}


@pytest.mark.parametrize(
    ("change", "note"),
    [
        (dict(time=99.0), None),  # an earlier run's
        (dict(shape=[2, 3]), "mistakes.json is damaged"),
        (dict(shape=[-2, -2]), "mistakes.json is damaged"),
        (dict(confusion=[[1, 2], [3]]), "mistakes.json is damaged"),
        (dict(confusion=[[]]), "mistakes.json is damaged"),
        (dict(mistakes=[{"index": 1}]), "mistakes.json is damaged"),
        (dict(mistakes=[RECORD["mistakes"][0] | {"pixels": "<b>"}]), "mistakes.json is damaged"),
        (dict(confusion=[[10**400, 1], [0, 4]]), "mistakes.json is damaged"),
        (dict(shape=[10**400, 2]), "mistakes.json is damaged"),
        (dict(mistakes=[RECORD["mistakes"][0] | {"loss": 10**400}]), "mistakes.json is damaged"),
        (dict(mistakes=[RECORD["mistakes"][0] | {"loss": float("inf")}]), "mistakes.json is damaged"),
        (dict(mistakes=[RECORD["mistakes"][0] | {"label": 10**400}]), "mistakes.json is damaged"),
        (dict(mistakes=[RECORD["mistakes"][0] | {"predicted": 2}]), "mistakes.json is damaged"),
        (dict(mistakes=[RECORD["mistakes"][0] | {"index": -(10**400)}]), "mistakes.json is damaged"),
        (dict(time=10**400), None),
    ],
)
def test_a_record_that_is_not_sound_or_not_this_runs_is_left_out(change, note, leave):
    there = leave("run", *WHOLE)
    (there / "mistakes.json").write_text(json.dumps(RECORD | change))
    shown = Page(page.build(fold(read_runs([there])), []))
    assert "Worst mistakes" not in shown.text
    assert (note in shown.text) if note else ("damaged" not in shown.text)


def test_losses_that_are_not_finite_are_recorded_as_numbers(tmp_path):
    import torch

    engine = SerialEngine(tuning=False, rank=0, size=1, launcher="none")
    logits = torch.tensor([[float("nan"), 0, 0], [0, float("inf"), 0], [0, 0, 9.0]])
    record_mistakes(engine, logits, torch.zeros(3, 1, 2, 2, dtype=torch.uint8), torch.tensor([1, 0, 2]), tmp_path)
    record = json.loads((tmp_path / "mistakes.json").read_text(), parse_constant=pytest.fail)
    assert {m["index"] for m in record["mistakes"]} == {0, 1}
    assert sum(map(sum, record["confusion"])) == 3


def test_long_curves_get_a_running_mean():
    assert curves.running_mean([1, 3, float("nan"), 5], 2) == [1, 2, 3, 5]
    assert curves.running_mean([float("nan"), 2.0], 1)[1] == 2.0
    assert (curves.thousands(60_000), curves.thousands(0.25), curves.thousands(1.5e9)) == ("60k", "0.25", "1.5G")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["summary.json", "mistakes.json"])
def test_a_pipe_in_place_of_a_file_is_left_out(name, leave):
    there = leave("run", *(WHOLE[:-1] if name == "summary.json" else WHOLE))  # an end has the summary, too
    os.mkfifo(there / name)
    (run,) = read_runs([there])
    assert f"{name} is damaged: left out" in run.notes


def test_a_line_that_is_just_being_written_is_no_damage(leave):
    there = leave("run", *WHOLE[:4])
    with (there / "metrics.jsonl").open("a") as file:
        file.write('{"event": "train", "ti')
    (run,) = read_runs([there])
    assert run.notes[0] == "the record has no end: the run was killed, or is still running"


def test_a_clock_that_is_set_meanwhile_changes_no_duration(leave):
    def at(line: dict, elapsed: float, jump: float = 0.0) -> dict:
        return line | {"time": line["time"] + jump, "elapsed": elapsed}

    day = 86_400.0
    lines = [at(WHOLE[0], 3.0), at(WHOLE[1], 4.0), at(WHOLE[2], 5.0, day), at(WHOLE[3], 6.0, -day), WHOLE[4],
             at(start(300.0), 2.0), at({"event": "resume", "time": 300.5, "step": 3, "samples": 192}, 2.5),
             at(step(301.0, 4), 4.0, day), at(END | {"time": 302.0}, 5.0, day)]  # fmt: skip
    (run,) = read_runs([leave("run", *lines)])
    assert [event["seconds"] for event in run.train] == [1.0, 2.0, 3.0, 5.0]
    assert [(attempt.before, attempt.ran) for attempt in run.attempts] == [(0.0, 3.0), (3.0, 3.0)]
    assert "ran 3 s" in Page(page.history(run)).text


def test_durations_that_are_no_durations(leave):
    for seconds in (float("inf"), float("nan"), 10**400, "soon"):
        end = END | {
            "train_seconds": seconds,
            "total_seconds": seconds,
            "samples": seconds,
            "samples_per_second": seconds,
        }
        (run,) = read_runs([leave(f"run-{str(seconds)[:4]}", *WHOLE[:-1], end)])
        assert page.figures(run)["training"][0] == "-"


def test_a_flag_of_hundreds_of_levels_is_shown():
    deep: list = []
    for _ in range(900):
        deep = [deep]
    assert shown([1.0, True, None]) == "1, yes, -"
    assert shown(deep) == "[" * 900 + "]" * 900
