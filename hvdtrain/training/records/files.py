"""Atomic file operations that do not follow links, because other users may be able to write to the directory."""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import IO, Any


@contextlib.contextmanager
def replacing(path: Path, mode: str = "w") -> Iterator[IO[Any]]:
    """Context manager that opens a temporary file and renames it to `path` at the end. Raises OSError.

    Links are replaced, not followed. mode: "w" or "wb".
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    try:
        with temporary.open(mode.replace("w", "x")) as file:
            yield file
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def open_to_append(path: Path) -> FileIO:
    """Open a file for appending, unbuffered. Raises OSError, also if `path` is a symbolic link."""
    return FileIO(path, "a", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, 0o666))


def read_text(path: Path) -> str:
    """Return the text of a regular file. Invalid UTF-8 is replaced. Raises OSError, also for a pipe or a device, which might
    never end."""
    with open(path, encoding="utf-8", errors="replace", opener=_open_at_once) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "a pipe or a device, not a file")
        return file.read()


def _open_at_once(name: str, flags: int) -> int:
    return os.open(name, flags | os.O_NONBLOCK)  # otherwise, opening a pipe blocks until there is a writer
