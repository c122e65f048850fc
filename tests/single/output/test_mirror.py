"""--mirror and --resume with a URL: what is there after a run, after an outage and after a kill, and what is read back."""

import hashlib
import json
import os
import shutil
import threading
from functools import partial
from pathlib import Path

import pytest
import torch

from hvdtrain import export, training
from hvdtrain.checkpoint import checkpoint
from hvdtrain.checkpoint.mirror import Mirror, Remote, readable, run_identity
from hvdtrain.engines.errors import UserError
from hvdtrain.engines.single import SerialEngine
from hvdtrain.output.run_output import RunOutput
from tests.e2e import launchers
from tests.single.training import small
from tests.waiting import wait_for


def train(out: Path, *flags: str, until: int | None = None, epochs: int = 3, **more) -> dict[str, torch.Tensor]:
    """Train, and return the weights. until: the step in which the run is killed."""
    adam = partial(torch.optim.Adam, lr=0.01)
    return small.Trained(*flags, out=out, optimizer=adam, seed=3, epochs=epochs, kill=until, **more).net.state_dict()


def killed(out: Path, *flags: str, until: int) -> None:
    small.killed(train, out, *flags, until=until)


def resumed(out: Path) -> list[int]:
    """Return the steps after which the run was continued."""
    return [line["step"] for line in launchers.events(out, "resume")]


def manifest(place: Path) -> dict:
    return json.loads((place / "mirror.json").read_text())


def content(place: Path) -> dict[str, bytes]:
    """Return the files of a run, without hidden ones and the manifest."""
    names = [path for path in place.rglob("*") if path.is_file() and path.name[0] != "." and path.name != "mirror.json"]
    return {str(path.relative_to(place)): path.read_bytes() for path in names}


@pytest.mark.parametrize("by", ["--mirror", "--resume"])
def test_a_run_whose_disk_is_gone_continues_from_its_mirror_to_the_same_bits(by, tmp_path):
    url = f"file://{tmp_path}/there/run"
    whole = train(tmp_path / "whole")
    killed(tmp_path / "out", "--mirror", url, until=12)  # in the third epoch
    before, first = content(tmp_path / "there/run"), (tmp_path / "out/metrics.jsonl").read_text().splitlines()[0]
    shutil.rmtree(tmp_path / "out")
    ended = train(tmp_path / "out", by, url)
    torch.testing.assert_close(ended, whole, rtol=0, atol=0)
    assert (tmp_path / "out/metrics.jsonl").read_text().splitlines()[0] == first  # one record of both parts
    assert resumed(tmp_path / "out") == [10]
    there = content(tmp_path / "there/run")
    if by == "--mirror":
        assert len(there) == len(before) + 2  # a checkpoint, and the summary
    else:
        assert there.keys() == before.keys()
    same = content(tmp_path / "out") if by == "--mirror" else before
    assert [name for name in same if there[name] != same[name]] == []


def test_a_summary_of_another_tool_is_put_aside_by_what_is_copied_back(tmp_path):
    out, url = tmp_path / "out", f"file://{tmp_path}/there"
    train(out, "--mirror", url, epochs=1)
    shutil.rmtree(out)
    out.mkdir()
    (out / "summary.json").write_text("[1, 2]")
    train(out, "--mirror", url, epochs=2)
    assert resumed(out) == [5]
    assert (out / "summary.1.json").read_text() == "[1, 2]"
    assert sorted(path.name for path in out.glob("summary*")) == ["summary.1.json", "summary.json"]


def test_what_is_newer_here_is_continued_and_the_newest_are_kept_there(tmp_path):
    url = f"file://{tmp_path}/there"
    killed(tmp_path / "out", "--mirror", url, until=7)
    killed(tmp_path / "out", until=12)
    train(tmp_path / "out", "--mirror", url, "--keep", "2", "--checkpoint-steps", "1")
    assert resumed(tmp_path / "out") == [5, 10]
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


@pytest.mark.parametrize("fault", ["flipped", "missing", "no record"])
def test_a_damaged_best_checkpoint_is_left_out_and_copied_again(fault, tmp_path, capfd):
    """As the best one, it ended each start: "check the name, the credentials and the network"."""
    there, out = tmp_path / "there", tmp_path / "out"
    flags = ("--mirror", f"file://{there}", "--checkpoint-steps", "2")
    whole = train(out, *flags, tail=evaluate)
    newest = max((there / "checkpoints").iterdir())
    (there / "metrics.jsonl" if fault == "no record" else newest).rename(tmp_path / "moved")
    if fault == "flipped":
        newest.write_bytes((tmp_path / "moved").read_bytes()[:-1] + b"?")
    shutil.rmtree(out)
    if fault == "no record":
        with pytest.raises(UserError, match=r"lacks metrics.jsonl: put it back, or name another place"):
            train(out, *flags, tail=evaluate)
        return
    torch.testing.assert_close(train(out, *flags, tail=evaluate), whole, rtol=0, atol=0)
    assert resumed(out) == [14]
    assert capfd.readouterr().err.count("it is left out") == 1
    for name, entry in manifest(there)["checkpoints"].items():
        assert hashlib.sha256((there / "checkpoints" / name).read_bytes()).hexdigest() == entry["sha256"], name


def test_another_run_is_neither_replaced_nor_mixed_with_this_one(tmp_path):
    url = f"file://{tmp_path}/there"
    train(tmp_path / "out", "--mirror", url, epochs=1)
    before = content(tmp_path / "there")
    train(tmp_path / "other", epochs=1)
    for out, flags, said in (
        ("other", ["--mirror", url], "has another run than"),
        ("other", ["--resume", url], "has another run than"),
        ("out", ["--mirror", url, "--resume", "never"], "and --resume starts another"),
    ):
        with pytest.raises(UserError, match=said):
            train(tmp_path / out, *flags)
    assert content(tmp_path / "there") == before


def test_of_two_runs_that_begin_at_once_the_first_ends_in_one_line(tmp_path):
    """Both ended with 0, and the place had files of both."""
    url, there = f"file://{tmp_path}/there", tmp_path / "there"

    def another_begins(t) -> None:
        if t.step.number == 3:
            wait_for(
                lambda: manifest(there)["checkpoints"], "it copies nothing"
            )  # both would write the manifest at once
            with readable(url, "--mirror") as other:
                other.run, other.checkpoints = "other", {}
                other.begin()
        if t.step.number > 4:  # a run takes longer between two checkpoints
            wait_for(lambda: "mirror" not in [thread.name for thread in threading.enumerate()], "it copies on")

    with pytest.raises(UserError, match=f"--mirror {url}: another run writes there now: name another --mirror"):
        train(tmp_path / "out", "--mirror", url, "--checkpoint-steps", "2", each=another_begins)
    assert manifest(there)["run"] == "other"
    assert list((there / "checkpoints").iterdir()) == []
    assert resumed(tmp_path / "out") == []
    newest = checkpoint.checkpoints_in(tmp_path / "out/checkpoints")[0].stem
    assert newest in ("step-00000004", "step-00000005")  # the end of the epoch, if the other is only seen then
    train(tmp_path / "out")
    assert resumed(tmp_path / "out") == [int(newest[-8:])]  # nothing is lost here


def large(path: Path) -> None:
    path.touch()
    os.truncate(path, 2**40)


OF_A_STRANGER = {"run": "x", "writer": "x", "checkpoints": {"../../x": {"sha256": "", "best": None}}}


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (os.mkfifo, "mirror.json is not a file: name another"),
        (lambda path: path.symlink_to("/dev/zero"), "mirror.json is not a file: name another"),
        (large, "mirror.json is not of a run: it is too large: name another"),
        *((lambda path, text=text: path.write_text(text), "mirror.json is not of a run: name another")
          for text in (json.dumps(OF_A_STRANGER), "[" * 10**6, "{}")),
    ],
)  # fmt: skip
def test_a_manifest_that_is_none_is_refused(made, said, tmp_path):
    made(tmp_path / "mirror.json")
    for flag in ("--mirror", "--resume"):
        with pytest.raises(UserError, match=said):
            train(tmp_path / "out", flag, f"file://{tmp_path}")


def evaluate(t, epoch):
    with t.run.evaluating(small.N) as mine:
        t.run.record(loss=(t.model(small.X[mine]) - small.Y[mine]).square().flatten())


def test_a_run_at_a_url_is_exported_and_evaluated_as_the_one_here_is(tmp_path):
    url, losses = f"file://{tmp_path}/there", []
    train(tmp_path / "out", "--mirror", url)
    for place, to in ((url, "url.pt"), (str(tmp_path / "out"), "path.pt")):
        assert export.main([place, "--to", str(tmp_path / to)]) == 0
        adam = partial(torch.optim.Adam, lr=0.01)
        losses.append(small.Trained("--evaluate", place, optimizer=adam, tail=evaluate).run.evaluation["loss"])
    weights = [torch.load(tmp_path / name, weights_only=True) for name in ("url.pt", "path.pt")]
    torch.testing.assert_close(*weights, rtol=0, atol=0)
    assert losses[0] == losses[1]
    with pytest.raises(UserError, match="has no evaluated checkpoint"):
        export.main([url, "--best", "--to", str(tmp_path / "best.pt")])
    for refused in (["--evaluate", f"{url}/nothing"], ["--evaluate", f"file://{tmp_path}/nothing"]):
        with pytest.raises(UserError, match=r"--evaluate file:.*nothing has no checkpoint"):
            training.start(small.flags_for(*refused)).__enter__()


@pytest.fixture
def mirror(tmp_path) -> Mirror:
    """Return what copies an output directory, as a run leaves it, without a run and without a thread."""
    (tmp_path / "out/checkpoints").mkdir(parents=True)
    flags = small.flags_for("--output-dir", str(tmp_path / "out"), "--mirror", f"file://{tmp_path}/there")
    engine = SerialEngine(tuning=False, rank=0, size=1, launcher="none")
    made = Mirror(engine, flags, RunOutput(engine, None, progress=False))
    (tmp_path / "out/metrics.jsonl").write_text('{"event": "start"}\n')
    return made


def save(tmp_path: Path, step: int) -> Path:
    path = tmp_path / "out/checkpoints" / checkpoint.name_of(step)
    checkpoint.write_checkpoint(path, {"best": None}, {"a": torch.randn(1000)})
    return path


def test_an_outage_is_told_once_and_made_good(mirror, tmp_path, capfd):
    save(tmp_path, 1)
    assert mirror.look()
    (tmp_path / "there").rename(tmp_path / "elsewhere")
    (tmp_path / "there").write_text("no directory")
    for step in (2, 3):
        save(tmp_path, step)
        assert not mirror.look()
    (tmp_path / "there").unlink()
    (tmp_path / "elsewhere").rename(tmp_path / "there")
    assert mirror.look()
    assert mirror.look()
    said = capfd.readouterr()
    assert said.err.count("cannot be written for now (") == said.err.count("\n") == 1
    assert said.out.count("all that was missing") == said.out.count("\n") == 1
    assert [int(name[5:13]) for name in manifest(tmp_path / "there")["checkpoints"]] == [3, 2, 1]


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("cut", ["put_file", "pipe_file", "mv"])
def test_at_whatever_request_a_copy_ends_what_the_manifest_names_is_whole(cut, again, mirror, tmp_path, monkeypatch):
    """again: a step is copied again, as another attempt has written it: its name is then that of half a file."""
    if again:
        save(tmp_path, 2)
        assert mirror.look()
        mirror._event("checkpoint", {"file": checkpoint.name_of(2)})
    save(tmp_path, 2)
    save(tmp_path, 3)
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
        reader = Remote(f"file://{tmp_path}/there")
        reader.read()
        for name in reader.checkpoints:
            reader.get(tmp_path, "checkpoints", name)  # raises if it is not whole
        if reader.checkpoints:
            assert reader.run == run_identity(tmp_path / "out") == run_identity(tmp_path / "there")
    assert whole[0] is False


def test_what_was_read_back_otherwise_is_copied_again(mirror, tmp_path, monkeypatch):
    path = save(tmp_path, 1)
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
def test_a_checkpoint_that_is_pruned_here_while_it_is_copied_leaves_nothing_there(fault, mirror, tmp_path, monkeypatch):
    """Nor does what a killed writer has left. What is no checkpoint is the user's own."""
    (tmp_path / "there/checkpoints/step-00000009.safetensors").write_bytes(b"half")
    (tmp_path / "there/checkpoints/README").write_text("mine")
    mirror._flags.keep = 1
    real = type(mirror._remote._fs).put_file

    def put_file(fs, source, target, **options):
        real(fs, source, target, **options)
        if source.endswith("1.safetensors"):
            save(tmp_path, 2)
            Path(source).unlink()
            if fault is not None:
                raise fault

    monkeypatch.setattr(type(mirror._remote._fs), "put_file", put_file)
    save(tmp_path, 1)
    assert mirror.look()
    assert list(manifest(tmp_path / "there")["checkpoints"]) == [checkpoint.name_of(2)]
    assert sorted(path.name for path in (tmp_path / "there/checkpoints").iterdir()) == ["README", checkpoint.name_of(2)]
