"""--mirror and --resume with a URL: what is there after a run, after an outage and after a kill, and what is read back."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from hvdtrain import export, training
from hvdtrain.checkpoint import checkpoint, mirror_process
from hvdtrain.checkpoint.remote import Differs, Remote, identity
from hvdtrain.engines.errors import UserError
from hvdtrain.launching import processes
from tests.e2e import launchers
from tests.single.training import small
from tests.waiting import wait_for


def train(out: Path, *flags: str, until: int | None = None, epochs: int = 3) -> dict[str, torch.Tensor]:
    """Train, and return the weights. until: the step in which the run is killed."""
    with training.start(small.flags_for("--output-dir", str(out), *flags, epochs=epochs)) as run:
        torch.manual_seed(3)
        net = small.network()
        model, _ = run.prepare(net, torch.optim.Adam(net.parameters(), lr=0.01))
        small.train(run, model, each=small.kill_at(until))
    return net.state_dict()


def killed(out: Path, *flags: str, until: int) -> None:
    with pytest.raises(small.Killed):
        train(out, *flags, until=until)


def resumed(out: Path) -> list[int]:
    """Return the steps after which the run was continued."""
    return [line["step"] for line in launchers.events(out, "resume")]


def manifest(place: Path) -> dict:
    return json.loads((place / "mirror.json").read_text())


def files_in(place: Path) -> list[str]:
    return sorted(str(path.relative_to(place)) for path in place.rglob("*") if path.is_file())


def test_a_run_whose_disk_is_gone_continues_from_its_mirror_to_the_same_bits(tmp_path):
    there = f"file://{tmp_path}/there/run"
    whole = train(tmp_path / "whole")
    killed(tmp_path / "out", "--mirror", there, until=12)  # in the third epoch
    first = (tmp_path / "out/metrics.jsonl").read_text().splitlines()[0]
    shutil.rmtree(tmp_path / "out")
    ended = train(tmp_path / "out", "--mirror", there)
    torch.testing.assert_close(ended, whole, rtol=0, atol=0)
    lines = (tmp_path / "out/metrics.jsonl").read_text().splitlines()
    assert lines[0] == first  # one record of both parts
    assert resumed(tmp_path / "out") == [10]
    for name in files_in(tmp_path / "out"):
        if not name.startswith("."):
            assert (tmp_path / "there/run" / name).read_bytes() == (tmp_path / "out" / name).read_bytes(), name


def test_resume_from_a_url_needs_no_mirror_and_the_url_is_not_changed(tmp_path):
    there = f"file://{tmp_path}/there"
    whole = train(tmp_path / "whole")
    killed(tmp_path / "out", "--mirror", there, until=7)
    before = {name: (tmp_path / "there" / name).read_bytes() for name in files_in(tmp_path / "there")}
    ended = train(tmp_path / "other", "--resume", there)
    assert launchers.events(tmp_path / "other", "error") == []
    torch.testing.assert_close(ended, whole, rtol=0, atol=0)
    assert {name: (tmp_path / "there" / name).read_bytes() for name in files_in(tmp_path / "there")} == before


def test_what_is_newer_here_is_continued(tmp_path):
    there = f"file://{tmp_path}/there"
    killed(tmp_path / "out", "--mirror", there, until=7)
    killed(tmp_path / "out", until=12)
    train(tmp_path / "out", "--mirror", there)
    assert resumed(tmp_path / "out") == [5, 10]


def test_the_newest_are_kept_there_and_nothing_else(tmp_path):
    there = f"file://{tmp_path}/there"
    train(tmp_path / "out", "--mirror", there, "--keep", "2", "--checkpoint-steps", "1")
    names = sorted(path.name for path in (tmp_path / "out/checkpoints").iterdir())
    assert sorted(manifest(tmp_path / "there")["checkpoints"]) == names
    assert sorted(path.name for path in (tmp_path / "there/checkpoints").iterdir()) == names


def test_a_checkpoint_that_was_not_wholly_copied_is_not_taken(tmp_path):
    """The copy of the newest one is cut, as by a store that has lost a part; that of another was never finished."""
    there = tmp_path / "there"
    killed(tmp_path / "out", "--mirror", f"file://{there}", "--checkpoint-steps", "2", until=9)
    newest, second, *_ = sorted(manifest(there)["checkpoints"], reverse=True)
    whole = (there / "checkpoints" / newest).read_bytes()
    (there / "checkpoints" / newest).write_bytes(whole[: len(whole) // 2])
    (there / "checkpoints" / "step-00000011.safetensors").write_bytes(whole[:100])  # in no manifest
    shutil.rmtree(tmp_path / "out")
    train(tmp_path / "out", "--mirror", f"file://{there}", "--checkpoint-steps", "2")
    assert [checkpoint.name_of(step) for step in resumed(tmp_path / "out")] == [second]


def test_another_run_is_neither_replaced_nor_mixed_with_this_one(tmp_path):
    there = f"file://{tmp_path}/there"
    train(tmp_path / "out", "--mirror", there, epochs=1)
    before = {name: (tmp_path / "there" / name).read_bytes() for name in files_in(tmp_path / "there")}
    train(tmp_path / "other", epochs=1)
    with pytest.raises(UserError, match="has another run than"):
        train(tmp_path / "other", "--mirror", there)
    with pytest.raises(UserError, match="has another run than"):
        train(tmp_path / "other", "--resume", there)
    with pytest.raises(UserError, match="and --resume starts another"):
        train(tmp_path / "out", "--mirror", there, "--resume", "never")
    assert {name: (tmp_path / "there" / name).read_bytes() for name in files_in(tmp_path / "there")} == before


def test_a_place_that_cannot_be_used_is_refused_before_training(tmp_path):
    (tmp_path / "file").write_text("x")
    for url, said in (
        (f"file://{tmp_path}/file/run", "cannot be used"),
        ("nosuch://bucket/run", "cannot be used"),
    ):
        with pytest.raises(UserError, match=said):
            train(tmp_path / "out", "--mirror", url)
        assert not (tmp_path / "out/metrics.jsonl").exists()
    with pytest.raises(UserError, match="has no run: name another place"):
        train(tmp_path / "out", "--resume", f"file://{tmp_path}/nothing")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--mirror", "bucket/run"], "is not a URL such as"),
        (["--mirror", "sftp://me:secret@host/run"], "a password in the URL"),
        (["--mirror", "s3://bucket/run"], "--mirror needs --output-dir"),
        (["--resume", "s3://bucket/run"], "--resume URL needs --output-dir"),
        (["--mirror", "s3://bucket/run", "--output-dir", "x", "--evaluate", "y"], "leave it out with --evaluate"),
    ],
)
def test_flags_that_cannot_be_meant(flags, said):
    with pytest.raises(UserError, match=said):
        small.flags_for(*flags)


def test_the_weights_are_exported_from_a_url(tmp_path):
    there = f"file://{tmp_path}/there"
    train(tmp_path / "out", "--mirror", there)
    for place, to in ((there, "url.pt"), (str(tmp_path / "out"), "path.pt")):
        assert export.main([place, "--to", str(tmp_path / to)]) == 0
    torch.testing.assert_close(
        torch.load(tmp_path / "url.pt", weights_only=True), torch.load(tmp_path / "path.pt", weights_only=True)
    )
    with pytest.raises(UserError, match="has no evaluated checkpoint"):
        export.main([there, "--best", "--to", str(tmp_path / "best.pt")])
    with pytest.raises(UserError, match="has no checkpoint"):
        export.main([f"file://{tmp_path}/nothing", "--to", str(tmp_path / "x.pt")])


def test_a_run_at_a_url_is_evaluated_as_the_one_here_is(tmp_path, capsys):
    there = f"file://{tmp_path}/there"
    train(tmp_path / "out", "--mirror", there)
    capsys.readouterr()
    losses = []
    for place in (str(tmp_path / "out"), there):
        with training.start(small.flags_for("--evaluate", place)) as run:
            net = small.network()
            model, _ = run.prepare(net, torch.optim.Adam(net.parameters(), lr=0.01))
            for _ in run.epochs(3):
                with run.evaluating(small.N) as mine:
                    run.record(loss=(model(small.X[mine]) - small.Y[mine]).square().flatten())
        losses.append(run.evaluation["loss"])
    assert losses[0] == losses[1]
    assert "copied" not in capsys.readouterr().out
    with pytest.raises(UserError, match=r"--evaluate file:.*nothing has no checkpoint"):
        training.start(small.flags_for("--evaluate", f"file://{tmp_path}/nothing")).__enter__()


def test_a_copying_process_that_is_killed_is_told_and_training_goes_on(tmp_path, capfd):
    there = f"file://{tmp_path}/there"
    with training.start(small.flags_for("--output-dir", str(tmp_path / "out"), "--mirror", there)) as run:
        net = small.network()
        model, _ = run.prepare(net, torch.optim.Adam(net.parameters(), lr=0.01))
        commands = {pid: processes.command_line(pid) for pid in processes.descendants(os.getpid())}
        (process,) = [pid for pid, words in commands.items() if "hvdtrain.checkpoint.mirror_process" in words]
        os.kill(process, signal.SIGKILL)
        wait_for(lambda: launchers.events(tmp_path / "out", "error"), "nobody is told")
        small.train(run, model)
    assert capfd.readouterr().err.count("its process has ended with exit code -9: training continues") == 1
    train(tmp_path / "out", "--mirror", there)
    assert sorted(manifest(tmp_path / "there")["checkpoints"])[-1] == checkpoint.name_of(15)


class Output:
    """An output directory as a run leaves it, without a run."""

    def __init__(self, directory: Path):
        self.directory = directory
        (directory / "checkpoints").mkdir(parents=True)
        (directory / "metrics.jsonl").write_text('{"event": "start"}\n')

    def save(self, step: int, best: float | None = None) -> Path:
        path = self.directory / "checkpoints" / checkpoint.name_of(step)
        facts = {"best": best and {"metric": "loss", "direction": "min", "value": best}}
        checkpoint.write(path, facts, {"a": torch.randn(1000)})
        return path


@pytest.fixture
def output(tmp_path):
    return Output(tmp_path / "out")


def mirrored(output: Output, url: str, keep: int = 3) -> mirror_process.Mirror:
    (output.directory / "metrics.jsonl").unlink()
    found = mirror_process.prepare(output.directory, url, "auto", keep)
    (output.directory / "metrics.jsonl").write_text('{"event": "start"}\n')
    return found


def test_an_outage_is_told_once_and_made_good(output, tmp_path, capfd):
    mirror = mirrored(output, f"file://{tmp_path}/there")
    output.save(1)
    assert mirror.look()
    (tmp_path / "there").rename(tmp_path / "elsewhere")
    (tmp_path / "there").write_text("no directory")
    for step in (2, 3):
        output.save(step)
        assert not mirror.look()
    (tmp_path / "there").unlink()
    (tmp_path / "elsewhere").rename(tmp_path / "there")
    assert mirror.look()
    assert mirror.look()
    said = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert [kind for kind, _ in said] == ["warn", "say"]
    assert "cannot be written for now (" in said[0][1]
    assert [int(name[5:13]) for name in manifest(tmp_path / "there")["checkpoints"]] == [3, 2, 1]


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("cut", ["put_file", "pipe_file", "mv"])
def test_at_whatever_request_a_copy_ends_what_the_manifest_names_is_whole(cut, again, output, tmp_path, monkeypatch):
    """again: a step is copied again, as another attempt has written it: its name is then that of half a file."""
    there = f"file://{tmp_path}/there"
    mirror = mirrored(output, there)
    if again:
        output.save(2)
        assert mirror.look()
    output.save(2)
    output.save(3)
    system = type(mirror._remote._fs)
    real, calls, whole = getattr(system, cut), [], []

    def fail(fs, source, *rest, **options):
        calls.append(source)
        if len(calls) == len(whole) + 1:  # in each round one request later
            if cut == "put_file":
                Path(rest[0]).write_bytes(Path(source).read_bytes()[:50])
            raise ConnectionError("killed here")
        return real(fs, source, *rest, **options)

    monkeypatch.setattr(system, cut, fail)
    while True not in whole:
        calls.clear()
        whole.append(mirror.look())
        with monkeypatch.context() as patch:
            patch.setattr(system, cut, real)
            reader = Remote(there)
            reader.read()
            for name in reader.checkpoints:
                reader.get(name, tmp_path)  # raises if it is not whole
            if reader.checkpoints:
                mirror_process.prepare(tmp_path / f"fresh-{len(whole)}", None, there, 3)
                assert identity(tmp_path / f"fresh-{len(whole)}") == identity(output.directory)
    assert whole[0] is False


def test_what_was_read_back_otherwise_is_copied_again(output, tmp_path, monkeypatch):
    mirror = mirrored(output, f"file://{tmp_path}/there")
    path = output.save(1)
    real = type(mirror._remote._fs).put_file

    def flip(fs, source, target, **options):
        real(fs, source, target, **options)
        content = bytearray(Path(target).read_bytes())
        content[-1] ^= 1
        Path(target).write_bytes(content)

    with monkeypatch.context() as patch:
        patch.setattr(type(mirror._remote._fs), "put_file", flip)
        assert not mirror.look()
        assert manifest(tmp_path / "there")["checkpoints"] == {}
    assert mirror.look()
    assert (tmp_path / "there/checkpoints" / path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("fault", [None, RuntimeError("cut, as a library says it")])
def test_a_checkpoint_that_is_pruned_here_while_it_is_copied_leaves_nothing_there(fault, output, tmp_path, monkeypatch):
    mirror = mirrored(output, f"file://{tmp_path}/there", keep=1)
    real = type(mirror._remote._fs).put_file

    def put_file(fs, source, target, **options):
        real(fs, source, target, **options)
        if source.endswith("1.safetensors"):
            output.save(2)
            Path(source).unlink()
            if fault is not None:
                raise fault

    monkeypatch.setattr(type(mirror._remote._fs), "put_file", put_file)
    output.save(1)
    assert mirror.look()
    assert list(manifest(tmp_path / "there")["checkpoints"]) == [checkpoint.name_of(2)]
    assert [path.name for path in (tmp_path / "there/checkpoints").iterdir()] == [checkpoint.name_of(2)]


def test_what_a_killed_writer_has_left_is_removed(output, tmp_path):
    """Not what is no checkpoint: it is the user's own."""
    there = tmp_path / "there"
    (there / "checkpoints").mkdir(parents=True)
    (there / "checkpoints/step-00000009.safetensors").write_bytes(b"half")
    (there / "checkpoints/README").write_text("mine")
    mirror = mirrored(output, f"file://{there}")
    output.save(1)
    assert mirror.look()
    assert sorted(path.name for path in (there / "checkpoints").iterdir()) == ["README", "step-00000001.safetensors"]


def test_the_best_one_is_copied_back_beside_the_newest(output, tmp_path):
    mirror = mirrored(output, f"file://{tmp_path}/there")
    for step, loss in ((1, 0.5), (2, 0.1), (3, 0.4), (4, None)):
        output.save(step, loss)
    assert mirror.look()
    shutil.rmtree(output.directory)
    mirror_process.prepare(output.directory, f"file://{tmp_path}/there", "auto", 3)
    assert [path.name[5:13] for path in checkpoint.listed(output.directory / "checkpoints")] == ["00000004", "00000002"]
    assert identity(output.directory) == manifest(tmp_path / "there")["run"]


def test_a_manifest_leads_nowhere_else(tmp_path):
    (tmp_path / "mirror.json").write_text(
        json.dumps({"run": "x", "checkpoints": {"../../x": {"sha256": "", "best": None}}})
    )
    with pytest.raises(UserError, match="is not of a run"):
        mirror_process.prepare(tmp_path / "out", None, f"file://{tmp_path}", 3)
    remote = Remote(f"file://{tmp_path}")
    remote.checkpoints = {"step-00000001.safetensors": {"sha256": "0"}}
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints/step-00000001.safetensors").write_bytes(b"x")
    with pytest.raises(Differs):
        remote.get("step-00000001.safetensors", tmp_path)
    assert files_in(tmp_path) == ["checkpoints/step-00000001.safetensors", "mirror.json"]


def test_the_process_ends_with_rank_0_and_does_not_need_torch(output, tmp_path):
    asked = dict(
        parent=os.getpid(), output_dir=str(output.directory), mirror=f"file://{tmp_path}/there", resume="auto", keep=3
    )
    program = [sys.executable, "-X", "importtime", "-m", "hvdtrain.checkpoint.mirror_process", json.dumps(asked)]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert json.loads(process.stdout.readline()) == ["ready", ""]
        output.save(1)
        with (output.directory / "metrics.jsonl").open("a") as record:
            record.write("{}\n")
        until = time.monotonic() + 60
        while not manifest(tmp_path / "there")["checkpoints"] and time.monotonic() < until:
            time.sleep(0.05)
        process.stdin.close()
        assert process.wait(60) == 1
        imported = {line.rpartition("|")[2].strip() for line in process.stderr.read().decode().splitlines()}
        assert {"fsspec", "safetensors"} <= imported
        assert "torch" not in imported
        assert [name[5:13] for name in manifest(tmp_path / "there")["checkpoints"]] == ["00000001"]
