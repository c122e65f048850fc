"""Other processes on this host, read from /proc: the launcher of this rank, and other ranks."""

import contextlib
import ctypes
import os
import re
import signal
from pathlib import Path
from typing import NamedTuple

from hvdtrain.engines.errors import UserError

PROC = Path("/proc")
# Launchers, by the name of their executable or script. When one of them ends, the ranks that it started must end.
LAUNCHERS = re.compile(
    r"(mpirun|mpiexec|orterun|orted|prterun|prte|prted|prun|mpiexec\.hydra|hydra_pmi_proxy|hydra_bstrap_proxy|slurmstepd"
    r"|torchrun|horovodrun|slurm_script)(_wrapper|\.real)?"
)
WRAPPERS = re.compile(r"(mpirun|horovodrun)\.sh")  # only with --restarts; otherwise they exec the launcher
MODULES = re.compile(r"torch\.distributed\.(run|launch)|hvdtrain\.(scaling|doctor|starter)|horovod\.runner\.launch")
MOST_ANCESTORS = 30
PR_SET_PDEATHSIG = 1  # <sys/prctl.h>
STARTERS: list[int] = []  # in a forked rank: the pid of its starter
PROXY: list[int] = []  # in a rank of a fork server: the pid of the client that the launcher started in its place


class Process(NamedTuple):
    """A process, identified by pid and start time (clock ticks since boot), because pids are reused."""

    pid: int
    started: int
    name: str


def require_proc(proc: Path = PROC) -> None:
    """Raise UserError without /proc of this PID namespace: mpirun ends without a word, or pids are another process's."""
    how = f"mount it (as root: mount -t proc proc {proc})"
    if not (proc / "self" / "stat").exists():
        raise UserError(f"no {proc} here, which MPI and Horovod read: {how}", everywhere=True)
    if (proc / "self").readlink() != Path(str(os.getpid())):
        raise UserError(f"{proc} is another PID namespace's: {how}", everywhere=True)


def stat(pid: int, proc: Path = PROC) -> list[str] | None:
    """Return the fields of /proc/PID/stat from the third on (state, parent, ...); None if there is no such process."""
    with contextlib.suppress(OSError, IndexError):
        fields = (proc / str(pid) / "stat").read_text().rpartition(")")[2].split()
        return fields if len(fields) > 19 else None
    return None


def began(proc: Path = PROC) -> int:
    """Return the start time of this process, or of the starter that forked it, in clock ticks since boot."""
    fields = stat((STARTERS or PROXY or [os.getpid()])[0], proc) or stat(os.getpid(), proc)
    assert fields is not None
    return int(fields[19])


def prctl(option: int, value: int) -> None:
    """Call prctl(2)."""
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def end_with_parent(parent: int, number: signal.Signals) -> None:
    """Have the kernel send the signal to this process when the thread of `parent` that started it ends. If that has
    happened already, exit."""
    prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(1)


def is_stopped(pid: int, proc: Path = PROC) -> bool:
    """Return whether the process is stopped by a signal or a debugger."""
    fields = stat(pid, proc)
    return fields is not None and fields[0] in "Tt"


def runs(pid: int, proc: Path = PROC) -> bool:
    """Return whether there is a process of this number that is no zombie."""
    fields = stat(pid, proc)
    return fields is not None and fields[0] not in "ZX"


def lives(process: Process, proc: Path = PROC) -> bool:
    """Return whether the process still runs. A zombie does not."""
    fields = stat(process.pid, proc)
    return fields is not None and fields[0] not in "ZX" and int(fields[19]) == process.started


def launcher_name(arguments: list[str]) -> str | None:
    """Return the name of the launcher that a command line runs, such as `torchrun`, `python .../torchrun` or
    `bash mpirun.sh`; None if it is not a launcher."""
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
    """Return the processes from this one's parent up to its outermost launcher; empty if no launcher started it.

    Processes above the launcher, such as a shell, are left out: they may end normally while the job runs (nohup, setsid, a
    closed session).
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
