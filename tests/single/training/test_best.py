"""The best epoch, early stopping, and a run that has ended: started again, it trains no more."""

import errno
import json
import os
import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hvdtrain import export, training
from hvdtrain.checkpoint import checkpoint
from hvdtrain.checkpoint import writer as writers
from hvdtrain.engines import lines
from hvdtrain.engines.errors import Failure, UserError
from tests.e2e.launchers import events, summary
from tests.single.training.small import Killed, N, Trained, X, Y, flags_for

VALUES = [0.3, 0.7, 0.9, 0.9, 0.8, 0.2, 0.1, 0.1]  # of the evaluations: the third epoch is the best


def program(directory, *argv, epochs=8, patience=2, at_head=False, values=VALUES, stop_in=None, every=1, stop=False):
    """Train with early stopping, decided at the end or at the head of an epoch. Return the epochs, and what `best` was."""
    seen = []
    with training.start(
        flags_for("--output-dir", str(directory), *argv, epochs=epochs), metrics={"score": "max"}
    ) as run:
        net = nn.Linear(3, 1)
        model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        for epoch in run.epochs(epochs):
            if at_head and run.best is not None and epoch - 1 - run.best.epoch >= patience:
                break
            for step in run.steps(X, Y):
                for x, y in step.batches():
                    step.backward(F.mse_loss(model(x), y))
                step.update()
            if epoch % every == 0:
                with run.evaluating(N) as mine:
                    run.record(loss=(model(X[mine]) - Y[mine]).square())
                run.record(score=values[epoch])
            if epoch == stop_in:
                raise Killed
            seen.append((epoch, run.best and (run.best.epoch, run.best.value)))
            if not at_head and patience is not None and epoch - run.best.epoch >= patience:
                break
        if stop:
            run.load_best()
            with run.evaluating(1):
                run.stop()
                while not run.stopping.watch.stop_reason:
                    time.sleep(0.01)
                run.record(score=0.0, count=1)
    return seen


STOPPED = [(0, (0, 0.3)), (1, (1, 0.7)), (2, (2, 0.9)), (3, (2, 0.9)), (4, (2, 0.9))]


@pytest.mark.parametrize("patience", [2, None])
def test_a_stop_in_an_evaluation_after_load_best_leaves_the_last_checkpoint_as_it_is(patience, tmp_path):
    """It got the weights of the best, beside the last optimizer, and forgot that early stopping had ended the run."""
    last = []
    for stop in (False, True):
        program(tmp_path / f"{stop}", patience=patience, stop=stop)
        facts, tensors = checkpoint.newest(tmp_path / f"{stop}" / "checkpoints", print)
        last.append((facts["ended"], {name: tensor.tolist() for name, tensor in tensors.items()}))
    assert last[0] == last[1]
    if patience:
        assert program(tmp_path / "True") == []


@pytest.mark.parametrize("at_head", [False, True])
def test_a_run_that_early_stopping_has_ended_trains_no_more(at_head, tmp_path, capsys):
    assert program(tmp_path, at_head=at_head) == STOPPED
    before = summary(tmp_path)
    capsys.readouterr()
    assert program(tmp_path, at_head=at_head) == []
    assert "training has ended after epoch 5, as the program left run.epochs there: with more epochs, it continues" in (
        capsys.readouterr().out
    )
    timeless = [{k: v for k, v in told.items() if "second" not in k} for told in (before, summary(tmp_path))]
    assert timeless[0] == timeless[1]
    longer = program(tmp_path, epochs=9, patience=None, values=[*VALUES, 0.95])
    assert longer[0] == (5, (2, 0.9))
    assert longer[-1] == (8, (8, 0.95))


def test_a_best_checkpoint_that_was_not_written_is_not_named(tmp_path, capsys, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpoint, "write_checkpoint", full)
    with pytest.raises(Failure, match="could not be written"):
        program(tmp_path, epochs=4, patience=None)
    assert capsys.readouterr().out.splitlines()[-1] == "best score 0.9000, of epoch 3"
    assert "checkpoint" not in summary(tmp_path)["best"]


def test_the_last_lines_say_which_epoch_is_best_and_that_a_run_has_finished(tmp_path, capsys, monkeypatch):
    program(tmp_path, epochs=4, patience=None)
    assert f"of epoch 3: {tmp_path}/checkpoints/step-" in capsys.readouterr().out.splitlines()[-1]
    monkeypatch.chdir(tmp_path.parent)
    best = f"best score 0.9000, of epoch 3: {tmp_path.name}/checkpoints/step-"
    assert program(tmp_path, epochs=4, patience=None) == []
    *_, finished, last = capsys.readouterr().out.splitlines()
    assert (finished.split(":")[0], best in last) == ("this run has finished", True)
    with pytest.raises(UserError, match=r"for 1 epoch, but epoch 4 has been reached"):
        program(tmp_path, epochs=1, patience=None)
    said = capsys.readouterr().out
    assert "instead of" not in said, "a length that is refused"
    program(tmp_path, epochs=0, patience=None)  # no training is wanted
    assert "has finished" not in capsys.readouterr().out


def test_a_killed_run_stops_where_an_uninterrupted_one_does(tmp_path):
    with pytest.raises(Killed):
        program(tmp_path, stop_in=3)
    assert program(tmp_path) == STOPPED[3:]


def test_the_best_epoch_is_kept_recorded_and_exported(tmp_path, capsys):
    program(tmp_path / "run", "--keep", "1")
    best = checkpoint.name_of(15)
    assert summary(tmp_path / "run")["best"] == {
        "metric": "score", "value": 0.9, "epoch": 3, "step": 15, "checkpoint": best,
    }  # fmt: skip
    assert [path.name for path in checkpoint.checkpoints_in(tmp_path / "run" / "checkpoints")] == [
        checkpoint.name_of(25),
        best,
    ]
    exported = {}
    for flags in ("", "--best"):
        capsys.readouterr()
        assert export.main([str(tmp_path / "run"), "--to", str(tmp_path / "weights.pt"), *flags.split()]) == 0
        said = capsys.readouterr().out
        assert said.endswith(f"as after step {15 if flags else 25}, score {0.9 if flags else 0.8:.4f}\n")
        exported[flags] = torch.load(tmp_path / "weights.pt", weights_only=True)
    _, tensors = checkpoint.read_checkpoint(tmp_path / "run" / "checkpoints" / best)
    assert torch.equal(exported["--best"]["weight"], tensors["model.weight"])
    assert not torch.equal(exported["--best"]["weight"], exported[""]["weight"])


@pytest.mark.parametrize("name", ["read_facts", "read_checkpoint"])
def test_the_best_of_a_run_that_trains_is_found_though_it_removes_checkpoints(name, tmp_path, capfd, monkeypatch):
    """It was a traceback, or the second best. What cannot be read stays, and is told."""
    program(tmp_path, patience=None, epochs=4)
    best, later = (tmp_path / "checkpoints" / checkpoint.name_of(step) for step in (15, 99))
    read = getattr(checkpoint, name)

    def trains(path):
        if path == best and not later.exists():
            best.rename(later)
        return read(path)

    monkeypatch.setattr(checkpoint, name, trains)
    (tmp_path / "checkpoints" / checkpoint.name_of(7)).symlink_to("gone")
    assert checkpoint.best(tmp_path, "", lines.warn)[0]["best"]["value"] == 0.9
    assert {line.split()[2] for line in capfd.readouterr().err.splitlines()} == {
        str(later.with_name(checkpoint.name_of(7)))
    }


def test_a_better_epoch_whose_checkpoint_is_gone_is_said(tmp_path, capfd):
    program(tmp_path, patience=None, epochs=4)
    for said in (False, True):
        assert export.main([str(tmp_path), "--best", "--to", str(tmp_path / "weights.pt")]) == 0
        line = (
            f"warning: {tmp_path}: step 15 was better, score 0.9000, and its checkpoint is not there: this is the best"
        )
        assert (line in capfd.readouterr().err) == said
        for path in (tmp_path / "checkpoints").glob("step-*"):
            if checkpoint.read_facts(path)["best"]["value"] == 0.9:
                path.unlink()


def test_without_an_evaluation_there_is_no_best_one(tmp_path):
    (tmp_path / "never").mkdir()
    with pytest.raises(
        UserError, match=r"never: no checkpoint of an epoch that was evaluated: evaluate in every epoch"
    ):
        export.main([str(tmp_path / "never"), "--best", "--to", str(tmp_path / "weights.pt")])


def test_an_epoch_that_is_not_evaluated_is_not_the_best(tmp_path):
    program(tmp_path, every=2, patience=None, epochs=4, values=[0.9, 0, 0.5, 0])
    assert summary(tmp_path)["best"]["epoch"] == 1
    scores = {
        path.name: checkpoint.read_facts(path)["best"] for path in checkpoint.checkpoints_in(tmp_path / "checkpoints")
    }
    assert scores[checkpoint.name_of(20)] is None
    assert [name for name, score in scores.items() if score] == [checkpoint.name_of(15), checkpoint.name_of(5)]


def test_a_best_snapshot_that_waits_for_the_disk_is_not_replaced(tmp_path, monkeypatch):
    import threading

    may_write, write = threading.Event(), checkpoint.write_checkpoint
    monkeypatch.setattr(checkpoint, "write_checkpoint", lambda *what: (may_write.wait(60), write(*what)))
    writer = writers.Writer(tmp_path, 1, lambda path, error: None)
    for step, value in enumerate([0.1, 0.9, 0.2, 0.3], 1):
        best = {"metric": "score", "direction": "max", "value": value}
        writer.put(
            {"format": checkpoint.CHECKPOINT_FORMAT, "best": best, "state": {"step": step}}, {"x": torch.zeros(1)}
        )
        while step == 1 and writer._waiting:
            threading.Event().wait(0.01)
    may_write.set()
    writer.flush()
    assert [path.name for path in checkpoint.checkpoints_in(tmp_path)] == [checkpoint.name_of(4), checkpoint.name_of(2)]


def test_a_checkpoint_of_the_best_that_is_damaged_is_said_and_the_next_one_taken(tmp_path, capsys):
    program(tmp_path, patience=None, epochs=4)
    path = tmp_path / "checkpoints" / checkpoint.name_of(15)
    path.write_bytes(path.read_bytes()[:-1])
    assert export.main([str(tmp_path), "--best", "--to", str(tmp_path / "weights.pt")]) == 0
    assert path.exists()
    assert "as after step 20, score 0.9000" in capsys.readouterr().out
    assert [line["epoch"] for line in events(tmp_path, "evaluate")] == [1, 2, 3, 4]
    assert json.loads((tmp_path / "summary.json").read_text())["best"]["step"] == 15


@pytest.mark.parametrize(("value", "told"), [(0.123, True), (1.23, False)])
def test_the_f1_of_a_batch_may_be_meant(value, told, capsys):
    with training.start(flags_for(epochs=2)) as run:
        model, _ = run.prepare(net := nn.Linear(3, 1), torch.optim.SGD(net.parameters(), lr=0.1))
        for _ in run.epochs(2):
            for step in run.steps(X, Y):
                for x, y in step.batches():
                    step.backward(F.mse_loss(model(x), y))
                step.update()
            with run.evaluating(N):
                run.record(val_f1=value)
    line = f"warning: run.record(val_f1={value}) is taken for a sum over {N} samples: if it is that of the batch, run.g"
    assert capsys.readouterr().out.count(line) == told


DECIDES = {  # the evaluations of an epoch, with the names that they record; what is said after the first one
    "the test set": (
        {"val": "loss", "test": "loss"},
        "the last evaluation of an epoch decides which is the best one: end it with val",
    ),
    "one without what decides": (
        {"": "loss", "plain": "score"},
        "no epoch is the best one, as the last evaluation of it has no loss: end it with the other",
    ),
    "none has what decides": (
        {"": "score"},
        "no epoch is the best one, as its evaluation has no loss: name what decides, such as "
        'training.start(flags, metrics={"score": "max"})',
    ),
    "the other set": ({"test": "loss", "val": "loss"}, ""),
    "the test set alone": ({"test": "loss"}, ""),
    "weights of two kinds": ({"": "loss", "plain": "loss"}, ""),
}  # fmt: skip


@pytest.mark.parametrize("case", DECIDES)
def test_what_decides_is_said_if_it_may_not_be_meant(case, tmp_path, capsys):
    evaluations, line = DECIDES[case]
    with training.start(flags_for("--output-dir", str(tmp_path), epochs=2)) as run:
        net = nn.Linear(3, 1)
        model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        for _ in run.epochs(2):
            for step in run.steps(X, Y):
                for x, y in step.batches():
                    step.backward(F.mse_loss(model(x), y))
                step.update()
            for prefix, name in evaluations.items():
                with run.evaluating(N, prefix=prefix) as mine:
                    run.record(**{name: (model(X[mine]) - Y[mine]).square()})
    said = [one for one in capsys.readouterr().out.splitlines() if one.startswith("warning")]
    assert said == [f"warning: {line}"] * bool(line)


def test_the_best_average_is_that_of_the_best_epoch(tmp_path):
    """The average stayed that of the last epoch, though the evaluation was its own."""
    seen = []
    with training.start(flags_for("--output-dir", str(tmp_path), epochs=4), metrics={"score": "max"}) as run:
        model, _ = run.prepare(net := nn.Linear(3, 1), torch.optim.SGD(net.parameters(), lr=0.1))
        averaged = torch.optim.swa_utils.AveragedModel(net)
        run.register(averaged=averaged)
        for epoch in run.epochs(4):
            for step in run.steps(X, Y):
                for x, y in step.batches():
                    step.backward(F.mse_loss(model(x), y))
                step.update()
                averaged.update_parameters(net)
            with run.evaluating(N):
                run.record(score=torch.full((N,), VALUES[epoch] if epoch < 3 else 0.1))
            seen.append(
                [one.detach().clone() for one in (*net.parameters(), *averaged.parameters(), averaged.n_averaged)]
            )
        assert run.load_best().epoch == 2
        for now, best in zip((*net.parameters(), *averaged.parameters(), averaged.n_averaged), seen[2], strict=True):
            assert torch.equal(now, best)


def test_an_evaluation_may_record_after_its_block_alone():
    """What is computed from gathered rows needed another value beside it."""

    def tail(t, epoch):
        with t.run.evaluating(N) as mine:
            scores = t.model(X[mine])
        t.run.record(score=t.run.gather(scores).max() * 0 + VALUES[epoch])

    run = Trained(metrics={"score": "max"}, tail=tail).run
    assert run.evaluation == {"score": pytest.approx(VALUES[1]), "count": N}
    assert run.best.epoch == 1
