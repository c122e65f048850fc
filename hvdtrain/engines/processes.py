"""Other processes of this host, from /proc: the launcher of this rank, and the other ranks."""

import contextlib
import os
import re
from pathlib import Path
from typing import NamedTuple

PROC = Path("/proc")
# Programs whose end must end the ranks that they started, by the name of their executable or script.
LAUNCHERS = re.compile(
    r"(mpirun|mpiexec|orterun|orted|prterun|prte|prted|prun|mpiexec\.hydra|hydra_pmi_proxy|hydra_bstrap_proxy|slurmstepd"
    r"|torchrun|horovodrun|slurm_script)(_wrapper|\.real)?"
)
WRAPPERS = re.compile(r"(mpirun|horovodrun)\.sh")  # with --restarts; without, they become the launcher
MODULES = re.compile(r"torch\.distributed\.(run|launch)|hvdtrain\.(scaling|doctor|starter)|horovod\.runner\.launch")
MOST_ANCESTORS = 30
STARTERS: list[int] = []  # in a rank that was forked: the number of its starter
PROXY: list[int] = []  # in a rank of a fork server: the number of the client that the launcher has started in its place


class Process(NamedTuple):
    """One process for its whole life: another may get its number later, but not its start (clock ticks since boot)."""

    pid: int
    started: int
    name: str


def stat(pid: int, proc: Path = PROC) -> list[str] | None:
    """Return the fields of /proc/PID/stat from the third (state, parent, ...); None where there is no such process."""
    with contextlib.suppress(OSError, IndexError):
        fields = (proc / str(pid) / "stat").read_text().rpartition(")")[2].split()
        return fields if len(fields) > 19 else None
    return None


def began(proc: Path = PROC) -> int:
    """Return when this process began, in clock ticks since boot; where a starter has forked it, when that began."""
    fields = stat((STARTERS or PROXY or [os.getpid()])[0], proc) or stat(os.getpid(), proc)
    assert fields is not None
    return int(fields[19])


def is_stopped(pid: int, proc: Path = PROC) -> bool:
    fields = stat(pid, proc)
    return fields is not None and fields[0] in "Tt"


def lives(process: Process, proc: Path = PROC) -> bool:
    """Tell whether it has not ended. Who has, and was not waited for by its parent yet, has."""
    fields = stat(process.pid, proc)
    return fields is not None and fields[0] not in "ZX" and int(fields[19]) == process.started


def launcher_name(arguments: list[str]) -> str | None:
    """Return the launcher's name where a command line is one's: `torchrun`, `python .../torchrun`, `bash mpirun.sh`, ..."""
    words = [Path(word.removesuffix(":")).name for word in arguments[:1]]  # slurmstepd writes "slurmstepd: [7.0]"
    words += [Path(words[0].split(":")[0]).name] if words else []
    for i, word in enumerate(arguments[1:], 1):
        if word == "-m":
            words += arguments[i + 1 : i + 2]
            break
        if not word.startswith("-"):  # the script that an interpreter runs
            words.append(Path(word).name)
            break
    interpreter = bool(words) and re.fullmatch(r"(python[0-9.]*|bash|sh|dash|env)", words[0])
    for word in words if interpreter else words[:2]:
        if LAUNCHERS.fullmatch(word) or MODULES.fullmatch(word):
            return word
        if WRAPPERS.fullmatch(word) and "--restarts" in arguments:
            return word
    return None


def launchers(pid: int | None = None, proc: Path = PROC) -> list[Process]:
    """Return the processes from this one's parent up to its topmost launcher; none where no launcher started it.

    Only these: the shell above them may end in good order (nohup, setsid, a session that is closed), and so may what
    started a process without being a launcher.
    """
    chain: list[Process] = []
    top = 0
    fields = stat((PROXY or [os.getpid()])[0] if pid is None else pid, proc)
    while fields is not None and len(chain) < MOST_ANCESTORS and (parent := int(fields[1])) > 1:
        fields = stat(parent, proc)
        if fields is None:
            break
        try:
            words = (proc / str(parent) / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            words = []
        name = launcher_name([word for word in words if word])
        chain.append(Process(parent, int(fields[19]), name or "process"))
        if name is not None:
            top = len(chain)
    return chain[:top]
