"""Processes and threads on this host, read from /proc: this one, the launcher of this rank, other ranks.

Not by psutil, whose import takes 30 ms in each rank, and which has neither namespaces nor the time slices of threads.
"""

import contextlib
import ctypes
import os
import re
import signal
from pathlib import Path
from typing import NamedTuple

from hvdtrain.engines.errors import UserError

PROC = Path("/proc")
TICK_SECONDS = 1.0 / os.sysconf("SC_CLK_TCK")
# Launchers, by the name of their executable or script. When one of them ends, the ranks that it started must end.
LAUNCHER_COMMANDS = re.compile(
    r"(mpirun|mpiexec|orterun|orted|prterun|prte|prted|prun|mpiexec\.hydra|hydra_pmi_proxy|hydra_bstrap_proxy|slurmstepd"
    r"|torchrun|horovodrun|slurm_script)(_wrapper|\.real)?"
)
WRAPPER_COMMANDS = re.compile(r"(mpirun|horovodrun)\.sh")  # only with --restarts; otherwise they exec the launcher
MODULES = re.compile(r"torch\.distributed\.(run|launch)|hvdtrain\.(benchmark|doctor|starter)|horovod\.runner\.launch")
MOST_ANCESTORS = 30
PR_SET_PDEATHSIG = 1  # <sys/prctl.h>
# In a forked rank, a pid: of its starter, or of the client that the launcher has started in its place.
starter: int | None = None
proxy: int | None = None


class Process(NamedTuple):
    """A process, identified by pid and start time (clock ticks since boot), because pids are reused."""

    pid: int
    started: int
    name: str


def require_proc() -> None:
    """Raise UserError without /proc of this PID namespace: mpirun ends without a word, or pids are another process's."""
    remedy = f"mount it (as root: mount -t proc proc {PROC})"
    if not (PROC / "self" / "stat").exists():
        raise UserError(f"no {PROC} here, which MPI and Horovod read: {remedy}", everywhere=True)
    if (PROC / "self").readlink() != Path(str(os.getpid())):
        raise UserError(f"{PROC} is another PID namespace's: {remedy}", everywhere=True)


class Stat(NamedTuple):
    """The state of a process or thread."""

    state: str  # R: runs or could, S: sleeps, D: waits for a device, T, t: stopped by a signal, a debugger, Z, X: has ended
    parent: int
    cpu_seconds: float
    started: int  # clock ticks since boot


class Turns(NamedTuple):
    """How the kernel has scheduled a thread so far."""

    cpu_seconds: float
    waiting_seconds: float  # ready to run, without a core; updated only after the wait
    slices: int  # time slices


def read_at_once(name: str) -> bytes:
    """Return a small file of /proc. Raises OSError."""
    # The watch reads two for each thread of its process, every second, with the lock of the interpreter: by pathlib, 150
    # threads took 12 ms, in which training stood still.
    handle = os.open(f"{PROC}/{name}", os.O_RDONLY)
    try:
        return os.read(handle, 4096)
    finally:
        os.close(handle)


def stat(which: int | str) -> Stat | None:
    """Return the state of a process, or of a thread ("PID/task/TID"); None if there is none."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        # The second field, the name of the command, may have spaces and parentheses: the last ")" ends it.
        # From the third field of proc(5) on. Trap: the kernel closes connections while the state is still R.
        fields = read_at_once(f"{which}/stat").rpartition(b")")[2].split()
        state = "X" if int(fields[6]) & 4 else fields[0].decode()  # PF_EXITING
        return Stat(state, int(fields[1]), (int(fields[11]) + int(fields[12])) * TICK_SECONDS, int(fields[19]))
    return None


def bytes_transferred(which: int | str) -> int:
    """Return the bytes that a process or thread has read and written; 0 if that is not known. Those on a disk count twice:
    by its calls, at their ends, and by the kernel, meanwhile."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        lines = (PROC / str(which) / "io").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines[:2] + lines[4:6])  # rchar, wchar; read_bytes, write_bytes
    return 0


def own_threads() -> list[int]:
    """Return the IDs of this process's threads; none if they cannot be read, as where all its files are open."""
    with contextlib.suppress(OSError), os.scandir(PROC / "self/task") as tasks:
        return [int(task.name) for task in tasks]
    return []


def turns(thread: int) -> Turns | None:
    """Return how a thread of this process was scheduled; None if it has ended, or the kernel does not say."""
    with contextlib.suppress(OSError, ValueError):
        running, waiting, slices = map(int, read_at_once(f"self/task/{thread}/schedstat").split())
        return Turns(running / 1e9, waiting / 1e9, slices)
    return None


def descendants(pid: int) -> list[int]:
    """Return the child processes of a process, theirs, and so on."""
    found: list[int] = []
    tasks: list[Path] = []
    with contextlib.suppress(OSError):  # this process may open no more files
        tasks += (PROC / str(pid) / "task").glob("*/children")
    for children in tasks:
        with contextlib.suppress(OSError, ValueError):
            found += [int(word) for word in children.read_text().split()]
    return found + [each for child in found for each in descendants(child)]


def marked(mark: bytes) -> list[int]:
    """Return the processes that have `mark` in their environment. A zombie has none."""
    found = []
    for path in PROC.glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            if mark in path.read_bytes():
                found.append(int(path.parent.name))
    return found


def command_line(pid: int) -> list[str]:
    """Return the words of a process's command line; none if they cannot be read."""
    with contextlib.suppress(OSError):
        return (PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")
    return []


def boot_id() -> str:
    """Return an identifier of the running kernel, until the next boot; "" if it is not known."""
    with contextlib.suppress(OSError):
        return (PROC / "sys/kernel/random/boot_id").read_text().strip()
    return ""


def pid_namespace() -> str:
    """Return an identifier of this process's pid namespace; unique to this process if it is not known."""
    with contextlib.suppress(OSError):
        return str((PROC / "self/ns/pid").readlink())
    return f"of {os.getpid()} alone"


def pid_space() -> str:
    """Return what a process of the same number is the same process within: the running kernel, and the pid namespace."""
    return f"{boot_id()} {pid_namespace()}"


def began() -> int:
    """Return the start time of this process, or of the starter that forked it, in clock ticks since boot."""
    found = stat(starter or proxy or os.getpid()) or stat(os.getpid())
    assert found is not None
    return found.started


def prctl(option: int, value: int) -> None:
    """Call prctl(2)."""
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def end_with_parent(parent: int, number: signal.Signals) -> None:
    """Have the kernel send the signal to this process when the thread of `parent` that started it ends. If it has ended
    already, exit."""
    prctl(PR_SET_PDEATHSIG, number)
    # The parent may have ended before prctl, and the kernel sends nothing for that.
    if os.getppid() != parent:
        os._exit(1)


def is_stopped(pid: int) -> bool:
    """Return whether the process is stopped by a signal or a debugger."""
    found = stat(pid)
    return found is not None and found.state in "Tt"


def runs(pid: int, started: int | None = None) -> bool:
    """Return whether there is a process of this number, and start time, that is no zombie."""
    if (found := stat(pid)) is None:
        return (PROC / str(pid)).exists()  # this process may open no more files
    return found.state not in "ZX" and started in (None, found.started)


def launcher_name(arguments: list[str]) -> str | None:
    """Return the name of the launcher that a command line runs, such as `torchrun`, `python .../torchrun` or
    `bash mpirun.sh`; None if it is not a launcher."""
    words = [Path(word.removesuffix(":")).name for word in arguments[:1]]  # slurmstepd writes "slurmstepd: [7.0]"
    words += [Path(words[0].split(":")[0]).name] if words else []
    for i, word in enumerate(arguments[1:], 1):
        if word == "-m" or not word.startswith("-"):  # the module or script that an interpreter runs
            first = i + (word == "-m")
            words += [Path(each).name for each in arguments[first : first + 1]]
            words += [f"hvdtrain.{each}" for each in arguments[first + 1 : first + 2] if words[-1] == "hvdtrain"]
            break
    interpreter = bool(words) and re.fullmatch(r"(python[0-9.]*|bash|sh|dash|env)", words[0])
    for word in words if interpreter else words[:2]:
        if LAUNCHER_COMMANDS.fullmatch(word) or MODULES.fullmatch(word):
            return word
        if WRAPPER_COMMANDS.fullmatch(word) and "--restarts" in arguments:
            return word
    return None


def launchers() -> list[Process]:
    """Return the processes from this one's parent up to its outermost launcher; empty if no launcher started it."""
    chain: list[Process] = []
    top = 0
    # The parent of a forked rank is the forker. Its client is what the launcher has started.
    found = stat(proxy or os.getpid())
    while found is not None and len(chain) < MOST_ANCESTORS and (parent := found.parent) > 1:
        found = stat(parent)
        if found is None:
            break
        name = launcher_name([word for word in command_line(parent) if word])
        chain.append(Process(parent, found.started, name or "process"))
        if name is not None:
            top = len(chain)
    # Processes above the launcher, such as a shell, may end while the job runs: nohup, setsid, a closed session.
    return chain[:top]


def parents() -> list[int]:
    """Return this process's parent, and what started that, up to the innermost launcher; the parent alone without one."""
    chain = launchers()
    innermost = next((i for i, process in enumerate(chain) if process.name != "process"), -1)
    return [os.getppid(), *(process.pid for process in chain[: innermost + 1])]
