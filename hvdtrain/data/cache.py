"""A cache shared by the processes of a host: a directory with a lock, and notes about verified files.

If eight ranks each unpack and hash 55 MB, two cores need a second or more. Therefore the first process does so, stores an
unpacked copy, and notes the identity of the files. Other processes and later runs compare the notes and map the copies.
The cache is optional: if it is not writable, every process reads the files itself.
"""

import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hvdtrain.engines import files

NOTES = "verified.json"
STALE_SECONDS = 3600.0  # age after which a partial file is considered abandoned

Notes = dict[str, list[int | str]]  # absolute path -> identity of the file, sha256 of its unpacked content


def directory(name: str) -> Path | None:
    """Return $XDG_CACHE_HOME/hvdtrain/datasets/NAME (default: in ~/.cache), created if needed.

    None if that fails, or if another user could write there: what is in the cache counts as verified.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        # According to the XDG specification, relative paths are ignored.
        root = Path(base) if base.startswith("/") else Path.home() / ".cache"
        path = root / "hvdtrain" / "datasets" / name
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.lstat()
    except (OSError, RuntimeError):  # RuntimeError: the user has no home directory
        return None
    mine = found.st_uid == os.geteuid() and not found.st_mode & stat.S_IWOTH
    return path if mine and stat.S_ISDIR(found.st_mode) else None


@contextmanager
def locked(path: Path, seconds: float) -> Iterator[str]:
    """Context manager that locks directory `path`, waiting at most `seconds`. Yields "" on success, else the reason."""
    lock, problem = None, ""
    try:
        lock = files.Lock(path, seconds)
        if not lock.works:
            problem = f"{path} is on a file system without locks: set XDG_CACHE_HOME to a directory on another one"
    except TimeoutError:
        problem = f"another process has held {path / '.lock'} for {seconds:.0f} seconds"
    except OSError as error:
        problem = f"{path} cannot be written ({error.strerror or error})"
    try:
        yield problem
    finally:
        if lock is not None:
            lock.release()


def read_notes(path: Path) -> Notes:
    """Return the notes in directory `path`; empty if there are none or they are damaged."""
    try:
        notes = json.loads(files.read_small(path / NOTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return notes if isinstance(notes, dict) else {}


def write_notes(path: Path, notes: Notes) -> None:
    """Write the notes to directory `path`, without those of removed files. The caller holds the lock. Raises OSError."""
    files.write(path / NOTES, json.dumps({file: note for file, note in notes.items() if Path(file).exists()}).encode())


def note(notes: Notes, path: Path, status: os.stat_result, sha256: str) -> None:
    """Note that `path` was verified. sha256: of its unpacked content."""
    notes[str(path.absolute())] = [*identity(status), sha256]


def is_noted(notes: Notes, path: Path, sha256: str) -> bool:
    """Return whether `path` was verified with this SHA-256 of its unpacked content, and has not changed since."""
    try:
        return notes.get(str(path.absolute())) == [*identity(path.stat()), sha256]
    except OSError:
        return False


def identity(status: os.stat_result) -> list[int]:
    """Return values that change when the content of a file changes."""
    # ctime also changes if mtime is restored. The device number differs between hosts on a shared file system.
    return [status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]
