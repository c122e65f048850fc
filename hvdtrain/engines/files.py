"""Files in places where other users or other runs may write: no link is followed, nothing blocks, no half file is seen."""

import contextlib
import errno
import fcntl
import itertools
import os
import resource
import secrets
import stat
import tempfile
import time
from collections.abc import Iterator
from io import BufferedReader, FileIO
from pathlib import Path
from typing import IO, Any

from hvdtrain.engines import holders
from hvdtrain.engines.errors import Failure, UserError

SMALL = 2**20  # bytes
# From file systems without fsync, or without that of directories.
NO_SYNC = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
PARTIAL = ".partial"  # end of the names of files that are being written


@contextlib.contextmanager
def replacing(path: Path, mode: str = "w", *, sync: bool = False) -> Iterator[IO[Any]]:
    """Context manager that opens a temporary file and renames it to `path` at the end. Raises OSError.

    Links are replaced, not followed. mode: "w" or "wb". sync: the file is complete or absent also after a power failure.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}{PARTIAL}")
    try:
        with temporary.open(mode.replace("w", "x")) as file:
            yield file
            if sync:
                file.flush()
                synchronize(file.fileno())
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


def write(path: Path, content: bytes | bytearray | memoryview | str, *, sync: bool = True) -> None:
    """Write `path`, as `replacing` does. Raises OSError."""
    with replacing(path, "w" if isinstance(content, str) else "wb", sync=sync) as file:
        file.write(content)


def unused(path: Path) -> Path:
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
        remedy = "name another directory, or free some space"
        raise UserError(f"--output-dir {directory} cannot be written ({error.strerror or error}): {remedy}") from error


def sync_directory(directory: Path) -> None:
    """Call fsync on `directory`, so that a new file name in it is on the disk. Raises OSError."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        synchronize(handle)
    finally:
        os.close(handle)


def synchronize(handle: int) -> None:
    """Call fsync, if the file system has it. Raises OSError."""
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in NO_SYNC:
            raise


def remove_partial(directory: Path, older_than: float = 0.0) -> None:
    """Remove what killed writers have left in `directory`, if it is at least `older_than` seconds old.

    Also what is from the future, by as much: the clock has jumped, and a leftover would stay until then.
    """
    with contextlib.suppress(OSError):
        for path in list(directory.glob(f".*{PARTIAL}")):
            if abs(time.time() - path.lstat().st_mtime) >= older_than:
                path.unlink(missing_ok=True)


def open_regular(path: str | Path, flags: int = os.O_RDONLY, *, follow: bool = True, mode: int = 0o666) -> int:
    """Open a regular file and return its descriptor. Raises OSError, also for a pipe or a device, which might never end."""
    # O_NONBLOCK: opening a pipe waits for its other end, and opening a leased file for the owner of the lease.
    handle = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW), mode)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "a pipe or a device, not a file")
    return handle


def opened(path: str | Path) -> BufferedReader:
    """Open a regular file for reading bytes. Raises OSError."""
    return os.fdopen(open_regular(path), "rb")


def read_bytes(path: Path) -> bytes:
    """Return the content of a regular file. Raises OSError."""
    with opened(path) as file:
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

    Raises OSError, also if `path` is a symbolic link, a pipe or a device.
    """
    file = FileIO(open_regular(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, follow=False), "a+")
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

    A group that has this user's name, as most distributions make one for each user, is no other user.
    """
    directory = directory.resolve(strict=True)
    status = directory.stat()
    if status.st_uid not in (0, os.geteuid()) or status.st_mode & stat.S_IWOTH:
        return True
    if status.st_mode & stat.S_IWGRP and not _is_own_group(status.st_gid):
        return True
    above = [parent.stat().st_mode for parent in directory.parents]
    return any(mode & stat.S_IWOTH and not mode & stat.S_ISVTX for mode in above)


def _is_own_group(number: int) -> bool:
    import grp
    import pwd

    try:
        return number == 0 or grp.getgrgid(number).gr_name == pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:  # a user or a group without a name
        return False


def give_rights_of(directory: Path, handle: int) -> None:
    """Let those open a file of this user, its lock, who may write in its directory, and nobody else, whatever the umask."""
    above = directory.stat()
    with contextlib.suppress(OSError):  # another user's file, or a file system without rights
        status = os.fstat(handle)
        rights = 0o600
        if above.st_mode & stat.S_IWGRP and status.st_gid == above.st_gid:
            rights |= 0o060
        if above.st_mode & stat.S_IWOTH and not above.st_mode & stat.S_ISVTX:
            rights |= 0o006
        if stat.S_IMODE(status.st_mode) != rights:
            os.fchmod(handle, rights)


class Lock:
    """An exclusive lock on a directory. The kernel releases it when the process ends, even if it is killed.

    It is on the file .lock, because NFS has no locks on directories. Who may write in the directory may lock it, and nobody
    else: whoever can open a file can lock it. The file says who has it (holders.py), for file systems whose locks other
    hosts do not see, or that have none: there `works` is False. A run that is known to go on is respected; of others, the
    last one has it, and `require_in_place` tells.
    Raises TimeoutError if another process holds the lock for `seconds`, and OSError if the directory is not writable.
    """

    def __init__(self, directory: Path, seconds: float):
        self._path = directory / ".lock"
        self.works = True
        self._noted = False
        self._me = holders.myself()
        self._handle: int | None = self._take(seconds)
        self._place = directory.stat()

    def _take(self, seconds: float) -> int:
        handle = open_regular(self._path, os.O_RDWR | os.O_CREAT, follow=False, mode=0o600)
        give_rights_of(self._path.parent, handle)
        until = time.monotonic() + seconds
        while True:
            free = True
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):  # PermissionError: some network file systems
                free = False
            except OSError:
                self.works = False
            if free and self._nobody_is_noted():
                self._note(handle)
                return handle
            if time.monotonic() >= until:
                os.close(handle)
                raise TimeoutError(errno.ETIMEDOUT, f"another process has held {self._path}")
            time.sleep(0.05)

    def _nobody_is_noted(self) -> bool:
        """Return whether no other run is known to go on.

        Trap: locks of a mount, as of NFS with `local_lock` or `nolock`, are given to one process of each mount.
        """
        other = holders.noted(self._path)
        if other is None or other == self._me or not other.runs():
            return True
        return self.works and other.pid == self._me.pid  # one process: it has released that lock

    def _note(self, handle: int) -> None:
        try:
            holders.note(handle, self._me)
            self._noted = True
        except OSError:  # such as a full disk
            if not self.works:
                raise

    def require_in_place(self) -> None:
        """Raise OSError (ESTALE) if the directory is no longer the one that was locked: it was moved, and another process
        may lock one of the same name. A directory that was removed is made and locked again."""
        if self._handle is None:
            raise OSError(errno.ESTALE, "the run has ended")
        if self._noted and (other := holders.noted(self._path)) not in (None, self._me):
            assert other is not None
            raise OSError(errno.EBUSY, f"a later run, on {other.host}, writes to {self._path.parent}")
        held: os.stat_result | None = None
        with contextlib.suppress(OSError):  # another host has removed the file on NFS
            held = os.fstat(self._handle)
        try:
            if held is not None and os.path.samestat(held, self._path.lstat()):
                return
        except (FileNotFoundError, NotADirectoryError):
            pass
        directory = self._path.parent
        if held is None or held.st_nlink == 0 or self._lacks_the_file(directory):
            directory.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(TimeoutError):
                removed, self._handle = self._handle, self._take(0.0)
                self._place = directory.stat()
                os.close(removed)
                return
        raise OSError(errno.ESTALE, f"{directory} was moved while this run writes there")

    def _lacks_the_file(self, directory: Path) -> bool:
        """Return whether the directory is in its place, without the file: NFS renames a file that is removed while open."""
        with contextlib.suppress(OSError):
            return os.path.samestat(self._place, directory.stat()) and not os.path.lexists(self._path)
        return False

    def release(self) -> None:
        """Release the lock. Idempotent."""
        if self._handle is not None:
            if self._noted and holders.noted(self._path) == self._me:
                with contextlib.suppress(OSError):
                    holders.note(self._handle, None)
            os.close(self._handle)
            self._handle = None
