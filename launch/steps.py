"""Shared by the set-up programs: errors, commands with a log, stages and locks, pinned versions, the machine."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

GIB = 1 << 30
Remedies = Mapping[str, str]  # what a text says, as a regular expression, and the remedy
NO_SPACE, NO_PROCESSES = r"No space left on device|Disk quota exceeded", "Resource temporarily|can't start new thread"
# The limits of the system, as its errors and the output of programs name them.
LIMITS: Remedies = {
    NO_SPACE: "free some space, or choose another place (for the checkout, --cache-dir, TMPDIR)",
    NO_PROCESSES: "allow more processes: end some, raise `ulimit -u`, or --jobs 1",
}
NO_WRITING = "Read-only file system|Permission denied|File exists|Not a directory"
PLACES: Remedies = {NO_WRITING: "choose a place that you can write to (--cache-dir, TMPDIR)"}


def remedy_of(text: str, remedies: Remedies) -> str | None:
    """Return the remedy for what `text` says, if there is one."""
    return next((remedy for pattern, remedy in remedies.items() if re.search(pattern, text)), None)


def pins() -> dict[str, str]:
    """Return the versions in constraints.txt, by package."""
    lines = (Path(__file__).resolve().parent / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


class Refusal(Exception):
    """Something must be changed first: one line with the remedy, exit code 2."""


class BuildFailure(Exception):
    """Something failed unexpectedly: the relevant lines, then the remedy, exit code 1."""


def main_with_exit_codes(main: Callable[[], None]) -> None:
    """Run `main`, and turn errors into a message and an exit code, without a traceback."""
    # Treat SIGTERM and a closed terminal like Ctrl-C: unwind the stack, to end child processes and remove partial files.
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as by nohup
            signal.signal(number, lambda number, _: sys.exit(128 + number))
    name = Path(sys.argv[0]).name
    try:
        require_proc()
        main()
    except Refusal as error:
        sys.exit(_fail(name, error, 2))
    except BuildFailure as error:
        sys.exit(_fail(name, error, 1))
    except OSError as error:
        remedy = remedy_of(str(error), {**LIMITS, **PLACES})
        sys.exit(_fail(name, f"{error}: {remedy}" if remedy else error, 2 if remedy else 1))
    except KeyboardInterrupt:
        sys.exit(_fail(name, "interrupted", 130))


def _fail(name: str, message: object, code: int) -> int:
    print(f"{name}: {message}", file=sys.stderr, flush=True)
    return code


def run(
    command: Sequence[str | Path],
    log: Path,
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    on_line: Callable[[str], None] = lambda line: None,
) -> int:
    """Run `command`, append its output to `log`, and return its exit code. An interruption also ends its child processes."""
    with log.open("a", errors="replace") as out:
        out.write(f"$ {' '.join(map(str, command))}\n")
        out.flush()
        with subprocess.Popen(
            list(map(str, command)),
            env=env,
            cwd=cwd,
            text=True,
            errors="replace",
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        ) as process:
            try:
                assert process.stdout is not None
                for line in process.stdout:
                    out.write(line)
                    on_line(line)
                return process.wait()
            finally:
                kill_group(process)


def kill_group(process: subprocess.Popen[str]) -> None:
    """Kill a process that was started with start_new_session=True, and all processes that it left behind."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


def last_lines(log: Path, count: int = 12) -> str:
    """Return the last lines of a log, indented."""
    lines = [line.rstrip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return "\n".join(f"    {line[:300]}" for line in lines[-count:])


def user_cache() -> Path:
    """Return the directory of this user's caches. Raises Refusal."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # no HOME, and not in /etc/passwd: a container with any user id
        raise Refusal("this user has no home directory: set HOME or XDG_CACHE_HOME to a directory of yours") from None


def existing(path: Path) -> Path:
    """Return `path`, or the directory above it that exists."""
    return next(parent for parent in (path, *path.parents) if parent.exists())


def free_gib(path: Path) -> float:
    """Return how much is free for this user in the file system of `path`, without quotas, which only writing shows."""
    return shutil.disk_usage(existing(path)).free / GIB


def require_space(path: Path, gib: float, what: str, instead: str = "") -> None:
    """Raise Refusal if the file system of `path` has less than `gib` GiB free. `instead`: another remedy."""
    free = free_gib(path)
    if free < gib:
        raise Refusal(
            f"{what} needs {gib:g} GiB in {path}, which has {free:.1f}: free some, or use another place{instead}"
        )


def require_proc(proc: Path = Path("/proc")) -> None:
    """Raise Refusal without /proc: mpirun ends without a word there, and Horovod's launchers read it."""
    if not (proc / "self" / "stat").exists():
        raise Refusal(f"no {proc} here, which MPI and Horovod read: mount it (as root: mount -t proc proc {proc})")


def require_writable(directory: Path) -> None:
    """Raise Refusal if this user cannot write to the checkout."""
    if not os.access(directory, os.W_OK | os.X_OK):
        raise Refusal(
            f"{directory} cannot be written to: cp -r {directory} DIR, chmod -R u+w DIR, and make setup there"
        )


def refuse_open_cache(cache: Path) -> None:
    """Raise Refusal if every user may write in the cache: the programs and wheels in it are run."""
    for directory in (cache, *(path for path in cache.glob("*") if path.is_dir()), *cache.glob("wheels/*")):
        if directory.stat().st_mode & 0o002:
            raise Refusal(
                f"{directory}: every user may write there, and what is in it is run: chmod -R o-w it, or another --cache-dir"
            )


def compile_jobs() -> int:
    """Return how many compilers to run at once, by cores and memory (torch's headers take under 1.5 GiB each)."""
    cores = len(os.sched_getaffinity(0))
    available = _meminfo("MemAvailable")
    try:  # a container sees the cores and memory of the host; its limits are in these files
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            cores = min(cores, max(1, int(quota) // int(period)))
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        if limit != "max":
            available = min(available, int(limit) - int(Path("/sys/fs/cgroup/memory.current").read_text()))
    except (OSError, ValueError):
        pass
    return max(1, min(cores, int(available / (1.5 * GIB))))


def _meminfo(name: str) -> int:
    match = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    return int(match.group(1)) * 1024 if match else 4 * GIB


def has_nvidia_gpu() -> bool:
    """Tell whether there is an NVIDIA GPU, by the driver's files.

    nvidia-smi may be absent (containers), or present without a GPU (login nodes).
    """
    return Path("/proc/driver/nvidia/version").exists() and any(Path("/dev").glob("nvidia[0-9]*"))


UPDATE_SECONDS = 15.0


class Stage:
    """What a stage shows: its current step, and at its end another result than its seconds."""

    note = ""
    result = ""


@contextmanager
def stage(text: str) -> Iterator[Stage]:
    """Show a stage during the block: its name, now and then its current step, and its seconds at the end."""
    current, started, over = Stage(), time.monotonic(), threading.Event()

    def show() -> None:
        while not over.wait(UPDATE_SECONDS):
            _write(f"\n    {f'{time.monotonic() - started:.0f} s  {current.note}'.strip()} ...")

    _write(f"{text} ...")
    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    result = "failed after "
    try:
        yield current
        result = current.result
    finally:
        over.set()
        thread.join()
        _write(f" {result}{time.monotonic() - started:.1f} s\n")


def open_lock(file: Path) -> int:
    """Open a file to lock, only for those who may write beside it: whoever can open a file can lock it, and stop others.

    Returns its descriptor. Raises OSError.
    """
    handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)  # NFS locks only what is open for writing
    above, found = file.parent.stat(), os.fstat(handle)
    group = 0o060 if above.st_mode & 0o020 and found.st_gid == above.st_gid else 0
    if found.st_uid == os.geteuid():
        os.fchmod(handle, 0o600 | group)  # whatever the umask
    return handle


@contextmanager
def only_one(file: Path, what: str) -> Iterator[None]:
    """Hold a lock on a file, for which other processes wait here. The kernel releases it with its holder."""
    try:
        handle = open_lock(file)
    except OSError:  # it can only be read, and so can what it protects
        yield
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        with stage(f"wait for the other {what}"):
            fcntl.flock(handle, fcntl.LOCK_EX)
    except OSError:
        pass  # a file system without locks: both work, and atomic renames keep cached wheels valid
    try:
        yield
    finally:
        os.close(handle)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
