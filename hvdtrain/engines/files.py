"""Files in places where other users or other runs may write: no link is followed, nothing blocks, no half file is seen."""

import contextlib
import errno
import itertools
import os
import resource
import stat
from collections.abc import Iterator
from io import BufferedReader, FileIO
from pathlib import Path

from hvdtrain.engines.errors import Failure, UserError

SMALL = 2**20  # bytes
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def unused_name(path: Path) -> Path:
    """Return a name beside `path` that is not there: for metrics.jsonl, metrics.1.jsonl or a higher number."""
    names = (path.with_name(f"{path.stem}.{number}{path.suffix}") for number in itertools.count(1))
    return next(name for name in names if not os.path.lexists(name))


def unwritten(path: Path, error: OSError, flag: str = "") -> UserError | Failure:
    """Return what to raise for an error from writing `path`, for which the user has chosen the place, with `flag`."""
    message = f"{f'{flag} {path}'.strip()} cannot be written ({error.strerror or error})"
    if error.errno in NO_ROOM:
        return Failure(f"{message}: free some space there; what was there before is unchanged")
    return UserError(f"{message}: name another place")


@contextlib.contextmanager
def output_to(directory: Path) -> Iterator[None]:
    """Context manager around what writes to --output-dir: an OSError becomes a UserError."""
    try:
        yield
    except OSError as error:
        why, remedy = error.strerror or error, "name another directory, or free some space"
        if error.errno == errno.EEXIST and error.filename is not None:
            there, remedy = Path(os.fsdecode(error.filename)), "name another directory"
            links = there.is_symlink()
            why = f"{there} is a link to {os.readlink(there)}, which is not there" if links else f"{there} is a file"  # noqa: PTH115
        raise UserError(f"--output-dir {directory} cannot be written ({why}): {remedy}") from error


def open_regular(path: str | Path, flags: int = os.O_RDONLY, *, follow: bool = True, mode: int = 0o666) -> int:
    """Open a regular file and return its descriptor. Raises OSError, also for a pipe or a device, which might never end.

    Everything that hvdtrain opens for writing is opened here. No symbolic link is followed then, and a file with other names
    is refused.
    """
    writes = flags & os.O_ACCMODE != os.O_RDONLY
    # O_NONBLOCK: opening a pipe waits for its other end, and opening a leased file for the owner of the lease.
    flags |= os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow and not writes else os.O_NOFOLLOW)
    handle = os.open(path, flags, mode)
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "a pipe or a device, not a file")
    # Where others may write, they can put a hard link to a file
    # of this user's there, which they may not change themselves.
    if writes and status.st_nlink > 1:
        os.close(handle)
        raise OSError(errno.EMLINK, f"{path} has hard links, and what is written would change the other files too")
    return handle


def make_directory(path: Path) -> Path:
    """Create a directory in --output-dir, with those above it, if it is not there, and return it. Raises OSError, also for a
    symbolic link."""
    path.mkdir(parents=True, exist_ok=True)
    require_no_link(path)
    return path


def require_no_link(path: Path) -> None:
    """Raise OSError if `path` is a symbolic link, whoever has made it."""
    if os.path.islink(path):  # noqa: PTH114 (Path's own raises where the name is too long)
        raise OSError(errno.ELOOP, f"{path} is a symbolic link, which is not followed")


def opened_for_reading(path: str | Path) -> BufferedReader:
    """Open a regular file for reading bytes. Raises OSError."""
    return os.fdopen(open_regular(path), "rb")


def read_bytes(path: Path) -> bytes:
    """Return the content of a regular file. Raises OSError."""
    with opened_for_reading(path) as file:
        return file.read()


def read_text(path: Path) -> str:
    """Return the text of a regular file. Invalid UTF-8 is replaced. Raises OSError."""
    with os.fdopen(open_regular(path), encoding="utf-8", errors="replace") as file:
        return file.read()


def read_small(path: Path, *, most: int = SMALL, owner: int | None = None) -> bytes:
    """Return the content of a regular file of at most `most` bytes. Raises OSError, also for a link, and for a file that
    does not belong to the user `owner` (None: any)."""
    with os.fdopen(open_regular(path, follow=False), "rb") as file:
        if owner is not None and os.fstat(file.fileno()).st_uid != owner:
            raise PermissionError(errno.EPERM, "another user's file")
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"larger than {most:,} bytes")
    return content


def open_to_append(path: Path) -> FileIO:
    """Open a file of lines for appending, unbuffered, without the half line at its end that a killed writer may have left.

    Raises OSError, also if `path` is a symbolic link, a pipe or a device, or has hard links.
    """
    file = FileIO(open_regular(path, os.O_RDWR | os.O_APPEND | os.O_CREAT), "a+")
    end = file.seek(0, os.SEEK_END)
    kept = end
    while kept > 0:
        start = max(0, kept - SMALL)
        if (at := os.pread(file.fileno(), kept - start, start).rfind(b"\n")) >= 0:
            kept = start + at + 1
            break
        kept = start
    if kept != end:
        file.truncate(kept)
    return file


def allow_open_files(number: int) -> bool:
    """Raise the limit of open files, which is often 1024, to `number`. Return whether that is permitted."""
    unlimited = resource.RLIM_INFINITY
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == unlimited or soft >= number:
        return True
    permitted = hard == unlimited or hard >= number
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (number if permitted else hard, hard))
    return permitted


def others_may_write(directory: Path) -> bool:
    """Return whether another user may replace what is in `directory`, by the rights of it or one above. Raises OSError.

    A group that has this user's name is no other user.
    """
    directory = directory.resolve(strict=True)
    status = directory.stat()
    if status.st_uid not in (0, os.geteuid()) or status.st_mode & stat.S_IWOTH:
        return True
    if status.st_mode & stat.S_IWGRP and not _is_own_group(status.st_gid):
        return True
    above = [parent.stat().st_mode for parent in directory.parents]
    # Where the sticky bit is set, as on /tmp, others cannot replace what is not theirs.
    return any(mode & stat.S_IWOTH and not mode & stat.S_ISVTX for mode in above)


def _is_own_group(number: int) -> bool:
    import grp
    import pwd

    try:
        # Most distributions make a group for each user, with the user's name: it is no other user.
        return number == 0 or grp.getgrgid(number).gr_name == pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:  # a user or a group without a name
        return False


def cache_directory(name: str, kind: str = "datasets") -> Path | None:
    """Return $XDG_CACHE_HOME/hvdtrain/KIND/NAME (default: in ~/.cache), created if needed.

    None if that fails, or if another user could write there.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        # According to the XDG specification, relative paths are ignored.
        root = Path(base) if base.startswith("/") else Path.home() / ".cache"
        root.mkdir(parents=True, exist_ok=True)
        path = root
        for part, mode in (("hvdtrain", 0o755), (kind, 0o755), (name, 0o700)):
            path = path / part
            path.mkdir(mode=mode, exist_ok=True)
        # What is in the cache counts as verified: nobody else may write there.
        own = not path.is_symlink() and path.stat().st_uid == os.geteuid() and not others_may_write(path)
    except (OSError, RuntimeError):  # RuntimeError: the user has no home directory
        return None
    return path if own else None
