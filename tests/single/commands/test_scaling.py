"""The scaling table's arithmetic, its flags, its pictures."""

import errno
import json
import sys

import pytest

from hvdtrain import scaling
from hvdtrain.analysis.launching import Ended
from hvdtrain.analysis.scaling_results import ALONE, APART, Configuration, summarize, table, write
from hvdtrain.engines.errors import UserError
from hvdtrain.scaling import configurations, parse

PHASES = {"loading": 1.0, "compute": 7.0, "communication": 2.0}


def result(rate: float) -> dict:
    rank = {"device": "cpu", "threads": 1}
    return dict(
        samples_per_second={"mean": rate},
        seconds_per_sample=PHASES,
        model="convnet",
        batch_size_per_rank=64,
        ranks=[rank],
    )


ONE, TWO, DDP = Configuration(ALONE, 1), Configuration(APART, 2), Configuration("ddp", 2)
ROUNDS = [
    {ONE: result(100), TWO: result(160), DDP: result(120)},
    {ONE: result(50), TWO: result(100), DDP: result(90)},  # a slow round is slow for all
    {ONE: result(100), TWO: result(200)},  # here ddp failed
]


def test_ratios_are_taken_within_a_round():
    alone, apart, ddp = summarize(ROUNDS, [ONE, TWO, DDP])
    assert ddp["samples_per_second"] == (105, 90, 120)
    assert ddp["speed_up"] == pytest.approx((1.5, 1.2, 1.8))
    assert ddp["efficiency_alone"] == pytest.approx((0.75, 0.6, 0.9))
    assert ddp["efficiency_apart"] == pytest.approx((0.825, 0.75, 0.9))
    assert (ddp["rounds"], apart["rounds"]) == (2, 3)
    assert apart["efficiency_apart"] == alone["speed_up"] == (1, 1, 1)
    assert ddp["seconds"] == PHASES


def test_without_a_bound_there_is_no_efficiency():
    (row,) = summarize([{DDP: result(120)}], [ONE, TWO, DDP])
    assert row["speed_up"] is row["efficiency_apart"] is None
    assert "| ddp | 2 | 120 (120 to 120) | - | - | - | 20% |\n" in table([row]) + "\n"


def test_bounds_come_with_every_number_of_ranks():
    planned = configurations(["horovod", "serial"], [1, 2, 4])
    assert planned[:3] == [(ALONE, 1), (APART, 2), (APART, 4)]
    assert planned[3:] == [("horovod", 1), ("horovod", 2), ("horovod", 4), ("serial", 1)]


def test_json_and_pictures(tmp_path):
    flags = parse(["--output-dir", str(tmp_path)])
    write(flags, summarize(ROUNDS, [ONE, TWO, DDP]), ROUNDS, {DDP: "exit code 1"})
    whole = json.loads((tmp_path / "scaling.json").read_text())
    assert [(row["name"], row["ranks"]) for row in whole["rows"]] == [("alone", 1), ("apart", 2), ("ddp", 2)]
    assert whole["rows"][2]["speed_up"] == pytest.approx({"median": 1.5, "least": 1.2, "most": 1.8})
    assert (len(whole["runs"]), whole["failed"]) == (8, {"ddp, 2 ranks": "exit code 1"})
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("flags", "ranks", "threads"),
    [("", [1, 2], 2), ("--ranks 4,1,2,2", [1, 2, 4], 1), ("--hosts a:2,b:2", [1, 2, 4], 2), ("--threads 3", [1, 2], 3)],
)
def test_ranks_and_threads_follow_from_the_machine(flags, ranks, threads, monkeypatch):
    monkeypatch.setattr(scaling.os, "sched_getaffinity", lambda process: range(4))
    monkeypatch.setattr(scaling, "devices", lambda cores: 2)
    found = parse(flags.split())
    assert (found.ranks, found.threads) == (ranks, threads)


def test_what_follows_two_dashes_is_the_benchmarks():
    flags = parse(["--rounds", "2", "--", "--model", "resnet50", "--amp", "bf16"])
    line = scaling.command_of(TWO, flags, flags.output_dir)
    assert line.index("convnet") < line.index("resnet50")  # the later one wins
    assert line[-1] == "--no-communication"
    assert "--no-communication" not in scaling.command_of(DDP, flags, flags.output_dir)


def test_it_is_not_for_many_ranks(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(sys, "argv", ["scaling.py"])
    with pytest.raises(UserError, match="starts the launchers itself"):
        scaling.main()


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("import sys; sys.exit('error: no such thing')", "exit code 1: error: no such thing; see "),
        ("import time; time.sleep(60)", "not finished after 1 s, killed"),
        ("pass", "wrote no "),
    ],
)
def test_a_run_that_fails_says_why(program, why, tmp_path, monkeypatch):
    monkeypatch.setattr(scaling, "command_of", lambda *_: [sys.executable, "-c", program])
    flags = parse(["--timeout", "1", "--output-dir", str(tmp_path)])
    assert scaling.measure(DDP, flags, tmp_path / "run").startswith(why)


def test_what_was_measured_before_the_disk_was_full_is_shown(tmp_path, monkeypatch, capsys):
    def job(words, limit, log):
        if done:
            raise OSError(errno.ENOSPC, "No space left on device")
        done.append(words)
        log.with_name("benchmark.json").write_text(json.dumps(result(123)))
        return Ended(0, 1.0)

    def write(path, content, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    done: list[list[str]] = []
    monkeypatch.setattr(scaling, "run_job", job)
    monkeypatch.setattr("hvdtrain.engines.files.write", write)
    monkeypatch.setattr(scaling.signal, "signal", lambda *_: None)
    words = ["scaling.py", "--engines", "ddp", "--ranks", "1,2", "--rounds", "2", "--output-dir", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(
        UserError, match=r"cannot be written \(No space left on device\): name another directory, or free"
    ):
        scaling.main()
    shown = capsys.readouterr().out
    assert shown.count("FAILED: [Errno 28] No space left on device") == 4
    assert "| 123 (123 to 123) |" in shown
