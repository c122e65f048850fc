"""A lock on a directory, so that two runs do not write to it.

Its file says who has it: the last run that began there. On some network file systems, locks do not tell: there are none, or
other hosts do not see them.
"""

import contextlib
import errno
import fcntl
import json
import os
import secrets
import socket
import stat
import time
from pathlib import Path
from typing import NamedTuple

from hvdtrain.engines.files import open_regular
from hvdtrain.launching import processes


class Holder(NamedTuple):
    """One lock of a process. place: boot and pid namespace, within which pids can be compared. started: ticks since boot.
    file: the inode of the lock, which a copy of a running run's directory has not."""

    host: str
    place: str
    pid: int
    started: int
    token: str
    file: int = 0

    def runs(self) -> bool:
        """Return whether the process is known to run. One of another host, or of another container, is not."""
        return self.place == processes.pid_space() and processes.runs(self.pid, self.started)


def myself() -> Holder:
    """Return a new holder of this process."""
    found = processes.stat(os.getpid())
    started = found.started if found else 0
    return Holder(socket.gethostname(), processes.pid_space(), os.getpid(), started, secrets.token_hex(8))


def note(handle: int, holder: Holder | None) -> None:
    """Write who holds the lock into its open file. None: nobody. Raises OSError."""
    os.ftruncate(handle, 0)
    if holder is not None:
        os.pwrite(handle, json.dumps(holder).encode(), 0)


def noted(path: Path) -> Holder | None:
    """Return who is noted; None if nobody is, or if it cannot be read."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        host, place, pid, started, token, file = json.loads(path.read_bytes()[:10_000])
        # A copy of a running run's directory has the note, too, but another inode: it is not locked.
        if file == path.lstat().st_ino:
            return Holder(str(host), str(place), int(pid), int(started), str(token), int(file))
    return None


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

    It is on the file .lock. Who may write in the directory may lock it, and nobody else. The file says who has it
    (`Holder`), for file systems whose locks other hosts do not see, or that have none: there `works` is False. A run that
    is known to go on is respected; of others, the last one has it, and `require_in_place` tells.
    Raises TimeoutError if another process holds the lock for `seconds`, and OSError if the directory is not writable.
    """

    def __init__(self, directory: Path, seconds: float):
        self._path = directory / ".lock"
        self.works = True
        self._noted = False
        self._me = myself()
        self._handle: int | None = self._take(seconds)
        self._place = directory.stat()

    def _take(self, seconds: float) -> int:
        # A lock is on a file in the directory, because NFS has no locks on directories.
        handle = open_regular(self._path, os.O_RDWR | os.O_CREAT, mode=0o600)
        self._me = self._me._replace(file=os.fstat(handle).st_ino)
        # Whoever can open a file can lock it, also for reading alone.
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
        """Return whether no other run is known to go on."""
        other = noted(self._path)
        if other is None or other == self._me or not other.runs():
            return True
        # Trap: locks of a mount, as of NFS with `local_lock` or `nolock`, are given to one process of each mount.
        return self.works and other.pid == self._me.pid  # one process: it has released that lock

    def _note(self, handle: int) -> None:
        try:
            note(handle, self._me)
            self._noted = True
        except OSError:  # such as a full disk
            if not self.works:
                raise

    def require_in_place(self) -> None:
        """Raise OSError (ESTALE) if the directory is no longer the one that was locked: it was moved, and another process
        may lock one of the same name. A directory that was removed is made and locked again."""
        if self._handle is None:
            raise OSError(errno.ESTALE, "the run has ended")
        if self._noted and (other := noted(self._path)) not in (None, self._me):
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
        """Return whether the directory is in its place, without the file."""
        with contextlib.suppress(OSError):
            # NFS renames a file that is removed while it is open: it still has a link, and is gone from its name.
            return os.path.samestat(self._place, directory.stat()) and not os.path.lexists(self._path)
        return False

    def release(self) -> None:
        """Release the lock. Idempotent."""
        if self._handle is not None:
            if self._noted and noted(self._path) == self._me:
                with contextlib.suppress(OSError):
                    note(self._handle, None)
            os.close(self._handle)
            self._handle = None
