"""What the flags of hvdtrain.doctor, report, make_shards, unpack and reduce do. And flags of a program."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hvdtrain import doctor, export, reduce, report, training, unpack
from hvdtrain.datasets import make_shards
from hvdtrain.engines.errors import UserError
from hvdtrain.engines.single import SerialEngine
from hvdtrain.launching import exit_codes
from tests import image_set
from tests.single.output.test_recorded_runs import WHOLE, leave  # noqa: F401


def test_the_doctor_checks_what_was_named(tmp_path, monkeypatch, capsys):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["doctor.py", *f"--engine serial --data-dir {tmp_path}/nowhere --json".split()])
        assert doctor.main() == 1
    said = json.loads(capsys.readouterr().out)
    assert any(f"{tmp_path}/nowhere does not exist" in f["what"] + f["do"] for f in said["findings"])
    (tmp_path / "file").touch()
    monkeypatch.setattr(sys, "argv", ["doctor.py", *f"--engine serial --output-dir {tmp_path}/file/out".split()])
    assert doctor.main() == 1
    assert f"{tmp_path}/file/out" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["doctor.py", "--engine", "serial", "--device", "cuda"])
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert doctor.main() == 1
    assert "--device cuda" in capsys.readouterr().out


def test_a_report_lies_where_it_was_asked_for(leave, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setattr(sys, "argv", ["report.py", str(leave("one", *WHOLE)), "--output-dir", str(tmp_path / "made")])
    assert report.main() == 0
    assert [path.name for path in (tmp_path / "made").iterdir()] == ["report.html"]


def test_shards_have_at_most_so_many_samples_in_the_order_of_the_seed(tmp_path, monkeypatch):
    folder = image_set.write(tmp_path / "folder", 12, 6)
    contents = []
    for number, flags in enumerate(("--samples-per-shard 5", "--samples-per-shard 5 --seed 2")):
        target = tmp_path / str(number)
        monkeypatch.setattr(sys, "argv", ["make_shards.py", str(folder), str(target), *flags.split()])
        assert make_shards.main() == 0
        assert list(json.loads((target / "train" / "sizes.json").read_text()).values()) == [4, 4, 4]
        contents.append((target / "train" / "000000.tar").read_bytes())
    assert contents[0] != contents[1]


@pytest.mark.parametrize(
    ("command", "words", "flag"),
    [
        (report, "out --output-dir=~/made", "output_dir"),
        (export, "out --to=~/made", "to"),
        (unpack, "~/made", "directory"),
        (doctor, "--output-dir=~/made", "output_dir"),
    ],
)
def test_paths_may_begin_at_home(command, words, flag):
    assert getattr(command.parse(words.split()), flag) == Path.home() / "made"


def test_paths_are_those_at_the_start(tmp_path, monkeypatch):
    """A program that changed its directory wrote its record in one place, its checkpoints in another."""
    monkeypatch.chdir(tmp_path)
    parser = training.parser("program", None)
    parser.add_argument("--list", type=Path, nargs="+")
    words = "--output-dir out --weights ~/w.pt --list a /b --resume old/run"
    flags = parser.parse(["--engine", "serial", *words.split()])
    assert flags.output_dir == tmp_path / "out"
    assert flags.weights == Path.home() / "w.pt"
    assert flags.list == [tmp_path / "a", Path("/b")]
    assert flags.resume == tmp_path / "old/run"
    assert parser.parse(["--engine", "serial"]).resume == "auto"


def test_a_program_may_have_commands():
    """add_subparsers ended with "unexpected keyword argument 'prog'"."""
    parser = training.parser("own", None)
    parser.add_subparsers(dest="command").add_parser("fit", help="train").add_argument("--width", type=int)
    flags = parser.parse_args(["--epochs", "2", "fit", "--width", "3"])
    assert (flags.epochs, flags.command, flags.width) == (2, "fit", 3)
    for words, said in (("fit --epochs 2", "--epochs 2 .*; give them before the command"), ("fit --width x", "'x'")):
        with pytest.raises(UserError, match=said):
            parser.parse_args(words.split())


@pytest.mark.parametrize("grouped", [False, True])
def test_a_flag_of_every_training_run_is_not_defined_again(grouped, capfd):
    """argparse's own traceback said so."""

    def main():
        parser = training.parser("own", None)
        (parser.add_argument_group("mine") if grouped else parser).add_argument("--log-steps", type=int)

    with pytest.raises(SystemExit, match="2"):
        exit_codes.run_command(main)
    assert "already, as each training run does: leave it out, and use flags.log_steps" in capfd.readouterr().err


# ---- hvdtrain.unpack


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An installed package with what setup.py puts into the wheel."""
    package = tmp_path / "site" / "hvdtrain"
    (package / "_checkout" / "launch").mkdir(parents=True)
    (package / "_checkout" / "launch" / "__pycache__").mkdir()
    (package / "_checkout" / "launch" / "__pycache__" / "steps.pyc").write_text("")
    script = package / "_checkout" / "launch" / "mpirun.sh"
    script.write_text("#!/bin/bash\n")
    script.chmod(0o755)
    (package / "_checkout" / "launch" / "slurm.sbatch").write_text("how=starter\n")
    (package / "mnist.py").write_text("pass\n")
    monkeypatch.setattr(unpack, "INSTALLED", package)
    monkeypatch.setattr(unpack, "CHECKOUT", package / "_checkout")
    return package


def written(directory):
    return {str(path.relative_to(directory)) for path in directory.rglob("*") if not path.is_dir()}


def test_files_lie_as_in_a_clone_and_can_be_started(package, tmp_path):
    unpack.unpack_files(tmp_path / "new" / "there")
    assert written(tmp_path / "new" / "there") == {"launch/mpirun.sh", "launch/slurm.sbatch", "hvdtrain/mnist.py"}
    assert os.access(tmp_path / "new" / "there" / "launch" / "mpirun.sh", os.X_OK)


def test_what_comes_from_a_read_only_installation_can_be_written(package, tmp_path):
    for path in (package, *package.rglob("*")):
        path.chmod(path.stat().st_mode & 0o555)
    unpack.unpack_files(tmp_path / "new")
    package.chmod(0o755)
    assert all(path.stat().st_mode & 0o200 for path in (tmp_path / "new", *(tmp_path / "new").rglob("*")))


def test_what_is_there_is_left_alone(package, tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "mine").write_text("mine")
    with pytest.raises(UserError, match="there exists and is not empty: name another DIR"):
        unpack.unpack_files(tmp_path / "there")
    assert written(tmp_path / "there") == {"mine"}
    (tmp_path / "there" / "mine").unlink()
    unpack.unpack_files(tmp_path / "there")
    assert "launch/mpirun.sh" in written(tmp_path / "there")


def test_a_checkout_has_them_already():
    with pytest.raises(UserError, match="runs from a checkout, which has launch/ and containers/: /"):
        unpack.unpack_files(unpack.INSTALLED)


def test_where_it_cannot_write_it_is_one_line(package, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("sys.argv", ["unpack", str(tmp_path / "file" / "below")])
    with pytest.raises(UserError, match="cannot be written"):
        unpack.main()


# ---- hvdtrain.reduce


def run(flags: str, monkeypatch) -> int:
    monkeypatch.setattr(sys, "argv", ["reduce.py", "--engine", "serial", *flags.split()])
    return reduce.main()


@pytest.mark.parametrize(
    ("flags", "after", "dtype"),
    [("", "3", "float32"), ("--reduction max", "1", "float32"), ("--dtype int16", "3", "int16"),
     ("--dtype complex64", "(3+0j)", "complex64")],
)  # fmt: skip
def test_it_is_of_the_type_and_by_the_operation_that_were_asked_for(flags, after, dtype, capsys, monkeypatch):
    def reduced(self, tensor: Tensor, op: str, name: str) -> None:
        assert tensor.dtype == getattr(torch, dtype)
        tensor.mul_(3 if op == "sum" else 1)

    monkeypatch.setattr(SerialEngine, "all_reduce_", reduced)
    assert run(flags, monkeypatch) == 0
    before = "(1+0j)" if dtype == "complex64" else "1"
    assert capsys.readouterr().out == f"before 0 data {before}\nafter 0 data {after}\n"


def test_a_type_that_the_engine_does_not_have_is_one_line(monkeypatch):
    def refuse(self, tensor: Tensor, op: str, name: str) -> None:
        raise ValueError("no such type\nand more")

    monkeypatch.setattr(SerialEngine, "all_reduce_", refuse)
    with pytest.raises(UserError, match=r"^serial has no sum of uint8 \(no such type\): use float32$"):
        run("--dtype uint8", monkeypatch)
