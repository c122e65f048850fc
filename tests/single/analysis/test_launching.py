"""Command lines as text, and jobs that leave nothing behind."""

import signal
import sys
import time
from pathlib import Path

import pytest

from hvdtrain.analysis import launching
from hvdtrain.analysis.launching import command, run_job
from hvdtrain.engines.errors import UserError


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
