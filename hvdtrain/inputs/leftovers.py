"""What a process leaves behind if it is killed: multiprocessing's named semaphores in /dev/shm and its sockets in TMPDIR.

Their names begin with the tag of their owner. Normally, the DataLoader workers, which outlive the rank for a moment, remove
the sockets, and multiprocessing's resource tracker removes the semaphores. If these are killed as well, the next start on
this host removes all.
"""

import contextlib
import functools
import hashlib
import multiprocessing
import os
import re
import shutil
import tempfile
from multiprocessing import util
from pathlib import Path

from hvdtrain.launching import processes

SEMAPHORES = Path("/dev/shm")
# A socket's name has at most 107 bytes: "/hvdtrain-MACHINE-PID-STARTED-abcdefgh/listener-abcdefgh" in the directory.
LONGEST_DIRECTORY = 107 - len("/hvdtrain-01234567-1234567-12345678901-abcdefgh/listener-abcdefgh")
SHORT_DIRECTORY = "/tmp"


@functools.cache
def machine() -> str:
    """Return an identifier of the boot of this host and the pid namespace, in which pids are valid."""
    return hashlib.sha256(processes.pid_space().encode()).hexdigest()[:8]


def tag(pid: int) -> str:
    """Return a tag that identifies process `pid`. It includes the start time, because pids are reused."""
    found = processes.stat(pid)
    return f"hvdtrain-{machine()}-{pid}-{found.started if found else 0}"


def owner_has_ended(name: str) -> bool:
    """Return whether `name` begins with the tag of a process of this machine that has ended."""
    found = re.match(r"hvdtrain-([0-9a-f]{8})-(\d+)-(\d+)(-|$)", name)
    if found is None or found[1] != machine():
        return False
    return not processes.runs(int(found[2]), int(found[3]))


def claim() -> None:
    """Tag the semaphores and sockets that multiprocessing will create for this process and its workers."""
    config = getattr(multiprocessing.current_process(), "_config", {})  # private; without it, nothing is removed later
    mine = tag(os.getpid())
    if config.get("semprefix") in (None, f"/{mine}"):
        return
    config["semprefix"] = f"/{mine}"
    directory = tempfile.mkdtemp(prefix=f"{mine}-", dir=directory_of_sockets())
    util.Finalize(None, shutil.rmtree, (directory, True), exitpriority=-100)  # as for a directory of its own
    config["tempdir"] = directory


def directory_of_sockets() -> str:
    """Return TMPDIR, unless the names of sockets would be too long there."""
    directory = tempfile.gettempdir()
    return directory if len(os.fsencode(directory)) <= LONGEST_DIRECTORY else SHORT_DIRECTORY


def remove_sockets() -> None:
    """Remove the sockets of the rank and its workers. Called in a DataLoader worker whose rank has ended."""
    directory = Path(util.get_temp_dir())
    if directory.name.startswith("hvdtrain-"):
        shutil.rmtree(directory, ignore_errors=True)


def sweep_leftovers() -> None:
    """Remove what belongs to processes of this machine that have ended."""
    sweep_directory(SEMAPHORES, "sem.")
    for directory in {tempfile.gettempdir(), directory_of_sockets()}:
        sweep_directory(Path(directory), "")


def sweep_directory(directory: Path, prefix: str) -> None:
    """Do this for one directory. prefix: stands before the tags."""
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                ended = entry.name.startswith(prefix) and owner_has_ended(entry.name.removeprefix(prefix))
                # Everybody may write to these directories: nothing of other users is touched, and no file is opened.
                if ended and entry.stat(follow_symlinks=False).st_uid == os.geteuid():
                    if entry.is_dir(follow_symlinks=False):
                        shutil.rmtree(entry.path)
                    else:
                        Path(entry.path).unlink()
