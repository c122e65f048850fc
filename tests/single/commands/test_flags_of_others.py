"""What the flags of hvdtrain.scaling, doctor, report and make_shards do: which runs, what is checked, which files."""

import json
import sys
from pathlib import Path

import pytest

from hvdtrain import doctor, export, report, scaling, training, tuned, unpack
from hvdtrain.analysis.launching import Ended
from hvdtrain.data import make_shards
from tests import image_set
from tests.single.analysis.reporting.run_records import WHOLE, leave  # noqa: F401


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """Run hvdtrain.scaling with jobs that only leave a result; return the words of each, with its limit."""

    def run(flags: str) -> list[tuple[list[str], float]]:
        jobs: list[tuple[list[str], float]] = []

        def job(words: list[str], limit: float, log: Path) -> Ended:
            jobs.append((words, limit))
            log.touch()
            return Ended(1, "")

        monkeypatch.setattr(scaling, "run_job", job)
        monkeypatch.setattr(scaling, "command", lambda *words: [str(word) for word in words])
        monkeypatch.setattr(sys, "argv", ["scaling.py", *flags.split()])
        scaling.main()
        return jobs

    return run


def test_scaling_runs_what_was_asked_for_within_its_time(measured, tmp_path):
    out = tmp_path / "found"
    flags = f"--engines ddp --ranks 1,3 --rounds 2 --threads 5 --timeout 7 --output-dir {out} -- --model convnet"
    jobs = measured(flags)  # alone, three apart, ddp on one and on three; what fails is not run again
    assert sorted((words[0], words[1]) for words, _ in jobs) == [("ddp", "1"), ("ddp", "1"), ("ddp", "3"), ("ddp", "3")]
    assert {limit for _, limit in jobs} == {7.0}
    assert all("'--threads', '5'" in words[3] and "'--model', 'convnet'" in words[3] for words, _ in jobs)
    assert sum("--no-communication" in words[3] for words, _ in jobs) == 2
    assert (out / "runs").is_dir()


def test_scaling_starts_on_the_hosts_over_the_interface(measured, tmp_path):
    flags = f"--engines horovod --ranks 2 --hosts a:1,b:1 --interface eth7 --output-dir {tmp_path}"
    assert {(words[4], words[5]) for words, _ in measured(flags)} == {("a:1,b:1", "eth7")}


def test_rounds_and_seed_decide_how_often_and_in_which_order(monkeypatch, tmp_path):
    def order(seed: int, rounds: int) -> list[scaling.Configuration]:
        found: list[scaling.Configuration] = []
        monkeypatch.setattr(scaling, "measure", lambda which, *_: found.append(which) or {"mean": 1})
        monkeypatch.setattr(scaling, "rate", lambda outcome: 1.0)
        words = f"--engines horovod,ddp --ranks 1,2,3 --rounds {rounds} --seed {seed} --output-dir {tmp_path}"
        flags = scaling.parse(words.split())
        scaling.measure_all(flags, scaling.configurations(flags.engines, flags.ranks), [], {})
        return found

    assert len(order(1, 4)) == 4 * 9
    assert order(1, 1) == order(1, 1) != order(2, 1)


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
        (scaling, "--output-dir=~/made", "output_dir"),
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
    assert tuned.parse(["--output-dir", "out", "train.py"])[0].output_dir == tmp_path / "out"
