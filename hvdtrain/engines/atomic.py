"""Writes files so that nobody sees a half one: a temporary file is renamed once it is complete."""

import contextlib
import errno
import os
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from hvdtrain.engines import files

# From file systems without fsync, or without that of directories.
NO_SYNC = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
PARTIAL = ".partial"  # end of the names of files that are being written
STALE_SECONDS = 3600.0  # age after which a partial file of another process is considered abandoned


@contextlib.contextmanager
def replacing(path: Path, mode: str = "w", *, sync: bool = False) -> Iterator[IO[Any]]:
    """Context manager that opens a temporary file and renames it to `path` at the end. Raises OSError.

    Links are replaced, not followed. mode: "w" or "wb". sync: the file is complete or absent also after a power failure.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}{PARTIAL}")
    try:
        with os.fdopen(files.open_regular(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL), mode) as file:
            yield file
            if sync:
                file.flush()
                fsync(file.fileno())
        temporary.replace(path)
        if sync:
            sync_directory(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


@contextlib.contextmanager
def replacing_several(path: Path) -> Iterator[Path]:
    """Context manager that gives the place for `path` in a temporary directory, whose files are moved beside it at the end.

    Raises OSError.
    """
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", suffix=PARTIAL, dir=path.parent) as directory:
        place = Path(directory, path.name)
        yield place
        for made in sorted(Path(directory).iterdir(), key=lambda made: made == place):  # it refers to the others
            made.replace(path.with_name(made.name))


def write_atomically(path: Path, content: bytes | bytearray | memoryview | str, *, sync: bool = True) -> None:
    """Write `path`, as `replacing` does. Raises OSError."""
    with replacing(path, "w" if isinstance(content, str) else "wb", sync=sync) as file:
        file.write(content)


def sync_directory(directory: Path) -> None:
    """Call fsync on `directory`, so that a new file name in it is on the disk. Raises OSError."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        fsync(handle)
    finally:
        os.close(handle)


def fsync(handle: int) -> None:
    """Call fsync, if the file system has it. Raises OSError."""
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in NO_SYNC:
            raise


def remove_partial(directory: Path, older_than: float = 0.0) -> None:
    """Remove what killed writers have left in `directory`, if it is at least `older_than` seconds old."""
    with contextlib.suppress(OSError):
        for path in list(directory.glob(f".*{PARTIAL}")):
            with contextlib.suppress(OSError):  # one that this user may not remove leaves the others
                # One from the future counts, too: the clock has jumped, and it would stay until then.
                if abs(time.time() - path.lstat().st_mtime) >= older_than:
                    shutil.rmtree(path) if stat.S_ISDIR(path.lstat().st_mode) else path.unlink()
