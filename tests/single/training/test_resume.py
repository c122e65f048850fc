"""What --output-dir, --resume, --checkpoint-steps and --keep do, in one process."""

import errno
import os
import re
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from hvdtrain import export, imagenet, mnist, training
from hvdtrain.checkpoint import checkpoint
from hvdtrain.checkpoint import writer as writers
from hvdtrain.checkpoint.differences import differences
from hvdtrain.checkpoint.writer import CheckpointInterval
from hvdtrain.engines.errors import Failure, UserError
from hvdtrain.engines.launchers import Announced
from hvdtrain.engines.lock import Lock
from hvdtrain.guards import watch
from hvdtrain.guards.activity import Activity
from hvdtrain.loop.state import Initial
from tests.e2e.launchers import events, summary
from tests.single.training.small import Killed, Trained, flags_for, killed, train
from tests.single.unwritable import UNWRITABLE


def alone(directory: Path, flags: str = "") -> int:
    command = "mnist --dataset digits --model convnet --engine serial --no-progress --train-samples 128 --epochs 2"
    command += f" --output-dir {directory}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", f"{command} {flags}".split())
        return mnist.main()


def results(directory: Path) -> dict:
    return {k: v for k, v in summary(directory).items() if "second" not in k}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    directory = tmp_path_factory.mktemp("finished")
    assert alone(directory, "--checkpoint-steps 1 --keep 2") == 0
    return directory


@pytest.fixture
def copy(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "copy")


def test_without_a_number_of_steps_checkpoints_are_saved_by_time(tmp_path, monkeypatch):
    monkeypatch.setattr(CheckpointInterval, "seconds", 0.0)
    saved = {}
    for flags in ("", "--checkpoint-steps 0"):
        directory = tmp_path / f"out{len(flags)}"
        assert alone(directory, f"--batch-size 16 {flags}") == 0
        saved[flags] = {line["step"] for line in events(directory, "checkpoint")}
        facts = checkpoint.read_checkpoint(checkpoint.checkpoints_in(directory / "checkpoints")[0])[0]
        assert not facts["automatic"]  # the last epoch's
    assert saved["--checkpoint-steps 0"] <= {8, 16}
    assert len(saved[""]) > 3
    assert results(tmp_path / "out0") == results(tmp_path / "out20")


def test_another_order_of_files_is_told_as_that():
    facts = {
        "initial": Initial(1, 8, 1)._asdict(),
        "config": {},
        "typed": {},
        "data": {"dataset": "book", "sha256": "a"},
    }
    (one,) = [
        one for one in differences(facts, flags_for(), {}, {"dataset": "book", "sha256": "b"}, 1) if "SHA" in one.name
    ]
    assert one == ("the content of the data, or the order of its files, as SHA-256", "a", "b")


OTHER_FLAGS = {
    "--lr 0.5 --seed 3": "(--seed: 1 in the checkpoint, 3 now; --lr: 0.01 in the checkpoint, 0.5 now): give the same",
    "--train-samples 100": "(train_samples: 128 in the checkpoint, 100 now): give the same, or another --output-dir",
    "--lr 0.5 --seed 3 --train-samples 100 --momentum 0.5 --weight-decay 0.1": "; and 2 more): give the same, or another ",
    "--model cosinenet": "(--model: convnet in the checkpoint, cosinenet now; ",  # first: the cause of the others
}


@pytest.mark.parametrize("flags", OTHER_FLAGS)
def test_another_configuration_is_refused_with_the_flags_named(flags, copy):
    before = sorted(path.name for path in (copy / "checkpoints").iterdir())
    with pytest.raises(UserError) as refused:
        alone(copy, flags)
    assert "holds a run with different flags (" in str(refused.value)
    assert OTHER_FLAGS[flags] in str(refused.value)
    assert str(refused.value).count(" in the checkpoint, ") <= 3
    assert sorted(path.name for path in (copy / "checkpoints").iterdir()) == before


def test_a_resumed_run_says_that_other_weights_are_not_used(copy, tmp_path, capfd):
    """And does not need those with which it began."""
    file = tmp_path / "weights.pt"
    assert export.main([str(copy), "--to", str(file)]) == 0
    assert alone(copy, f"--weights {file}") == 0
    assert f"--weights {file} is not used: the weights are those of the checkpoint" in capfd.readouterr().out
    assert alone(tmp_path / "out", f"--weights {file}") == 0
    file.unlink()
    assert alone(tmp_path / "out", f"--epochs 3 --weights {file}") == 0
    with pytest.raises(UserError, match="No such file or directory: name a file that can be read"):
        alone(tmp_path / "out", f"--resume never --weights {file}")


IN_THE_FIRST_STEP = {
    "--lr 0.5": "different flags (--lr: 0.01 in the checkpoint, 0.5 now): continued with those given now",
    "--momentum 0.3": "(--momentum, Adam betas 0: 0.9 in the checkpoint, 0.3 now): those of the checkpoint are kept",
}


@pytest.mark.parametrize("flags", IN_THE_FIRST_STEP)
def test_one_line_says_which_settings_the_first_step_has(flags, finished, tmp_path, capfd):
    """Two lines said that those given now were used, and that they were not."""
    outputs = {given: tmp_path / f"out{len(given)}" for given in ("", flags)}
    for given, directory in outputs.items():
        assert alone(directory, f"--resume {finished} --epochs 3 --checkpoint-steps 1 {given}") == 0
    (line,) = (line for line in capfd.readouterr().err.splitlines() if " now)" in line)
    assert line.endswith(IN_THE_FIRST_STEP[flags])
    assert [event["message"] for event in events(outputs[flags], "error")] == [line.removeprefix("warning: ")]
    hashes = {summary(directory)["parameters_sha256"] for directory in outputs.values()}
    assert len(hashes) == (1 if "kept" in line else 2)


@pytest.mark.parametrize("begins", [4, 0])
def test_a_requeued_job_continues_what_it_has_written_and_another_says_what_it_leaves(
    begins, tmp_path, monkeypatch, capfd
):
    """Started again by Slurm with --resume PATH or never, it began there again."""
    earlier, out = tmp_path / "earlier", tmp_path / "out"
    Trained("--checkpoint-steps", "1", "--keep", "99", out=earlier, epochs=1)
    resume = earlier / "checkpoints" / checkpoint.name_of(begins) if begins else "never"
    monkeypatch.setenv("SLURM_STEP_ID", "0")

    def start(job: str, count: str, kill: int) -> int:
        monkeypatch.setenv("SLURM_JOB_ID", job)
        monkeypatch.setenv("SLURM_RESTART_COUNT", count)
        killed(Trained, "--checkpoint-steps", "1", "--resume", str(resume), out=out, kill=kill)
        return ([0] + [event["step"] for event in events(out, "resume")])[-1]

    assert start("7", "0", kill=6) == begins
    assert start("7", "1", kill=8) == 5
    said = capfd.readouterr()
    assert f"--resume {resume} was for the first start: the requeued job continues {out}\n" in said.out
    assert "kept in" not in said.err
    for number, (job, count) in enumerate([("7", "1"), ("8", "2"), ("8", "2")], start=1):
        assert start(job, count, kill=6) == begins
        said = capfd.readouterr()
        assert "was for the first start" not in said.out
        kept = f"{out} had a run up to {checkpoint.name_of(7 if number == 1 else 5)}, kept in checkpoints.{number}"
        line = f"warning: {kept}: training begins at --resume {resume}; without it, that run is continued\n"
        assert (line in said.err) == (begins > 0)


def test_what_rounds_differently_is_said(tmp_path, monkeypatch, capsys):
    """Of two threads on one core, or on an older processor, a resumed run had other bits, without a word."""
    with pytest.raises(Killed):
        Trained("--checkpoint-steps", "1", "--threads", "2", out=tmp_path, kill=3)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "OLDER")
        Trained("--checkpoint-steps", "1", out=tmp_path, kill=6)
    out = capsys.readouterr().out
    assert "--threads 1 instead of 2: results may be rounded differently" in out
    assert re.search(r"processor \w+ OLDER instead of \w+ \w+: results may be rounded differently", out)
    with monkeypatch.context() as patch:
        patch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "OLDER")
        Trained(out=tmp_path)
    assert "rounded differently" not in capsys.readouterr().out
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")  # it had other bits, without a word
    Trained("--epochs", "3", out=tmp_path)
    assert "MKL_CBWR=COMPATIBLE instead of" in capsys.readouterr().out


def test_damaged_checkpoints_are_skipped_with_a_warning(copy, capfd):
    expected = results(copy)
    newest = checkpoint.checkpoints_in(copy / "checkpoints")[0]
    newest.write_bytes(newest.read_bytes()[:-100])
    assert alone(copy, "--checkpoint-steps 1 --keep 2") == 0
    assert f"{checkpoint.name_of(4)} is damaged" in capfd.readouterr().err
    assert results(copy) == expected
    assert events(copy, "resume")[0]["step"] == 3


def test_where_no_checkpoint_is_left_or_sound_nothing_begins_anew_by_itself(copy, finished):
    """They were compressed, moved, or damaged: training began at the first step, exit code 0."""
    before = (copy / "metrics.jsonl").read_text()
    (copy / "checkpoints").rename(copy / "elsewhere")
    with pytest.raises(UserError, match=r"had saved step \d+, and no checkpoint: put checkpoints back as it was, or"):
        alone(copy)
    assert (copy / "metrics.jsonl").read_text() == before
    assert not (copy / "checkpoints").exists()
    (copy / "elsewhere").rename(copy / "checkpoints")
    paths = checkpoint.checkpoints_in(copy / "checkpoints")
    for path in paths:
        path.write_bytes(b"")
    for _ in range(2):
        with pytest.raises(UserError, match=r"^all checkpoints in .* are damaged .*: put one back .* --resume never"):
            alone(copy)
        assert checkpoint.checkpoints_in(copy / "checkpoints") == paths
    assert alone(copy, "--resume never") == 0
    assert results(copy) == results(finished)
    assert checkpoint.checkpoints_in(copy / "checkpoints.1") != []
    assert events(copy, "resume") == []


def test_where_none_can_be_read_the_run_is_refused_and_nothing_moved(copy, monkeypatch):
    """As by a file system that does not answer for a moment. Exit code 1: with --restarts it is tried again."""

    def fail(path):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    before = sorted(path.name for path in copy.rglob("*"))
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "read_checkpoint", fail)
        with pytest.raises(Failure, match=r"no checkpoint in \S+ can be read \(Input/output error\)"):
            alone(copy)
        with pytest.raises(Failure, match=r"--resume \S+ cannot be read \(Input/output error\): start again once"):
            alone(copy, f"--resume {checkpoint.checkpoints_in(copy / 'checkpoints')[0]}")
    assert sorted(path.name for path in copy.rglob("*")) == before
    assert alone(copy) == 0


def test_a_named_checkpoint_is_continued_elsewhere(copy, tmp_path):
    named = checkpoint.checkpoints_in(copy / "checkpoints")[1]
    assert alone(tmp_path / "new", f"--resume {named}") == 0
    assert results(tmp_path / "new") == results(copy)
    for wrong, complaint in ((tmp_path / "none", "No such file"), (copy / "metrics.jsonl", "name a valid checkpoint")):
        with pytest.raises(UserError, match=complaint):
            alone(tmp_path / "new", f"--resume {wrong}")


def test_a_batch_size_that_nobody_gave_may_differ_on_other_ranks(tmp_path, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        patch.setattr("hvdtrain.mnist.announced", lambda: Announced("mpirun", 0, 3))
        patch.setattr("hvdtrain.checkpoint.resume.Initial", lambda *now: Initial(3, *now[1:]))
        assert alone(tmp_path, "--model cosinenet") == 0
    with pytest.raises(UserError, match=r"\(--batch-size: 85 in the checkpoint, 64 now\)"):
        alone(tmp_path, "--model cosinenet --batch-size 64")
    assert alone(tmp_path, "--model cosinenet") == 0
    assert "global batch kept at 255: the run began on 3 ranks; now up to 255 per rank" in capsys.readouterr().out


@pytest.mark.parametrize(("began", "default"), [("off", "auto"), ("bf16", "off")])
def test_without_the_flag_a_run_computes_as_it_began(began, default, tmp_path, monkeypatch):
    monkeypatch.setattr("hvdtrain.engines.choice.computes_in_bf16", lambda device: True)
    Trained("--output-dir", str(tmp_path), "--amp", began, epochs=1)
    flags = flags_for("--output-dir", str(tmp_path))
    monkeypatch.setattr(flags, "_amp_of_cpus", default)
    with training.start(flags) as run:
        assert run.flags.amp == began


def test_two_runs_cannot_write_in_one_place(copy, monkeypatch):
    monkeypatch.setattr("hvdtrain.checkpoint.resume.RUN_LOCK_SECONDS", 0.3)
    held = Lock(copy, 1)
    try:
        with pytest.raises(UserError, match="another run writes to"):
            alone(copy)
    finally:
        held.release()


def test_a_run_that_was_moved_with_its_program_continues(tmp_path, monkeypatch):
    """Also where the home directory is elsewhere. Flags that name files were compared as absolute paths."""

    def run_in(directory: str, files: str) -> None:
        parser = training.parser("listed", None, epochs=1)
        parser.add_argument("--list", type=Path)
        parser.add_argument("--more", type=Path, nargs="+")
        monkeypatch.chdir(tmp_path / directory)
        flags = parser.parse(f"--engine serial --no-progress --threads 1 --output-dir out {files}".split())
        with training.start(flags) as run:
            net = torch.nn.Linear(3, 1)
            model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
            train(run, model)

    (tmp_path / "here").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "here"))
    run_in("here", "--list data/list.txt --more ~/a b")
    (tmp_path / "here").rename(tmp_path / "there")
    monkeypatch.setenv("HOME", str(tmp_path / "there"))
    run_in("there", "--list data/list.txt --more ~/a b")
    with pytest.raises(UserError, match=r"--list: /\S*/here/data/list.txt in the checkpoint, /\S*/there/list.txt now"):
        run_in("there", "--list list.txt --more ~/a b")


def test_a_directory_that_was_moved_is_not_written_under_its_old_name(tmp_path, monkeypatch, capfd):
    """Another run may have begun there. The same command did so, and both wrote the same checkpoints."""
    evaluating, moved = training.Run.evaluating, []

    def move(*arguments, **options):
        if not moved:
            moved.append((tmp_path / "out").rename(tmp_path / "elsewhere"))
            (tmp_path / "out" / "checkpoints").mkdir(parents=True)  # of the other run
            (tmp_path / "out" / ".lock").touch()
        return evaluating(*arguments, **options)

    monkeypatch.setattr(training.Run, "evaluating", move)
    with pytest.raises(Failure, match=f"{tmp_path}/out was moved while this run writes there.: start again with "):
        alone(tmp_path / "out")
    assert not list((tmp_path / "out").glob("checkpoints/*"))
    assert not (tmp_path / "out" / "summary.json").exists()
    assert events(tmp_path / "elsewhere", "end")
    assert "was moved while this run writes there): training continues; " in capfd.readouterr().err


def test_a_file_in_place_of_the_checkpoints_is_said_at_the_start(tmp_path):
    (tmp_path / "checkpoints").touch()
    with pytest.raises(UserError, match=rf"--output-dir {tmp_path} cannot be .* \({tmp_path}/checkpoints: File exists"):
        alone(tmp_path)


def test_a_path_without_room_for_the_names_of_checkpoints_is_said_at_the_start(tmp_path, monkeypatch):
    """It trained to the end, and then could not write the last checkpoint."""
    monkeypatch.chdir(tmp_path)
    most = os.pathconf("/", "PC_PATH_MAX") - len(str(tmp_path)) - len("/checkpoints/step-00000000.safetensors")
    parts = "/".join(["e" * 99] * (most // 100 - 1))
    with pytest.raises(UserError, match=r"checkpoints: File name too long\): name another directory"):
        alone(tmp_path / parts / ("f" * (most - len(parts) - 3)))


def test_more_samples_than_an_epoch_has_are_refused(copy):
    newest = checkpoint.checkpoints_in(copy / "checkpoints")[0]
    facts, tensors = checkpoint.read_checkpoint(newest)
    facts["state"] |= dict(epoch=1, samples=10**9, samples_of_epoch=10**6)
    checkpoint.write_checkpoint(newest, facts, tensors)
    with pytest.raises(UserError, match=r"the checkpoint does not match the data: 1000000 samples of this epoch"):
        alone(copy, "--checkpoint-steps 1 --keep 2")


def test_a_pipe_in_place_of_the_record_is_put_aside(copy):
    (copy / "metrics.jsonl").unlink()
    os.mkfifo(copy / "metrics.jsonl")
    assert alone(copy, "--checkpoint-steps 1 --keep 2") == 0
    assert (copy / "metrics.1.jsonl").is_fifo()
    assert events(copy, "end")


@pytest.mark.parametrize("kind", UNWRITABLE)
def test_training_goes_on_where_nothing_can_be_said(kind, tmp_path, monkeypatch):
    """The warning of a checkpoint that failed ended the thread that writes them, and the run waited for it for 600 s."""
    write, failed = checkpoint.write_checkpoint, []

    def fail_once(path, *rest):
        if not failed:
            failed.append(path)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, *rest)

    monkeypatch.setattr(checkpoint, "write_checkpoint", fail_once)
    monkeypatch.setattr(writers, "PATIENCE_SECONDS", 20.0)
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, UNWRITABLE[kind]())
    assert alone(tmp_path, "--log-steps 1") == 0
    assert failed
    assert (tmp_path / "checkpoints" / checkpoint.name_of(4)).exists()
    assert results(tmp_path)["steps"] == 4


def test_a_removed_directory_is_made_again(tmp_path, monkeypatch):
    evaluating = training.Run.evaluating

    def remove(*arguments, **options):
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        return evaluating(*arguments, **options)

    monkeypatch.setattr(training.Run, "evaluating", remove)
    assert alone(tmp_path / "out") == 0
    checkpoint.read_checkpoint(tmp_path / "out" / "checkpoints" / checkpoint.name_of(4))


REMEDIES = {
    errno.ENOSPC: "free some space there",
    errno.EROFS: "make it writable",
    errno.EIO: "examine its file system",
    errno.ELOOP: "name the directory itself in --output-dir",
}


@pytest.mark.parametrize("number", REMEDIES)
def test_a_last_checkpoint_that_cannot_be_written_says_what_to_do_and_what_is_left(tmp_path, monkeypatch, number):
    write = checkpoint.write_checkpoint

    def fail_at_the_end(path, *rest):
        if path.name == checkpoint.name_of(4):
            raise OSError(number, os.strerror(number))
        write(path, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_checkpoint", fail_at_the_end)
        with pytest.raises(Failure) as failure:
            alone(tmp_path, "--checkpoint-steps 1")
    place = tmp_path / "checkpoints"
    assert str(failure.value) == (
        f"the last checkpoint could not be written to {place} ({os.strerror(number)}): {REMEDIES[number]}; "
        "--resume auto then continues from step-00000003.safetensors"
    )
    assert alone(tmp_path) == 0
    assert results(tmp_path)["steps"] == 4


def signalled(number: signal.Signals, after: int):
    """Return an Activity.begin_step that sends this process a signal before the step `after` + 1, and waits until it is
    seen."""
    begin_step = Activity.begin_step

    def begin(self, step):
        begin_step(self, step)
        if step == after:
            os.kill(os.getpid(), number)
            while not self.asked:
                time.sleep(0.01)

    return begin


def test_a_resumed_run_that_cannot_save_names_the_checkpoint_that_it_has(tmp_path, monkeypatch, capsys):
    """It said that there is no earlier one."""
    alone(tmp_path, "--checkpoint-steps 2 --epochs 1")
    name = checkpoint.checkpoints_in(tmp_path / "checkpoints")[0].name

    def fail(path, *rest):
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(checkpoint, "write_checkpoint", fail)
    with pytest.raises(Failure, match=f"--resume auto then continues from {name}"):
        alone(tmp_path, "--checkpoint-steps 2 --epochs 2")
    assert f"the last good one is {name}" in "".join(capsys.readouterr())


def test_an_output_directory_may_be_a_text_that_the_program_sets(tmp_path):
    """It was a TypeError."""
    flags = flags_for()
    flags.output_dir = str(tmp_path / "out")
    with training.start(flags):
        pass
    assert (tmp_path / "out").is_dir()


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGHUP, signal.SIGXCPU])
def test_stop_signal_saves_and_leaves_with_75(number, finished, tmp_path, monkeypatch):
    """Also one that the launcher has blocked: the mask is inherited, and the run went on to its end."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked := {signal.SIGUSR1} & {number})
    try:
        with monkeypatch.context() as patch:
            patch.setattr(watch, "_blocked", blocked)
            patch.setattr(Activity, "begin_step", signalled(number, 1))
            assert alone(tmp_path / "out") == 75
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    (stop,) = events(tmp_path / "out", "stop")
    assert stop["reason"].startswith(f"{number.name} on rank 0")
    assert stop["step"] == 2
    assert alone(tmp_path / "out") == 0
    assert results(tmp_path / "out") == results(finished)


def images(monkeypatch, directory: Path, flags: str, stop_after: int | None = None) -> int:
    words = "imagenet --dataset synthetic --engine serial --model mobilenet_v3_small --image-size 32 --classes 10 --epochs 1"
    words += f" --workers 0 --threads 1 --no-progress --output-dir {directory} {flags}"
    with monkeypatch.context() as patch:
        patch.setattr(sys, "argv", words.split())
        if stop_after is not None:
            patch.setattr(Activity, "begin_step", signalled(signal.SIGTERM, stop_after))
        return imagenet.main()


def test_imagenet_goes_on_to_the_same_bits(tmp_path, monkeypatch):
    """With dropout, whose draws follow from the position."""
    flags = "--lr 0.1 --train-samples 20 --batch-size 4 --checkpoint-steps 2"
    assert images(monkeypatch, tmp_path / "whole", flags) == 0
    assert images(monkeypatch, tmp_path / "apart", flags, stop_after=3) == 75
    assert images(monkeypatch, tmp_path / "apart", flags) == 0
    assert events(tmp_path / "apart", "resume")[0]["step"] == 4
    assert results(tmp_path / "apart") == results(tmp_path / "whole")


def test_a_rate_derived_from_the_batch_stays_that_of_the_runs_beginning(tmp_path, monkeypatch):
    """As 4 ranks x 64 continued on 2 ranks x 128: nobody typed a rate, and none has changed."""
    flags, twice = "--train-samples 24 --log-steps 1 --batch-size", "4 --accumulate 2"
    assert images(monkeypatch, tmp_path / "whole", f"{flags} {twice}") == 0
    assert images(monkeypatch, tmp_path / "apart", f"{flags} {twice}", stop_after=1) == 75
    assert images(monkeypatch, tmp_path / "apart", f"{flags} 8") == 0
    whole, apart = ([line["learning_rate"] for line in events(tmp_path / name, "train")] for name in ("whole", "apart"))
    assert len(whole) == 3
    assert apart == whole
