"""hvdtrain.benchmark --np: what runs, the arithmetic of its table, and what fails."""

import errno
import json
import signal
import sys
from pathlib import Path

import pytest

from hvdtrain import benchmark
from hvdtrain.analysis import scaling
from hvdtrain.analysis.scaling import (
    APART,
    Configuration,
    configurations,
    scaling_table,
    summarize_rounds,
    write_scaling,
)
from hvdtrain.benchmark import parse
from hvdtrain.engines.errors import UserError

PHASES = {"loading": 1.0, "compute": 7.0, "communication": 2.0}


def result(rate: float) -> dict:
    return dict(samples_per_second={"mean": rate}, seconds_per_sample=PHASES)


APART_2, DDP = Configuration(APART, 2), Configuration("ddp", 2)
ROUNDS = [
    {APART_2: result(160), DDP: result(120)},
    {APART_2: result(100), DDP: result(90)},  # a slow round is slow for all
    {APART_2: result(200)},  # here ddp failed
]


def of(median: float, least: float, most: float) -> object:
    return pytest.approx(dict(median=median, least=least, most=most))


def test_ratios_are_taken_within_a_round():
    apart, ddp = summarize_rounds(ROUNDS, [APART_2, DDP])
    assert ddp["samples_per_second"] == of(105, 90, 120)
    assert ddp["efficiency"] == of(0.825, 0.75, 0.9)
    assert (ddp["rounds"], apart["rounds"]) == (2, 3)
    assert apart["efficiency"] == of(1, 1, 1)
    assert ddp["communication"] == 0.2


def test_without_the_bound_there_is_no_efficiency():
    (row,) = summarize_rounds([{DDP: result(120)}], [APART_2, DDP])
    assert row["efficiency"] is None
    assert "| ddp | 2 | 120 (120 to 120) | - | 20% |\n" in scaling_table([row]) + "\n"


def test_the_bound_comes_with_every_number_of_ranks():
    planned = configurations(["horovod", "serial"], [2, 4])
    assert planned[:3] == [(APART, 1), (APART, 2), (APART, 4)]
    assert planned[3:] == [("horovod", 2), ("horovod", 4), ("serial", 1)]
    assert configurations(["ddp"], [2]) == [(APART, 2), ("ddp", 2)]


def test_the_file_has_the_table_and_every_run(tmp_path):
    flags = parse(["--np", "2", "--output-dir", str(tmp_path)])
    write_scaling(flags, summarize_rounds(ROUNDS, [APART_2, DDP]), ROUNDS, {DDP: "exit code 1"})
    whole = json.loads((tmp_path / "scaling.json").read_text())
    assert [(row["name"], row["ranks"]) for row in whole["rows"]] == [(APART, 2), ("ddp", 2)]
    assert whole["rows"][1]["efficiency"] == of(0.825, 0.75, 0.9)
    assert (len(whole["runs"]), whole["failed"]) == (5, {"ddp, 2 ranks": "exit code 1"})


@pytest.mark.parametrize(
    ("flags", "ranks", "threads"),
    [("--np 4,1,2,2", [1, 2, 4], 1), ("--np 2 --threads 3", [2], 3)],
)
def test_threads_follow_from_the_machine(flags, ranks, threads, monkeypatch):
    monkeypatch.setattr(scaling.os, "sched_getaffinity", lambda process: range(4))
    found = parse(flags.split())
    assert (found.np, found.threads) == (ranks, threads)


def test_it_is_not_for_many_ranks(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="starts the launchers itself"):
        parse(["--np", "2"])


@pytest.fixture
def jobs(monkeypatch):
    """Run benchmark.main with jobs that only fail; return the words of each, with its limit."""

    def run(flags: str) -> list[tuple[list[str], float]]:
        found: list[tuple[list[str], float]] = []

        def job(words: list[str], limit: float, log: Path) -> int:
            found.append((words, limit))
            log.touch()
            return 1

        monkeypatch.setattr(scaling, "run_job", job)
        monkeypatch.setattr(scaling, "command", lambda *words: list(words))
        monkeypatch.setattr(sys, "argv", ["benchmark.py", *flags.split()])
        before = signal.getsignal(signal.SIGTERM)
        try:
            assert benchmark.main() == 1
        finally:
            signal.signal(signal.SIGTERM, before)
        return found

    return run


def test_it_runs_what_was_asked_for_within_its_time(jobs, tmp_path):
    out = tmp_path / "found"
    flags = f"--engines ddp --np 1,3 --rounds 2 --threads 5 --timeout 7 --output-dir {out} --amp bf16 --seed=3"
    ran = jobs(flags)  # one and three apart, ddp on one and on three; what fails is not run again
    assert sorted((words[0], words[1]) for words, _ in ran) == [("ddp", 1), ("ddp", 1), ("ddp", 3), ("ddp", 3)]
    assert {limit for _, limit in ran} == {7.0}
    for words, _ in ran:
        passed = words[3]
        assert passed[4:11] == ["--seed=3", "--model", "convnet", "--repeats", "5", "--threads", "5"]
        assert passed[:4] == ["--threads", "5", "--amp", "bf16"]
        assert not {"--np", "--rounds", "--engines", "--timeout", str(out)} & set(passed)
        assert not parse(["--engine", "ddp", *passed]).np  # the ranks' command line holds
    assert sum("--no-communication" in words[3] for words, _ in ran) == 2
    assert (out / "runs").is_dir()


def test_rounds_and_seed_decide_how_often_and_in_which_order(monkeypatch, tmp_path):
    def order(seed: int, rounds: int) -> list[Configuration]:
        found: list[Configuration] = []
        monkeypatch.setattr(scaling, "measure_configuration", lambda which, *_: found.append(which) or result(1))
        words = f"--engines horovod,ddp --np 1,2,3 --rounds {rounds} --seed {seed} --output-dir {tmp_path}"
        flags = parse(words.split())
        scaling.measure_all(flags, configurations(flags.engines, flags.np), [], {})
        return found

    assert len(order(1, 4)) == 4 * 9
    assert order(1, 1) == order(1, 1) != order(2, 1)


@pytest.mark.parametrize(
    ("program", "limit", "why"),
    [
        ("import sys; sys.exit('error: no such thing')", "60", "exit code 1: error: no such thing; see "),
        ("import time; time.sleep(60)", "1", "not finished after 1 s, killed"),
        ("pass", "60", "exit code 0; see "),
    ],
)
def test_a_run_that_fails_says_why(program, limit, why, tmp_path, monkeypatch):
    monkeypatch.setattr(scaling, "command_of", lambda *_: [sys.executable, "-c", program])
    flags = parse(["--np", "1", "--timeout", limit, "--output-dir", str(tmp_path)])
    with pytest.raises(UserError, match=f"^{why}"):
        scaling.measure_configuration(DDP, flags, tmp_path / "run")


def test_what_was_measured_before_the_disk_was_full_is_shown(tmp_path, monkeypatch, capsys):
    def job(words, limit, log):
        if done:
            raise OSError(errno.ENOSPC, "No space left on device")
        done.append(words)
        log.with_name("benchmark.json").write_text(json.dumps(result(123)))
        return 0

    def write(path, content, **options):
        if path.name == "scaling.json":
            raise OSError(errno.ENOSPC, "No space left on device")

    done: list[list[str]] = []
    monkeypatch.setattr(scaling, "run_job", job)
    monkeypatch.setattr("hvdtrain.engines.atomic.write_atomically", write)
    monkeypatch.setattr(scaling.signal, "signal", lambda *_: None)
    words = ["benchmark.py", "--np", "1,2", "--engines", "ddp", "--rounds", "2", "--output-dir", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(UserError, match="name another directory, or free"):
        benchmark.main()
    shown = capsys.readouterr().out
    assert shown.count("FAILED: [Errno 28] No space left on device") == 4
    assert "| 123 (123 to 123) |" in shown
