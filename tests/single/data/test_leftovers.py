"""Semaphores and sockets of a rank that is killed: removed with it or by the next start, and never a living rank's."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from hvdtrain.inputs import leftovers
from tests.waiting import wait_for

RANK = """
import sys, time, torch
from hvdtrain.inputs.loading import loader, start_workers_early
if __name__ == "__main__":
    start_workers_early([])
    batches = iter(loader([1] * 10**6, int(sys.argv[1]), torch.device("cpu"), range(10**6)))
    next(batches)
    print("loads", flush=True)
    time.sleep(1000)
"""


@pytest.fixture
def rank(tmp_path):
    """Start a process with DataLoader workers, in a TMPDIR of its own."""
    (tmp_path / "rank.py").write_text(RANK)
    short = tempfile.mkdtemp(prefix="h", dir="/tmp")  # a socket's path has 107 characters at most
    (tmp_path / "tmp").symlink_to(short)
    started = []

    def start(workers: int = 2, directory: str = short) -> subprocess.Popen:
        here = Path(__file__).resolve().parents[3]
        environment = {**os.environ, "TMPDIR": directory, "PYTHONPATH": str(here)}
        command = [sys.executable, str(tmp_path / "rank.py"), str(workers)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True, start_new_session=True)
        started.append(process)
        assert process.stdout.readline() == "loads\n"
        return process

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
    shutil.rmtree(short, ignore_errors=True)


def left(tmp_path: Path, pid: int) -> list[str]:
    semaphores = [path.name for path in Path("/dev/shm").glob(f"sem.hvdtrain-*-{pid}-*")]
    return semaphores + [path.name for path in (tmp_path / "tmp").glob(f"hvdtrain-*-{pid}-*")]


@pytest.mark.slow
def test_what_a_killed_rank_and_its_workers_leave_the_next_start_removes(rank, tmp_path, monkeypatch):
    process, other = rank(), rank()
    os.killpg(process.pid, signal.SIGSTOP)  # so that no worker sees the rank's end before its own
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert left(tmp_path, process.pid)
    monkeypatch.setattr(leftovers.tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    leftovers.sweep_leftovers()
    assert left(tmp_path, process.pid) == []
    assert len(left(tmp_path, other.pid)) > 5  # it lives
    other.kill()  # its workers see that, and leave nothing
    other.wait()
    wait_for(lambda: not left(tmp_path, other.pid), lambda: left(tmp_path, other.pid))


def test_only_what_has_ended_and_is_ones_own_is_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(leftovers, "SEMAPHORES", tmp_path / "shm")
    monkeypatch.setattr(leftovers.tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    ended, lives = f"hvdtrain-{leftovers.machine()}-4194305-1", leftovers.tag(os.getpid())
    names = ["x", "hvdtrain-x", "hvdtrain-00000000-1-2-x", f"{lives}-x", f"{ended}-x", f"{ended}-y"]
    for directory, prefix in (("shm", "sem."), ("tmp", "")):
        (tmp_path / directory).mkdir()
        for name in names:
            (tmp_path / directory / f"{prefix}{name}").touch()
    if os.getuid() == 0:
        for path in ("shm/sem.", "tmp/"):
            os.chown(f"{tmp_path}/{path}{ended}-y", 12345, 12345)
    leftovers.sweep_leftovers()
    kept = names[:4] + names[5:] * (os.getuid() == 0)
    assert sorted(path.name for path in (tmp_path / "tmp").iterdir()) == sorted(kept)
    assert sorted(path.name for path in (tmp_path / "shm").iterdir()) == sorted(f"sem.{name}" for name in kept)


def test_a_linked_directory_is_not_followed(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "kept").touch()
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp" / f"hvdtrain-{leftovers.machine()}-4194305-1-x").symlink_to(tmp_path / "elsewhere")
    monkeypatch.setattr(leftovers.tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    leftovers.sweep_leftovers()
    assert (tmp_path / "elsewhere" / "kept").exists()


def test_workers_load_where_the_temporary_directory_is_too_long_for_the_names_of_sockets(rank, tmp_path):
    long = Path(tempfile.mkdtemp(prefix="h", dir="/tmp"), "x" * 60)
    long.mkdir()
    process = rank(workers=1, directory=str(long))
    assert list(Path("/tmp").glob(f"hvdtrain-*-{process.pid}-*"))
    shutil.rmtree(long.parent)
