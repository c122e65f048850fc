"""`--evaluate` repeats the evaluation of a run's newest model, and `--predict` writes what it says about each sample."""

import csv
import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import DataLoader, TensorDataset

from hvdtrain import imagenet, lm, mnist, training
from hvdtrain.engines.errors import Failure, UserError
from hvdtrain.features.evaluate_only import Predictions, write_predictions
from tests import image_set
from tests.single.trained import trained
from tests.single.training.small import N, Trained, X, Y, alone
from tests.single.unwritable import no_room

SCRIPTS = {
    "mnist": (mnist, "--dataset digits --model convnet --train-samples 128 --epochs 2 --batch-size 32"),
    "imagenet": (imagenet,
        "--data-dir {folder} --model shufflenet_v2_x0_5 --image-size 32 --batch-size 8 --epochs 2 --workers 0"),
    "lm": (lm, "--text {text} --layers 1 --heads 1 --width 8 --context 8 --steps 3 --batch-size 4 --sample-tokens 0"),
}  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    directory = tmp_path_factory.mktemp("data")
    text = directory / "text"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 30)
    return {"folder": image_set.write(directory / "folder", train=16, test=11), "text": text}


@pytest.mark.parametrize("name", SCRIPTS)
def test_evaluate_gives_the_metrics_of_the_end_of_training_without_any_other_flag(
    name, data, tmp_path, capsys, worker_server
):
    script, flags = SCRIPTS[name]
    whole = trained(script, flags.format(**data), tmp_path / "run")
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    capsys.readouterr()
    again = trained(script, f"--evaluate {tmp_path / 'run'}", tmp_path / "record")
    assert again.code == 0
    assert again.losses == []  # no step
    last = whole.events("evaluate")[-1]
    (repeated,) = again.events("evaluate")
    own = {"time", "elapsed"}
    assert {k: v for k, v in repeated.items() if k not in own} == {k: v for k, v in last.items() if k not in own}
    assert again.summary["parameters_sha256"] == whole.summary["parameters_sha256"]
    said = rf"^epoch {last['epoch']}  (test|validation) .* of {last['count']}$"
    assert re.search(said, capsys.readouterr().out, re.M)
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(("goal", "code"), [(0.01, 0), (1, 3)])
def test_the_exit_code_of_an_evaluation_says_whether_the_target_is_reached(goal, code, tmp_path, capsys):
    trained(mnist, SCRIPTS["mnist"][1], tmp_path / "run")
    assert trained(mnist, f"--evaluate {tmp_path / 'run'} --target-accuracy {goal}").code == code
    assert ("target accuracy 100.00% not reached" in capsys.readouterr().out) == (code == 3)


def test_predictions_are_in_the_order_of_the_data_set(tmp_path, data, worker_server):
    script, flags = SCRIPTS["imagenet"]
    run = tmp_path / "run"
    whole = trained(script, flags.format(**data), run)
    trained(script, f"--evaluate {run} --predict {tmp_path}/p.csv")
    trained(script, f"--evaluate {run} --predict {tmp_path}/p.safetensors")
    rows = list(csv.DictReader((tmp_path / "p.csv").open()))
    held = load_file(tmp_path / "p.safetensors")
    assert [int(row["index"]) for row in rows] == held["index"].tolist() == list(range(11))
    assert [int(row["label"]) for row in rows] == sorted(int(row["label"]) for row in rows)  # of a folder: by class
    hits = [row["label"] == row["predicted_0"] for row in rows]
    assert sum(hits) / 11 == pytest.approx(whole.summary["test_accuracy"])
    assert [float(row["probability_0"]) for row in rows] == pytest.approx(held["probability"][:, 0].tolist())


def together(run, x, y):
    run.predict(given=x, wanted=y[:, 0])


def apart(run, x, y):
    run.predict(wanted=y[:, 0])
    run.predict(given=x)


def in_full_batches(run, x, y):
    run.predict(wanted=y)
    if len(x) == 16:
        run.predict(given=x)


def own_program(directory, *argv, predict=together, evaluates=True, beside=None):
    """A program of a user: its evaluation takes a loader, in batches. beside: whether another evaluation predicts."""

    def tail(t, epoch):
        if beside is not None:
            with t.run.evaluating(N, prefix="other") as mine:
                t.run.record(loss=Y[mine].square())
                if beside:
                    t.run.predict(given=X[mine])
        if evaluates:
            with t.run.evaluating(DataLoader(TensorDataset(X, Y), batch_size=16)) as batches:
                for x, y in batches:
                    t.run.record(loss=(t.model(x) - y).square())
                    predict(t.run, x, y)

    return Trained(*argv, out=directory, tail=tail).run


@pytest.mark.parametrize("predict", [together, apart])
def test_a_program_of_ones_own_predicts_in_the_order_of_its_data(predict, tmp_path):
    run = own_program(tmp_path / "run")
    evaluate = ("--evaluate", str(tmp_path / "run"), "--predict", str(tmp_path / "p.safetensors"))
    again = own_program(None, *evaluate, beside=False, predict=predict)
    assert again.evaluation == run.evaluation
    held = load_file(tmp_path / "p.safetensors")
    assert torch.equal(held["given"], X)
    assert torch.equal(held["wanted"], Y[:, 0])
    assert held["index"].tolist() == list(range(N))


@pytest.mark.parametrize("name", ["=cmd|' /C calc'!A1", "+1", "-1", "@x", "", " x", "a\tb", "a\x1b[2J", "a\x9b2J"])
def test_a_name_that_a_table_or_a_terminal_would_execute_is_refused(name):
    with pytest.raises(UserError, match=r"got a value named .*: begin with a letter"):
        Predictions(whole=False).add(torch.arange(2), {name: torch.zeros(2)})
    Predictions(whole=False).add(torch.arange(2), {"größe (mm) = 2": torch.zeros(2)})


def test_flags_that_are_given_win_over_those_of_the_run(tmp_path):
    trained(mnist, SCRIPTS["mnist"][1], tmp_path / "run")
    flags = mnist.parse(["--engine", "serial", "--evaluate", str(tmp_path / "run"), "--seed", "5", "--no-progress"])
    flags.adopt({"seed": 9, "model": "convnet", "dataset": "digits", "keep": 99, "target_accuracy": 0.9})
    expected = (5, "convnet", "digits", 3, None)
    assert (flags.seed, flags.model, flags.dataset, flags.keep, flags.target_accuracy) == expected
    for bad in ({"model": "ResNet"}, {"epochs": "many"}):
        said = "^the checkpoint to evaluate has a flag that is not valid .argument --.*: name a run of this program, or"
        with pytest.raises(UserError, match=said):
            flags.adopt(bad)


def test_a_flag_of_the_run_that_is_not_valid_any_more_can_be_given():
    """As the message says. And what the run gave does not take the place of other words of the command line."""
    parser = training.parser("test", None)
    parser.add_argument("data", type=Path)
    parser.add_argument("--kind", choices=("new", "other"), default="other")
    parser.add_argument("--part", nargs="?", type=Path)
    parser.add_argument("--also", nargs="+", type=Path, default=[])
    parser.add_argument("--each", action="append")
    theirs = {"data": "/theirs", "kind": "old", "also": ["/a", "/b"], "part": "/c", "each": ["a", "b"]}
    for words, each in (
        ((), ["a", "b"]),
        (("--each", "c"), ["c"]),
    ):  # a list that is given takes the place of the run's
        flags = parser.parse(["--evaluate", "/run", *words, "--kind", "new", "/mine"])
        flags.adopt(theirs)
        expected = (Path("/mine"), "new", Path("/c"), [Path("/a"), Path("/b")], each)
        assert (flags.data, flags.kind, flags.part, flags.also, flags.each) == expected
    flags = parser.parse(["/mine", "--evaluate", "/run"])
    with pytest.raises(
        UserError, match=r"argument --kind: invalid choice: 'old'.*: name a run of this program, or give"
    ):
        flags.adopt(theirs)
    flags.adopt(theirs | {"kind": "new"})
    assert (flags.data, flags.also) == (Path("/mine"), [Path("/a"), Path("/b")])


EVALUATE = ("--evaluate", "{tmp}/run")
PREDICT = (*EVALUATE, "--predict", "{tmp}/p.csv")


@pytest.mark.parametrize("ending", ["csv", "safetensors"])
def test_without_room_the_earlier_predictions_stay(ending, tmp_path):
    path = tmp_path / f"p.{ending}"
    path.write_text("of an earlier evaluation")
    with no_room(), pytest.raises(Failure, match=f"--predict {path} cannot be written .File too large.: free some"):
        write_predictions(path, torch.arange(1000), {"predicted": torch.arange(1000)})
    assert path.read_text() == "of an earlier evaluation"
    assert list(tmp_path.iterdir()) == [path]


REFUSED = {
    "no run": (("--evaluate", "{tmp}/none"), {}, "--evaluate .*none: No such file"),
    "the record would be in the run": ((*EVALUATE, "--output-dir", "{tmp}/run"), {},
        "--evaluate: the --output-dir .* has"),
    "no evaluation": (EVALUATE, {"evaluates": False}, "--evaluate: this program has evaluated nothing"),
    "no prediction": (PREDICT, {"predict": lambda *_: None}, "--predict: this program has predicted nothing"),
    "a row for each sample": (PREDICT, {"predict": lambda run, x, y: run.predict(given=x[:1])},
        r"run.predict\(given=...\) has 1 rows for 16 samples"),
    "two predictions": (PREDICT, {"beside": True}, "two evaluations have predicted, and there is one file"),
    "in some batches alone": (PREDICT, {"predict": in_full_batches},
        r"run.predict\(given=...\) is not for the samples of the other values: give each value in every batch"),
    "the name of the file's own column": (PREDICT, {"predict": lambda run, x, y: run.predict(index=y)},
        r"run.predict\(index=...\): the file's own column has this name"),
    "other columns": (PREDICT, {"predict": lambda run, x, y: run.predict(given=x[:, : len(x) // 8])},
        r"run.predict\(given=...\) has rows of \[1\] float32 in one batch, and of \[2\] float32 in others: give"),
    "a number": (PREDICT, {"predict": lambda run, x, y: run.predict(given=1.0)},
        r"run.predict\(given=...\): give a tensor"),
    "the file's directory": ((*EVALUATE, "--predict", "{tmp}/none/p.csv"), {}, "--predict .*p.csv cannot be written"),
    "the file's ending": ((*EVALUATE, "--predict", "p.txt"), {}, "'p.txt' does not end in .csv or .safetensors"),
    "only --predict": (("--predict", "p.csv"), {}, "--predict needs --evaluate"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_evaluated_is_refused_in_one_line(case, tmp_path):
    argv, options, complaint = REFUSED[case]
    own_program(tmp_path / "run")
    with pytest.raises(UserError, match=complaint) as caught:
        own_program(None, *(part.format(tmp=tmp_path) for part in argv), **options)
    assert len(str(caught.value).splitlines()) == 1


def test_run_predict_needs_an_evaluation_and_other_data_are_reported(tmp_path, capsys):
    trained(mnist, SCRIPTS["mnist"][1], tmp_path / "run")
    done = trained(mnist, f"--evaluate {tmp_path / 'run'} --train-samples 64")
    assert done.code == 0
    assert "train_samples: 128 in the checkpoint, 64 now): evaluated on those given now" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"^run.predict\(\) outside of run.evaluating"), alone() as run:
        run.predict(a=X)


def test_the_record_of_an_evaluation_says_so(tmp_path):
    own_program(tmp_path / "run")
    own_program(tmp_path / "record", "--evaluate", str(tmp_path / "run"))
    assert json.loads((tmp_path / "record" / "metrics.jsonl").read_text().splitlines()[0])["config"]["evaluate"]
    assert not (tmp_path / "record" / "checkpoints").exists()
