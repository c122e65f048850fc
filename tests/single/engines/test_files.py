"""Output stays where it was sent: no link leads it elsewhere; half a file never has the whole one's name."""

import ast
import contextlib
import errno
import json
import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from hvdtrain import mnist
from hvdtrain.engines import atomic, files
from hvdtrain.engines import lock as locks
from hvdtrain.engines.errors import UserError
from hvdtrain.engines.lock import Lock
from hvdtrain.launching.exit_codes import run_command


def test_whole_or_absent(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("before")
    with pytest.raises(ZeroDivisionError), atomic.replacing(path) as file:
        file.write("half")
        file.flush()
        raise ZeroDivisionError
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]
    assert path.read_text() == "before"
    with atomic.replacing(path, "wb") as file:
        file.write(b"after")
    assert path.read_bytes() == b"after"


def test_what_killed_writers_have_left_is_removed_beside_what_may_not_be(tmp_path, monkeypatch):
    """As a file of another user; a directory is of `replacing_several`."""
    for name in (".a.partial", ".b.partial", ".c.partial", "kept"):
        (tmp_path / name).touch()
    (tmp_path / ".d.partial").mkdir()
    (tmp_path / ".d.partial" / "weights").touch()
    glob, unlink = Path.glob, Path.unlink

    def refuse(path, **how):
        if path.name == ".b.partial":
            raise PermissionError(errno.EACCES, "another user's")
        unlink(path, **how)

    monkeypatch.setattr(Path, "unlink", refuse)
    monkeypatch.setattr(Path, "glob", lambda *asked: sorted(glob(*asked), key=lambda path: path.name != ".b.partial"))
    atomic.remove_partial(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {".b.partial", "kept"}


@pytest.mark.parametrize("name", ["a.json", f".a.json.{os.getpid()}"], ids=["the file", "before it has its name"])
@pytest.mark.parametrize("exists", [True, False])
def test_a_link_is_replaced_and_not_followed(name, exists, tmp_path):
    (tmp_path / "out").mkdir()
    victim = tmp_path / "victim"
    if exists:
        victim.write_text("mine")
    (tmp_path / "out" / name).symlink_to(victim)
    with atomic.replacing(tmp_path / "out" / "a.json") as file:
        file.write("theirs")
    assert (tmp_path / "out" / "a.json").read_text() == "theirs"
    assert not (tmp_path / "out" / "a.json").is_symlink()
    assert victim.read_text() == "mine" if exists else not victim.exists()
    with pytest.raises(OSError, match="symbolic"):
        (tmp_path / "log").symlink_to(victim)
        files.open_to_append(tmp_path / "log")


TO_NOTHING = "link is a link to .*nowhere, which is not there"


@pytest.mark.parametrize(("name", "told"), [("link", TO_NOTHING), ("link/run", TO_NOTHING), ("file", "file is a file")])
def test_an_output_directory_that_is_something_else_is_said(name, told, tmp_path):
    """It was "File exists", of a link to nothing, too."""
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    directory = tmp_path / name
    line = rf"cannot be written \({tmp_path}/{told}\): name another dir"
    with pytest.raises(UserError, match=line), files.output_to(directory):
        directory.mkdir(parents=True, exist_ok=True)


def test_created_with_the_users_umask(tmp_path):
    before = os.umask(0o027)
    try:
        with atomic.replacing(tmp_path / "a"), files.open_to_append(tmp_path / "b"):
            pass
    finally:
        os.umask(before)
    assert {oct(path.stat().st_mode & 0o777) for path in tmp_path.iterdir()} == {"0o640"}


def train(directory: Path, *more: str) -> int:
    """Train as the script does; return its exit code."""
    flags = "--engine serial --dataset digits --epochs 1 --train-samples 64 --no-progress --output-dir"
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.setattr(sys, "argv", ["mnist", *flags.split(), str(directory), *more])
        run_command(mnist.main)
    return ended.value.code


# name, flags, exit code of a run that finds a link of this name where it writes, and what is said
LINKS = {
    "metrics.jsonl": ([], 0, ""),  # it is replaced
    "summary.json": ([], 0, ""),
    ".lock": ([], 2, "Too many levels of symbolic links"),
    "checkpoints": ([], 2, "checkpoints is a symbolic link, which is not followed"),
    "profile": (["--profile", "1"], 0, "profile is a symbolic link, which is not followed"),
    "tensorboard": (["--tensorboard"], 0, ""),
}


@pytest.mark.parametrize("name", LINKS)
def test_training_writes_nothing_through_a_link(name, tmp_path, capfd):
    """Also into an earlier run's directory, which it would go on with: another user's `profile` led into one of root's."""
    out, victim, (flags, code, said) = tmp_path / "out", tmp_path / "victim", LINKS[name]
    is_directory = "." not in name
    if is_directory:
        victim.mkdir()
    flags = [*flags, "--batch-size", "8"]
    assert train(out, *flags) == 0
    if is_directory and (out / name).exists():
        shutil.rmtree(out / name)
    else:
        (out / name).unlink(missing_ok=True)
    (out / name).symlink_to(victim)
    if name == "profile":  # it needs steps to record
        flags += ["--resume", "never"]
    capfd.readouterr()
    assert train(out, *flags) == code
    assert said in capfd.readouterr().err
    assert list(victim.iterdir()) == [] if is_directory else not victim.exists()
    if code == 0:
        assert json.loads((out / "summary.json").read_text())["samples"] == 64


@pytest.mark.parametrize(("name", "code"), [("metrics.jsonl", 2), ("summary.json", 0), (".lock", 2)])
def test_training_writes_into_no_file_that_has_another_name(name, code, tmp_path, capfd):
    out, victim = tmp_path / "out", tmp_path / "victim"
    assert train(out) == 0
    victim.write_text('{"event": "start"}\n')
    (out / name).unlink()
    (out / name).hardlink_to(victim)
    capfd.readouterr()
    assert train(out) == code
    error = capfd.readouterr().err
    assert (f"{name} has hard links, and what is written would change the other files too" in error) == (code == 2)
    assert error.count("\n") == (code == 2)
    assert victim.read_text() == '{"event": "start"}\n'


def opened_for_writing(source: Path) -> list[str]:
    """Return the calls in a file of source that open a file for writing by other means than engines/files.py."""
    found = []
    for node in ast.walk(ast.parse(source.read_text())):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        words = [each.value for each in ast.walk(node) if isinstance(each, ast.Constant)]
        modes = [word for word in words if isinstance(word, str) and re.fullmatch(r"[rwxa]b?\+?b?", word)]
        writes = name == "open" and any(set(mode) & set("wxa+") for mode in modes)
        flags = {each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute)}
        writes |= ast.unparse(node.func) == "os.open" and bool(flags & {"O_WRONLY", "O_RDWR"})
        if writes or name in ("write_text", "write_bytes", "touch"):
            found.append(f"{source.stem}: {ast.unparse(node)}")
    return found


def test_files_are_opened_for_writing_by_one_function():
    package = Path(mnist.__file__).parent
    sources = [path for path in sorted(package.rglob("*.py")) if package / "audit" not in path.parents]  # on its own
    found = [call for source in sources for call in opened_for_writing(source)]
    others = [
        # descriptors that are open already, pipes, terminals and devices
        *("forker: os.open(os.devnull", "forker: open(number", "startup: os.open(os.devnull", "startup: open(number"),
        *("import_timeout: os.open(path", "progress: os.open(processes.PROC", "gpu: os.open(path"),
        "make_shards: tarfile.open(fileobj=file",  # which is open already
        # made by O_EXCL in a directory of this user alone, with rights of its own
        "rendezvous: os.open(own",
    ]
    assert [call for call in found if not call.startswith(tuple(others))] == []


@pytest.mark.parametrize("read", [files.read_bytes, files.read_text, files.read_small, files.open_to_append])
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_only_regular_files_are_opened(read, kind, tmp_path):
    path = tmp_path / "x"
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(OSError, match=r"a pipe or a device, not a file|symbolic links"):
        read(path)


def test_a_small_file_is_small_no_link_and_its_owners(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"12345")
    assert files.read_small(path, most=5, owner=os.geteuid()) == b"12345"
    with pytest.raises(OSError, match="larger than 4 bytes"):
        files.read_small(path, most=4)
    with pytest.raises(PermissionError, match="another user's file"):
        files.read_small(path, owner=os.geteuid() + 1)
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(OSError, match="symbolic"):
        files.read_small(tmp_path / "link")


@pytest.mark.parametrize("kept", ["", "one\n", "one\n" * 10**6])
@pytest.mark.parametrize("half", ["", "x", "x" * 3 * 10**6])
def test_half_a_line_at_the_end_is_dropped(kept, half, tmp_path):
    path = tmp_path / "x"
    path.write_text(kept + half)
    with files.open_to_append(path) as file:
        file.write(b"two\n")
    assert path.read_text() == kept + "two\n"


def test_a_directory_is_locked_by_one_also_after_it_was_removed(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    first = Lock(out, 0)
    with pytest.raises(TimeoutError):
        Lock(out, 0)
    first.require_in_place()
    shutil.rmtree(out)
    first.require_in_place()
    with pytest.raises(TimeoutError):
        Lock(out, 0)
    (out / ".lock").unlink()
    second = Lock(out, 0)
    with pytest.raises(OSError, match="a later run"):
        first.require_in_place()
    first.release()
    second.release()
    Lock(out, 0).release()


@pytest.mark.parametrize(
    ("of_directory", "of_lock"),
    [(0o755, 0o600), (0o700, 0o600), (0o775, 0o660), (0o777, 0o666), (0o1777, 0o660)],
    ids=["one user's", "private", "a group's", "everybody's", "as /tmp"],
)
def test_only_who_may_write_in_a_directory_can_lock_it(of_directory, of_lock, tmp_path):
    """Whoever could read a .lock could hold it, and the next run said that another one writes there."""
    out = tmp_path / "out"
    out.mkdir()
    out.chmod(of_directory)
    before = os.umask(0o022)
    try:
        for umask in (0o000, 0o077):
            os.umask(umask)
            Lock(out, 0).release()
            assert stat.S_IMODE((out / ".lock").stat().st_mode) == of_lock
            (out / ".lock").chmod(0o644)  # of an earlier version
    finally:
        os.umask(before)
    Lock(out, 0).release()
    assert stat.S_IMODE((out / ".lock").stat().st_mode) == of_lock


def removed_here(out: Path, monkeypatch) -> None:
    """`rm -r` on an NFS client: it renames a file that it has open, and the directory is not empty."""
    (out / ".lock").rename(out / ".nfs0001")


def removed_elsewhere(out: Path, monkeypatch) -> None:
    """By another client of the NFS server."""
    shutil.rmtree(out)
    fstat = os.fstat

    def stale(handle: int) -> os.stat_result:
        if Path(f"/proc/self/fd/{handle}").readlink().name == ".lock (deleted)":
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return fstat(handle)

    monkeypatch.setattr(os, "fstat", stale)


@pytest.mark.parametrize("removed", [removed_here, removed_elsewhere])
def test_a_lock_whose_file_was_removed_on_nfs_is_taken_again(removed, tmp_path, monkeypatch):
    """A run of which somebody removed the files wrote no more checkpoints, and said that its directory was moved."""
    out = tmp_path / "out"
    out.mkdir()
    first = Lock(out, 0)
    for remove in (removed, removed_here):
        remove(out, monkeypatch)
        first.require_in_place()
        with pytest.raises(TimeoutError):
            Lock(out, 0)
    out.rename(tmp_path / "moved")
    with pytest.raises(OSError, match="was moved"):
        first.require_in_place()
    first.release()


@contextlib.contextmanager
def another_process(directory, flock, works):
    """Lock in another process, by this `flock`, until the end of the context: then it is killed."""
    script = f"""
import sys, pathlib
from hvdtrain.engines import lock
lock.fcntl.flock = {flock}
print(lock.Lock(pathlib.Path(sys.argv[1]), 0).works, flush=True)
sys.stdin.read()
"""
    command = [sys.executable, "-c", script, str(directory)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == f"{works}\n"
        yield
        other.kill()


def refuse(monkeypatch, number):
    def flock(handle, how):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", flock)


@pytest.fixture(params=[errno.ENOLCK, errno.EOPNOTSUPP])
def without_locks(request, monkeypatch):
    refuse(monkeypatch, request.param)


def test_without_locks_a_run_that_goes_on_is_respected_and_one_that_was_killed_is_not(without_locks, tmp_path):
    """Two jobs shared a directory without a word, and one result was lost."""
    with another_process(tmp_path, "lambda *_: lock.os.stat('/nowhere')", works=False), pytest.raises(TimeoutError):
        Lock(tmp_path, 0)
    first = Lock(tmp_path, 0)
    first.require_in_place()
    with pytest.raises(TimeoutError):
        Lock(tmp_path, 0)
    first.release()
    Lock(tmp_path, 0).release()


@pytest.fixture
def locks_of_a_mount(monkeypatch):
    """Each process is given the lock, as through two mounts of NFS with `local_lock`."""
    monkeypatch.setattr("fcntl.flock", lambda handle, how: None)


def test_locks_that_another_mount_does_not_see_are_not_believed(locks_of_a_mount, tmp_path):
    """A second job through another mount of one directory continued the first one's run beside it."""
    with another_process(tmp_path, "lambda *_: None", works=True), pytest.raises(TimeoutError):
        Lock(tmp_path, 0)
    Lock(tmp_path, 0).release()
    unreleased = Lock(tmp_path, 0)  # of this process, such as of a training that failed in a notebook
    Lock(tmp_path, 0).release()
    unreleased.release()


@pytest.mark.parametrize("kind", ["without_locks", "locks_of_a_mount"])
def test_the_earlier_of_two_runs_on_two_hosts_writes_no_more(kind, tmp_path, monkeypatch, request):
    if kind == "without_locks":
        refuse(monkeypatch, errno.ENOLCK)
    else:
        request.getfixturevalue(kind)
    with monkeypatch.context() as patch:
        patch.setattr(locks.processes, "pid_space", lambda: "elsewhere")
        first = Lock(tmp_path, 0)
    second = Lock(tmp_path, 0)
    with pytest.raises(OSError, match=r"a later run, on \S+, writes to ") as caught:
        first.require_in_place()
    assert caught.value.errno == errno.EBUSY
    first.release()
    second.require_in_place()
    if kind == "without_locks":
        shutil.rmtree(tmp_path)
        second.require_in_place()
        second.require_in_place()
    second.release()


def test_a_lock_without_room_for_its_note_is_a_lock(tmp_path, monkeypatch):
    def full(handle, holder):
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(locks, "note", full)
    lock = Lock(tmp_path, 0)
    lock.require_in_place()
    with pytest.raises(TimeoutError):
        Lock(tmp_path, 0)
    lock.release()
