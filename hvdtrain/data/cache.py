"""A cache shared by the processes of a host: a directory with a lock, and notes about verified files.

If eight ranks each unpack and hash 55 MB, two cores need a second or more. Therefore the first process does so, stores an
unpacked copy, and notes the identity of the files. Other processes and later runs compare the notes and map the copies.
The cache is optional: if it is not writable, every process reads the files itself.
"""

import errno
import json
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

NOTES = "verified.json"
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
STALE_SECONDS = 3600.0  # age after which a partial file is considered abandoned

Notes = dict[str, list[int | str]]  # absolute path -> identity of the file, sha256 of its unpacked content


def directory(name: str) -> Path | None:
    """Return $XDG_CACHE_HOME/hvdtrain/datasets/NAME (default: in ~/.cache), created if needed; None if that fails."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        # According to the XDG specification, relative paths are ignored.
        root = Path(base) if base.startswith("/") else Path.home() / ".cache"
        path = root / "hvdtrain" / "datasets" / name
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # RuntimeError: the user has no home directory
        return None
    return path


@contextmanager
def locked(path: Path, seconds: float) -> Iterator[str]:
    """Context manager that locks directory `path`, waiting at most `seconds`. Yields "" on success, else the reason.

    The kernel releases the lock when the process ends, even if it is killed.
    """
    from filelock import FileLock, Timeout  # takes 40 ms, and is rarely needed

    lock, problem = FileLock(path / ".lock"), ""
    try:
        lock.acquire(timeout=seconds)
    except Timeout:  # a subclass of OSError, so it must come first
        problem = f"another process has held {path / '.lock'} for {seconds:.0f} seconds"
    except (OSError, NotImplementedError) as error:
        if isinstance(error, NotImplementedError) or error.errno in NO_LOCKS:
            problem = f"{path} is on a file system without locks: set XDG_CACHE_HOME to a directory on another one"
        else:
            problem = f"{path} cannot be written ({error.strerror or error})"
    try:
        yield problem
    finally:
        lock.release()


def write(path: Path, content: bytes | bytearray) -> None:
    """Write `path` atomically, even if the process is killed or another process writes it, too. Raises OSError."""
    partial = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.partial")
    try:
        with partial.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())  # otherwise the file could be empty after a power failure
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def sweep(path: Path) -> None:
    """Remove partial files of killed processes from directory `path`."""
    with suppress(OSError):
        for partial in path.glob(".*.partial"):
            if time.time() - partial.stat().st_mtime > STALE_SECONDS:
                partial.unlink(missing_ok=True)


def read_notes(path: Path) -> Notes:
    """Return the notes in directory `path`; empty if there are none or they are damaged."""
    try:
        notes = json.loads((path / NOTES).read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return notes if isinstance(notes, dict) else {}


def write_notes(path: Path, notes: Notes) -> None:
    """Write the notes to directory `path`, without those of removed files. The caller holds the lock. Raises OSError."""
    write(path / NOTES, json.dumps({file: note for file, note in notes.items() if Path(file).exists()}).encode())


def note(notes: Notes, path: Path, stat: os.stat_result, sha256: str) -> None:
    """Note that `path` was verified. sha256: of its unpacked content."""
    notes[str(path.absolute())] = [*identity(stat), sha256]


def is_noted(notes: Notes, path: Path, sha256: str) -> bool:
    """Return whether `path` was verified with this SHA-256 of its unpacked content, and has not changed since."""
    try:
        return notes.get(str(path.absolute())) == [*identity(path.stat()), sha256]
    except OSError:
        return False


def identity(stat: os.stat_result) -> list[int]:
    """Return values that change when the content of a file changes."""
    # ctime also changes if mtime is restored. The device number differs between hosts on a shared file system.
    return [stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]
