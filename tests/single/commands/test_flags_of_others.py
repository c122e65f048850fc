"""What the flags of hvdtrain.doctor, report and make_shards do: what is checked, which files. And flags of a program."""

import json
import sys
from pathlib import Path

import pytest

from hvdtrain import doctor, export, report, training, unpack
from hvdtrain.datasets import make_shards
from hvdtrain.engines.errors import UserError
from hvdtrain.launching import exit_codes
from tests import image_set
from tests.single.output.run_records import WHOLE, leave  # noqa: F401


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
