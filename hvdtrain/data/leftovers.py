"""Removes what multiprocessing leaves behind if a rank is killed: named semaphores in /dev/shm, and sockets in TMPDIR.

Both are tagged with their owner. Normally, the input workers, which outlive the rank for a moment, remove the sockets, and
multiprocessing's resource tracker removes the semaphores. If these are killed as well, the next start on this host removes
both.
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

from hvdtrain.launching.processes import Process, lives, stat

SEMAPHORES = Path("/dev/shm")
OWNER = "hvdtrain-owner"  # file with the owner's tag in a directory of sockets
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
    with contextlib.suppress(OSError):  # disk full: the directory is not removed later
        (directory / OWNER).write_text(tag(os.getpid()))


def sweep() -> None:
    """Remove semaphores and sockets whose owner has ended, except those of other users, hosts or containers."""
    for path in SEMAPHORES.glob("sem.hvdtrain-*"):
        with contextlib.suppress(OSError):
            process = owner(path.name.removeprefix("sem."))
            if process is not None and not lives(process) and path.stat().st_uid == os.getuid():
                path.unlink(missing_ok=True)
    sweep_sockets()


def sweep_sockets() -> None:
    """Remove socket directories whose owner has ended."""
    for path in Path(tempfile.gettempdir()).glob(f"pymp-*/{OWNER}"):
        with contextlib.suppress(OSError):
            process = owner(path.read_text())
            if process is not None and not lives(process) and path.parent.stat().st_uid == os.getuid():
                shutil.rmtree(path.parent, ignore_errors=True)


def sweep_after(pid: int) -> None:
    """Wait until the rank `pid` has ended, then remove its sockets. Called in an input worker."""
    until = time.monotonic() + END_SECONDS
    while (fields := stat(pid)) is not None and fields[0] not in "ZX" and time.monotonic() < until:
        time.sleep(0.01)
    sweep_sockets()
