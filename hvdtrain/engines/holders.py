"""Who writes to a directory: the last run that began there, as noted in its lock file.

On some network file systems, locks do not tell: there are none, or other hosts do not see them.
"""

import contextlib
import json
import os
import secrets
import socket
from pathlib import Path
from typing import NamedTuple

from hvdtrain.launching import processes


class Holder(NamedTuple):
    """One lock of a process. place: boot and pid namespace, within which pids can be compared. started: ticks since boot."""

    host: str
    place: str
    pid: int
    started: int
    token: str

    def runs(self) -> bool:
        """Return whether the process is known to run. One of another host, or of another container, is not."""
        process = processes.stat(self.pid) if self.place == here() else None
        return process is not None and process.state not in "ZX" and process.started == self.started


def here() -> str:
    """Return the place of this process."""
    return f"{processes.boot_id()} {processes.pid_namespace()}"


def myself() -> Holder:
    """Return a new holder of this process."""
    own = processes.stat(os.getpid())
    return Holder(socket.gethostname(), here(), os.getpid(), own.started if own else 0, secrets.token_hex(8))


def note(handle: int, holder: Holder | None) -> None:
    """Write who holds the lock into its open file. None: nobody. Raises OSError."""
    os.ftruncate(handle, 0)
    if holder is not None:
        os.pwrite(handle, json.dumps(holder).encode(), 0)


def noted(path: Path) -> Holder | None:
    """Return who is noted; None if nobody is, or if it cannot be read."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        host, place, pid, started, token = json.loads(path.read_bytes()[:10_000])
        return Holder(str(host), str(place), int(pid), int(started), str(token))
    return None
