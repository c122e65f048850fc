"""hvdtrain.benchmark --np and --collectives: what runs, the arithmetic of the tables, and what fails."""

import errno
import json
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from hvdtrain import benchmark
from hvdtrain.analysis import launching, measuring, scaling
from hvdtrain.analysis.launching import command, run_job
from hvdtrain.analysis.scaling import (
    APART,
    Configuration,
    configurations,
    scaling_table,
    summarize_rounds,
    write_scaling,
)
from hvdtrain.benchmark import parse
from hvdtrain.engines.errors import Failure, UserError
from hvdtrain.engines.single import SerialEngine

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
    monkeypatch.setattr("hvdtrain.engines.cores.cpu_quota", lambda: 2.0)  # of a container
    assert parse(["--np", "1"]).threads == 2


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


@pytest.mark.parametrize(("handler", "code"), [(signal.SIG_DFL, 130), (signal.SIG_IGN, 0)])
def test_a_closed_terminal_ends_it_as_ctrl_c_does_but_not_under_nohup(handler, code, tmp_path, monkeypatch):
    monkeypatch.setattr(scaling, "measure_all", lambda *_: signal.raise_signal(signal.SIGHUP))
    before = [(number, signal.signal(number, handler)) for number in (signal.SIGTERM, signal.SIGHUP)]
    try:
        assert scaling.run_configurations(parse(["--np", "1", "--output-dir", str(tmp_path)])) == code
    finally:
        for number, handled in before:
            signal.signal(number, handled)


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


# ---- command lines, and jobs that leave nothing behind


@pytest.mark.parametrize(
    ("variant", "ranks", "line"),
    [
        ("horovod", 2, "horovodrun -np 2 python -m M --engine horovod -x"),
        ("horovod-gloo", 8, "horovodrun --gloo -np 8 python -m M --engine horovod -x"),
        ("horovod-untuned", 1, "horovodrun -np 1 python -m M --engine horovod --tuning off -x"),
        ("ddp", 4, "python -m torch.distributed.run --standalone --nproc-per-node 4 -m M --engine ddp -x"),
        ("serial", 1, "python -m M --engine serial -x"),
    ],
)
def test_command_lines(variant, ranks, line, monkeypatch):
    monkeypatch.setattr(launching, "program", lambda name: name)
    monkeypatch.setattr(sys, "executable", "python")
    assert " ".join(command(variant, ranks, "M", ["-x"])) == line


def test_a_missing_launcher_is_one_line():
    with pytest.raises(UserError, match="horovodrum is neither next to"):
        launching.program("horovodrum")


def contents(path):
    try:
        return path.read_bytes()
    except OSError:  # it ended meanwhile
        return b""


def test_a_job_past_its_time_is_killed_with_all_that_it_started(tmp_path):
    """Also what has left its session and ignores SIGTERM, as a hung rank may."""
    child = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(99)"
    )
    parent = "import subprocess, sys, time; subprocess.Popen([*sys.argv[1:]], start_new_session=True); time.sleep(99)"
    began, mark = time.monotonic(), str(tmp_path)
    # As long as it takes to come up, on a machine that is busy with something else.
    for seconds in (2, 8, 32):
        code = run_job([sys.executable, "-c", parent, sys.executable, "-c", child, mark], seconds, tmp_path / "log")
        assert code is None
        assert not [path for path in Path("/proc").glob("[0-9]*/cmdline") if mark.encode() in contents(path)]
        if (said := (tmp_path / "log").read_text()) != "":
            break
    assert said == "up\n"
    assert time.monotonic() - began < 99


def test_a_job_gives_its_exit_code_and_output(tmp_path):
    assert run_job(["/bin/sh", "-c", "echo said; echo complained >&2; exit 3"], 20, tmp_path / "log") == 3
    assert (tmp_path / "log").read_text() == "said\ncomplained\n"


def test_one_process_is_not_told_of_the_batch_system_around_it(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_NTASKS", "4")
    run_job(["/bin/sh", "-c", "env"], 20, tmp_path / "log")
    assert "SLURM_NTASKS" not in (tmp_path / "log").read_text()


def test_ctrl_c_while_cleaning_up_is_neither_obeyed_at_once_nor_lost(tmp_path, monkeypatch):
    cleaned = []

    def end(process, job):
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)
        process.wait()
        cleaned.append(job)

    monkeypatch.setattr(launching, "end", end)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs start with it ignored
    try:
        with pytest.raises(KeyboardInterrupt):
            run_job(["true"], 20, tmp_path / "log")
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(cleaned) == 1


# ---- --collectives


class PretendWorld(SerialEngine):
    """Four ranks, or `size`, of which only this one, rank 0, is there."""

    def __init__(self, wrong: bool = False, size: int = 4, factor: int = 1 + 2 + 3 + 4):
        super().__init__(tuning=False, rank=0, size=1, launcher="none")
        self.size, self.device, self.wrong, self.factor = size, torch.device("cpu"), wrong, factor

    def all_reduce_(self, tensor, op, name):
        if op == "sum":
            tensor.mul_(self.factor)
        if self.wrong and tensor.numel() > 1:
            tensor.view(-1)[-1] += 1


def test_bandwidths_are_those_of_nccl_tests():
    row = measuring.measure_messages(PretendWorld(), "float16", 1024, 0.01)
    assert (row["bytes"], row["count"]) == (2048, 1024)
    assert row["algorithm_bytes_per_second"] == pytest.approx(2048 / row["seconds"])
    assert row["bus_bytes_per_second"] == pytest.approx(row["algorithm_bytes_per_second"] * 2 * 3 / 4)
    assert 0 < row["seconds_least"] <= row["seconds"] <= row["seconds_most"]


def test_a_wrong_result_is_never_a_bandwidth():
    with pytest.raises(Failure, match="wrong sum of 1024 float32"):
        measuring.measure_messages(PretendWorld(wrong=True), "float32", 1024, 0.01)


@pytest.mark.parametrize(("dtype", "factor"), [("float16", 256 * 257 / 2), ("float32", 400 * 401 / 2)])
def test_sums_over_many_ranks_stay_within_their_type(dtype, factor):
    row = measuring.measure_messages(PretendWorld(size=400, factor=factor), dtype, 4, 0.01)
    assert row["count"] == 4


def run(flags: str, monkeypatch) -> int:
    words = f"benchmark.py --engine serial --threads 1 --collectives {flags}"
    monkeypatch.setattr(sys, "argv", words.split())
    return benchmark.main()


def test_sizes_and_types_are_those_that_were_asked_for_and_are_written(monkeypatch, tmp_path):
    flags = f"--min-bytes 16 --max-bytes 64 --seconds-per-size 0.01 --output-dir {tmp_path}"
    for dtype, types in (("--dtype float16", ["float16"]), ("", ["float32", "float16"])):
        assert run(f"{flags} {dtype}", monkeypatch) == 0
        rows = json.loads((tmp_path / "benchmark.json").read_text())["rows"]
        assert [(row["bytes"], row["dtype"]) for row in rows] == [(size, t) for t in types for size in (16, 32, 64)]
    assert run(f"--min-bytes 1 --max-bytes 4 --seconds-per-size 0.01 --output-dir {tmp_path}", monkeypatch) == 0
    rows = json.loads((tmp_path / "benchmark.json").read_text())["rows"]
    assert [(row["bytes"], row["dtype"]) for row in rows] == [(4, "float32"), (2, "float16"), (4, "float16")]


def test_what_could_not_be_kept_is_not_begun(capsys, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be written"):
        run(f"--output-dir {tmp_path}/file/x", monkeypatch)
    assert capsys.readouterr().out == ""


def test_seconds_per_size_are_what_a_size_takes(engine, monkeypatch):
    """The clock is the number of all-reduces: a millisecond each."""
    monkeypatch.setattr(measuring, "block_seconds", lambda engine, tensor, name, times: 1e-3)
    for seconds, expected in ((0.05, 10), (0.5, 100)):
        assert measuring.measure_messages(engine, "float32", 4, seconds)["repeats"] == expected * 5
