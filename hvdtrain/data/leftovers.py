"""What multiprocessing leaves behind if a rank is killed: named semaphores in /dev/shm, a directory of sockets in TMPDIR.

Both say whose they are. The sockets go with their owner, by its input workers, which outlive it for a moment, and so do the
semaphores, by multiprocessing's own tracker. Where those are killed as well, the next start on this host removes both.
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

from hvdtrain.engines.processes import Process, lives, stat

SEMAPHORES = Path("/dev/shm")
OWNER = "hvdtrain-owner"  # a file in a directory of sockets
END_SECONDS = 2.0  # from closing its files to its end, for a process that was killed


def machine() -> str:
    """Return what process numbers are numbers of: this boot of this host, and this container's processes."""
    parts = []
    for path in (Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")):
        with contextlib.suppress(OSError):
            parts.append(str(path.readlink()) if path.is_symlink() else path.read_text().strip())
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:8]


def tag(pid: int) -> str:
    """Return the name of process `pid`, for its whole life."""
    fields = stat(pid)
    return f"hvdtrain-{machine()}-{pid}-{fields[19] if fields else 0}"


def owner(name: str) -> Process | None:
    """Return the process whose tag `name` begins with; None where that cannot be looked up from here."""
    found = re.match(r"hvdtrain-([0-9a-f]{8})-(\d+)-(\d+)(-|$)", name)
    return Process(int(found[2]), int(found[3]), "") if found and found[1] == machine() else None


def claim() -> None:
    """Give what multiprocessing will make in this process its name; call it before anything is made."""
    config = getattr(
        multiprocessing.current_process(), "_config", {}
    )  # multiprocessing's own; without it, nothing is swept
    if "semprefix" in config:
        config["semprefix"] = "/" + tag(os.getpid())
    directory = Path(util.get_temp_dir())
    with contextlib.suppress(OSError):  # a full disk: then it is not swept
        (directory / OWNER).write_text(tag(os.getpid()))


def sweep() -> None:
    """Remove what no living process owns. What belongs to another user, host or container is left alone."""
    for path in SEMAPHORES.glob("sem.hvdtrain-*"):
        with contextlib.suppress(OSError):
            process = owner(path.name.removeprefix("sem."))
            if process is not None and not lives(process) and path.stat().st_uid == os.getuid():
                path.unlink(missing_ok=True)
    sweep_sockets()


def sweep_sockets() -> None:
    for path in Path(tempfile.gettempdir()).glob(f"pymp-*/{OWNER}"):
        with contextlib.suppress(OSError):
            process = owner(path.read_text())
            if process is not None and not lives(process) and path.parent.stat().st_uid == os.getuid():
                shutil.rmtree(path.parent, ignore_errors=True)


def sweep_after(pid: int) -> None:
    """In an input worker that has seen the end of its rank begin: wait for it, then remove its sockets."""
    until = time.monotonic() + END_SECONDS
    while (fields := stat(pid)) is not None and fields[0] not in "ZX" and time.monotonic() < until:
        time.sleep(0.01)
    sweep_sockets()
