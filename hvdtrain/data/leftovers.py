"""Removes what a killed rank leaves behind: multiprocessing's named semaphores in /dev/shm and sockets in TMPDIR, and
temporary directories (`scratch`).

All are tagged with their owner. Normally, the input workers, which outlive the rank for a moment, remove the sockets, and
multiprocessing's resource tracker removes the semaphores. If these are killed as well, the next start on this host removes
all.
"""

import contextlib
import hashlib
import multiprocessing
import os
import re
import shutil
import tempfile
import time
from multiprocessing import util
from pathlib import Path

from hvdtrain.engines import files
from hvdtrain.engines.errors import UserError
from hvdtrain.launching.processes import Process, lives, runs, stat

SEMAPHORES = Path("/dev/shm")
OWNER = "hvdtrain-owner"  # file with the owner's tag in a directory of sockets
LONGEST_TAG = 100  # bytes
LONGEST_SOCKETS = 107 - len("/listener-abcdefgh")  # bytes of a directory: the name of a socket has at most 107
END_SECONDS = 2.0  # how long a killed process may take to exit after its files are closed


def machine() -> str:
    """Return an identifier of the boot of this host and the pid namespace, in which pids are valid."""
    parts = []
    for path in (Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")):
        with contextlib.suppress(OSError):
            parts.append(str(path.readlink()) if path.is_symlink() else path.read_text().strip())
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:8]


def tag(pid: int) -> str:
    """Return a tag that identifies process `pid`. It includes the start time, because pids are reused."""
    fields = stat(pid)
    return f"hvdtrain-{machine()}-{pid}-{fields[19] if fields else 0}"


def owner(name: str) -> Process | None:
    """Return the process of the tag at the beginning of `name`; None if its pid is not valid on this machine."""
    found = re.match(r"hvdtrain-([0-9a-f]{8})-(\d+)-(\d+)(-|$)", name)
    return Process(int(found[2]), int(found[3]), "") if found and found[1] == machine() else None


def claim() -> None:
    """Tag the semaphores and sockets that multiprocessing will create in this process. Call it before they are created."""
    config = getattr(multiprocessing.current_process(), "_config", {})  # private; without it, nothing is removed later
    if "semprefix" in config:
        config["semprefix"] = "/" + tag(os.getpid())
    directory = Path(util.get_temp_dir())
    if len(os.fsencode(directory)) > LONGEST_SOCKETS:
        said = f"TMPDIR {tempfile.gettempdir()} is too long for the names of the input workers' sockets"
        raise UserError(f"{said}: set TMPDIR to a shorter one, such as /tmp, or use no workers")
    with contextlib.suppress(OSError):  # disk full: the directory is not removed later
        (directory / OWNER).write_text(tag(os.getpid()))


def sweep() -> None:
    """Remove semaphores and sockets whose owner has ended, except those of other users, hosts or containers."""
    for entry in own_entries(SEMAPHORES, "sem.hvdtrain-"):
        if has_ended(entry.name.removeprefix("sem.")):
            with contextlib.suppress(OSError):
                Path(entry.path).unlink(missing_ok=True)
    for entry in own_entries(Path(tempfile.gettempdir()), "hvdtrain-"):
        if has_ended(entry.name):
            shutil.rmtree(entry.path, ignore_errors=True)
    sweep_sockets()


def scratch(purpose: str) -> tempfile.TemporaryDirectory[str]:
    """Return a temporary directory of this process. If the process is killed, the next start on this host removes it."""
    return tempfile.TemporaryDirectory(prefix=f"{tag(os.getpid())}-{purpose}-")


def sweep_sockets() -> None:
    """Remove socket directories whose owner has ended."""
    for entry in own_entries(Path(tempfile.gettempdir()), "pymp-"):
        with contextlib.suppress(OSError):
            if entry.is_dir(follow_symlinks=False) and has_ended(
                files.read_small(Path(entry.path, OWNER), most=LONGEST_TAG, owner=os.geteuid()).decode(errors="replace")
            ):
                shutil.rmtree(entry.path, ignore_errors=True)


def own_entries(directory: Path, prefix: str) -> list[os.DirEntry[str]]:
    """Return what this user has in `directory` under a name that begins with `prefix`. Everybody may write there: what
    belongs to others is not opened."""
    found = []
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                if entry.name.startswith(prefix) and entry.stat(follow_symlinks=False).st_uid == os.geteuid():
                    found.append(entry)
    return found


def has_ended(name: str) -> bool:
    """Return whether `name` begins with the tag of a process of this machine that has ended."""
    process = owner(name)
    return process is not None and not lives(process)


def sweep_after(pid: int) -> None:
    """Wait until the rank `pid` has ended, then remove its sockets. Called in an input worker."""
    until = time.monotonic() + END_SECONDS
    while runs(pid) and time.monotonic() < until:
        time.sleep(0.01)
    sweep_sockets()
