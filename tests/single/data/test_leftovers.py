"""Semaphores and sockets of a rank that is killed: removed with it or by the next start, and never a living rank's."""

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from hvdtrain.data import leftovers
from hvdtrain.engines.errors import UserError

RANK = """
import sys, time, torch
from hvdtrain.data.loading import loader, start_workers_early
if __name__ == "__main__":
    start_workers_early()
    batches = iter(loader([1] * 10**6, int(sys.argv[1]), torch.device("cpu"), range(10**6)))
    next(batches)
    print("loads", flush=True)
    time.sleep(1000)
"""


@pytest.fixture
def rank(tmp_path):
    """Start a process with input workers, in a TMPDIR of its own."""
    (tmp_path / "rank.py").write_text(RANK)
    short = tempfile.mkdtemp(prefix="h", dir="/tmp")  # a socket's path has 107 characters at most
    (tmp_path / "tmp").symlink_to(short)
    started = []

    def start(workers: int = 2) -> subprocess.Popen:
        here = Path(__file__).resolve().parents[3]
        environment = {**os.environ, "TMPDIR": short, "PYTHONPATH": str(here)}
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
    return semaphores + [path.name for path in (tmp_path / "tmp").glob("pymp-*")]


def test_nothing_is_left_of_a_killed_rank(rank, tmp_path):
    process = rank()
    assert len(left(tmp_path, process.pid)) > 5
    process.kill()
    process.wait()
    until = time.monotonic() + 30
    while found := left(tmp_path, process.pid):
        assert time.monotonic() < until, found
        time.sleep(0.1)


def test_what_a_killed_rank_and_its_workers_leave_the_next_start_removes(rank, tmp_path, monkeypatch):
    process, other = rank(), rank()
    os.killpg(process.pid, signal.SIGSTOP)  # so that no worker sees the rank's end before its own
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert left(tmp_path, process.pid)
    monkeypatch.setattr(leftovers.tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    leftovers.sweep()
    assert len(list((tmp_path / "tmp").glob("pymp-*"))) == 1
    assert not [name for name in left(tmp_path, process.pid) if "sem" in name]
    assert len(left(tmp_path, other.pid)) > 5  # it lives


def test_what_cannot_be_looked_up_from_here_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(leftovers, "SEMAPHORES", tmp_path)
    monkeypatch.setattr(leftovers.tempfile, "gettempdir", lambda: str(tmp_path))
    kept = ["sem.mp-abc", "sem.hvdtrain-00000000-1-2-x", "sem.hvdtrain-x", f"sem.{leftovers.tag(os.getpid())}-y"]
    gone = f"sem.hvdtrain-{leftovers.machine()}-4194305-1-z"
    for name in [*kept, gone]:
        (tmp_path / name).touch()
    for number, text in enumerate(["", "hvdtrain-00000000-1-2", leftovers.tag(os.getpid())]):
        (tmp_path / f"pymp-{number}").mkdir()
        (tmp_path / f"pymp-{number}" / leftovers.OWNER).write_text(text)
    leftovers.sweep()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*kept, "pymp-0", "pymp-1", "pymp-2"])


def sockets_of(tmp_path: Path, name: str) -> Path:
    (tmp_path / name).mkdir()
    return tmp_path / name / leftovers.OWNER


@pytest.mark.parametrize(
    "planted", ["a pipe", "a device", "a large file", "a linked directory", "another user's directory"]
)
def test_what_others_put_into_the_temporary_directory_is_not_read(planted, tmp_path):
    """A pipe would block each start of this host, and a device or a large file would fill its memory."""
    (tmp_path / "tmp").mkdir()
    gone = f"hvdtrain-{leftovers.machine()}-4194305-1"  # a tag whose process does not exist
    if planted == "a pipe":
        os.mkfifo(sockets_of(tmp_path / "tmp", "pymp-x"))
    elif planted == "a device":
        sockets_of(tmp_path / "tmp", "pymp-x").symlink_to("/dev/zero")
    elif planted == "a large file":
        with sockets_of(tmp_path / "tmp", "pymp-x").open("w") as file:
            file.write(gone)
            file.truncate(2**40)
    elif planted == "a linked directory":
        sockets_of(tmp_path, "elsewhere").write_text(gone)
        (tmp_path / "tmp" / "pymp-x").symlink_to(tmp_path / "elsewhere")
    else:
        sockets_of(tmp_path / "tmp", "pymp-x").write_text(gone)
        if os.getuid() != 0:
            pytest.skip("only root can give a directory to another user")
        os.chown(tmp_path / "tmp" / "pymp-x", 12345, 12345)
    subprocess.run(
        [sys.executable, "-c", "from hvdtrain.data import leftovers; leftovers.sweep()"],
        env={**os.environ, "TMPDIR": str(tmp_path / "tmp")}, check=True, timeout=60,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (2**31, 2**31)),
    )  # fmt: skip
    assert (tmp_path / "tmp" / "pymp-x").exists()


def test_a_temporary_directory_of_a_killed_rank_the_next_start_removes(tmp_path, monkeypatch):
    work = (
        "import time; from hvdtrain.data import leftovers; s = leftovers.scratch('profile'); print(s.name, flush=True);"
        "time.sleep(1000)"
    )
    command, environment = [sys.executable, "-c", work], {**os.environ, "TMPDIR": str(tmp_path)}
    monkeypatch.setattr(leftovers.tempfile, "gettempdir", lambda: str(tmp_path))
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as process:
        made = Path(process.stdout.readline().strip())
        leftovers.sweep()
        assert made.parent == tmp_path
        assert made.is_dir()
        process.kill()
    leftovers.sweep()
    assert not made.exists()


def test_a_temporary_directory_too_long_for_sockets_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(leftovers.util, "get_temp_dir", lambda: "/" + "x" * 89)
    with pytest.raises(UserError, match="is too long for the names of the input workers' sockets: set TMPDIR"):
        leftovers.claim()
