"""Shared by the processes of one host: a cache directory, a lock in it, and records of which files were verified.

Eight ranks that each unpack and hash 55 MB cost two cores a second or more. So the first one does it, keeps an
unpacked copy, and notes the files' identity; the others, and later runs, compare the notes and map the copies, sharing
their pages.
Nothing here is needed for a run: where the cache cannot be written, every process reads for itself.
"""

import json
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

NOTES = "verified.json"
STALE_SECONDS = 3600.0  # a partial file this old has no owner any more

Notes = dict[str, list[int | str]]  # absolute path -> identity of the file, sha256 of its unpacked content


def directory(name: str) -> Path | None:
    """$XDG_CACHE_HOME/hvdtrain/datasets/NAME, or the same in ~/.cache; made if need be; None where it cannot be."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        # The XDG rules say that a relative path there is to be ignored.
        root = Path(base) if base.startswith("/") else Path.home() / ".cache"
        path = root / "hvdtrain" / "datasets" / name
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # RuntimeError: this user has no home
        return None
    return path


@contextmanager
def locked(path: Path, seconds: float) -> Iterator[str]:
    """Hold the lock of directory `path`, waiting at most `seconds`. Yields "" when held, else why not.

    The kernel drops the lock when its holder dies, however it dies: nothing is ever left to clean up by hand.
    """
    from filelock import FileLock, Timeout  # 40 ms: only who must wait pays for it

    lock, problem = FileLock(path / ".lock"), ""
    try:
        lock.acquire(timeout=seconds)
    except Timeout:  # before OSError, whose subclass it is
        problem = f"another process has held {path / '.lock'} for {seconds:.0f} seconds"
    except (OSError, NotImplementedError) as error:  # NotImplementedError: a file system without locks
        problem = f"{path} cannot be written ({getattr(error, 'strerror', None) or error})"
    try:
        yield problem
    finally:
        lock.release()


def write(path: Path, content: bytes | bytearray) -> None:
    """Write `path` whole or not at all, even if the process is killed or another one writes it. Raises OSError."""
    partial = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.partial")
    try:
        with partial.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())  # else a power cut could leave the new name with none of its bytes
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def sweep(path: Path) -> None:
    """Remove what killed processes left half-written in directory `path`."""
    with suppress(OSError):
        for partial in path.glob(".*.partial"):
            if time.time() - partial.stat().st_mtime > STALE_SECONDS:
                partial.unlink(missing_ok=True)


def read_notes(path: Path) -> Notes:
    """The notes in directory `path`; empty where there are none or they are damaged."""
    try:
        notes = json.loads((path / NOTES).read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return notes if isinstance(notes, dict) else {}


def write_notes(path: Path, notes: Notes) -> None:
    """Replace the notes in directory `path`, without those on files that are gone. Raises OSError. Hold the lock."""
    write(path / NOTES, json.dumps({file: note for file, note in notes.items() if Path(file).exists()}).encode())


def note(notes: Notes, path: Path, stat: os.stat_result, sha256: str) -> None:
    notes[str(path.absolute())] = [*identity(stat), sha256]


def is_noted(notes: Notes, path: Path, sha256: str) -> bool:
    """Whether `path` is the file that was noted, untouched since, its unpacked content having that sha256."""
    try:
        return notes.get(str(path.absolute())) == [*identity(path.stat()), sha256]
    except OSError:
        return False


def identity(stat: os.stat_result) -> list[int]:
    """What changes when a file's content does."""
    # ctime catches what a restored mtime hides. No device number: it differs from host to host on a shared file system.
    return [stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]
