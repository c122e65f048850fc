"""Output stays where it was sent: no link leads it elsewhere; half a file never has the whole one's name."""

import json
import os
import sys

import pytest

from hvdtrain import mnist
from hvdtrain.launching.exit_codes import run
from hvdtrain.training.records import files


def test_whole_or_absent(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("before")
    with pytest.raises(ZeroDivisionError), files.replacing(path) as file:
        file.write("half")
        file.flush()
        raise ZeroDivisionError
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]
    assert path.read_text() == "before"
    with files.replacing(path, "wb") as file:
        file.write(b"after")
    assert path.read_bytes() == b"after"


@pytest.mark.parametrize("name", ["a.json", f".a.json.{os.getpid()}"], ids=["the file", "before it has its name"])
@pytest.mark.parametrize("exists", [True, False])
def test_a_link_is_replaced_and_not_followed(name, exists, tmp_path):
    (tmp_path / "out").mkdir()
    victim = tmp_path / "victim"
    if exists:
        victim.write_text("mine")
    (tmp_path / "out" / name).symlink_to(victim)
    with files.replacing(tmp_path / "out" / "a.json") as file:
        file.write("theirs")
    assert (tmp_path / "out" / "a.json").read_text() == "theirs"
    assert not (tmp_path / "out" / "a.json").is_symlink()
    assert victim.read_text() == "mine" if exists else not victim.exists()
    with pytest.raises(OSError, match="symbolic"):
        (tmp_path / "log").symlink_to(victim)
        files.open_to_append(tmp_path / "log")


def test_created_with_the_users_umask(tmp_path):
    before = os.umask(0o027)
    try:
        with files.replacing(tmp_path / "a"), files.open_to_append(tmp_path / "b"):
            pass
    finally:
        os.umask(before)
    assert {oct(path.stat().st_mode & 0o777) for path in tmp_path.iterdir()} == {"0o640"}


def train(directory) -> int:
    """Train as the script does; return its exit code."""
    flags = "--engine serial --dataset digits --epochs 1 --train-samples 64 --no-progress --output-dir"
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.setattr(sys, "argv", ["mnist", *flags.split(), str(directory)])
        run(mnist.main)
    return ended.value.code


def test_training_writes_nothing_through_a_link(tmp_path, capfd):
    """Also into an earlier run's directory, which it would go on with."""
    out = tmp_path / "out"
    assert train(out) == 0
    victim = tmp_path / "victim"
    for name in ("metrics.jsonl", "summary.json"):
        (out / name).unlink()
        (out / name).symlink_to(victim)
    assert train(out) == 0
    assert not victim.exists()
    assert json.loads((out / "summary.json").read_text())["samples"] == 64
    (out / "checkpoints").rename(tmp_path / "elsewhere")
    (out / "checkpoints").symlink_to(tmp_path / "elsewhere")
    before = sorted((tmp_path / "elsewhere").iterdir())
    capfd.readouterr()
    assert train(out) == 2
    assert f"{out}/checkpoints is a symbolic link, which is not followed" in capfd.readouterr().err
    assert sorted((tmp_path / "elsewhere").iterdir()) == before
