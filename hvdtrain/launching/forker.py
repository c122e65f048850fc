"""The process that imports torch, Horovod and the modules in the program's import statements once, and forks ranks from
then on. Of the program's modules, those are imported that are known to be safe before a fork; a rank imports the others.

hvdtrain.starter --local-ranks     forks it (`start_forker`), and asks it for each rank of this host (supervisor.py)
launch/*.sh --restarts             starts it; a client in place of each rank asks it, in every attempt (fork_client.py):

    python -m hvdtrain.launching.forker (-m MODULE | FILE) ARGUMENTS

The latter prints the name of its socket, and exits after the process that started it, once no rank is left. It supports only
programs that import hvdtrain. Who asks connects to the socket once for each rank, sends a `Request`, and is answered with
lines: the rank's pid, and its exit code once it has ended.

A fork copies only the calling thread. Therefore this process has one thread, and uses neither MPI, CUDA nor OpenMP. A rank
has its own process group, and ends when this process ends.
"""

import ast
import contextlib
import gc
import importlib
import io
import json
import os
import selectors
import signal
import socket
import sys
import weakref
from collections.abc import Collection, Sequence
from typing import NamedTuple, NoReturn, TextIO

from hvdtrain.engines.errors import UserError
from hvdtrain.engines.lines import warn
from hvdtrain.launching import exit_codes, import_timeout, processes, run_script
from hvdtrain.launching.fork_client import FORK_SERVER_VARIABLE, HANDED_ON, Request, peer
from hvdtrain.launching.signal_socket import SignalSocket

CHILD_CHECK_SECONDS = 1.0  # between two checks whether the parent process still runs
FORK_REQUEST_SECONDS = 10.0  # time limit for a connected client to send its request
MOST_REQUEST_BYTES = 2**26  # limit for a client's environment and arguments
FAILED, REFUSED = b"failed", b"refused"  # answers to the starter, besides pid and exit code
# Packages whose import starts no thread, and touches neither MPI nor a GPU.
SAFE = {"PIL", "horovod", "hvdtrain", "numpy", "safetensors", "torch", "torchvision"}
FIRST_IMPORTS = ("torch", "horovod.torch")
# Modules that hvdtrain's programs import later.
OF_HVDTRAIN = ("hvdtrain.engines.horovod", "hvdtrain.datasets.mnist_data")
OF_OPTIMIZERS = "torch._dynamo"  # which torch imports for the first optimizer: it takes as long as torch itself


class Rank(NamedTuple):
    """A running rank, and the connection to who asked for it."""

    pid: int
    connection: socket.socket
    request: Request


class Forker(NamedTuple):
    """The starter's handle of its forker."""

    pid: int
    address: bytes  # of its socket
    imported: int  # file descriptor of a pipe, to which it writes after the import


def start_forker(
    words: list[str], ranks: int, asked: Sequence[str], oversubscribe: bool, import_seconds: float
) -> Forker:
    """Fork a forker for `ranks` ranks, and return its handle; in the ranks, this does not return.

    words: the program, see `run_script.find_program`. asked: modules to import in addition to those found in the program.
    import_seconds: time limit of the import; 0: none. Raises UserError in the forker if there is no such program, or there
    are more ranks than GPUs.
    """
    starter, listener = os.getpid(), listen_for_requests()
    imported, done = os.pipe()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # until the forker is set up
    try:
        pid = os.fork()
    except BlockingIOError as error:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        remedy = "end some, raise `ulimit -u`, or use fewer ranks"
        raise UserError(f"this user may have no more processes and threads: {remedy}") from error
    if pid != 0:
        with contextlib.suppress(OSError):  # the child may have done this itself, and may have exited
            os.setpgid(pid, pid)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.close(done)
        with listener:
            return Forker(pid, listener.getsockname(), imported)
    leave_terminal()  # its signals reach only the starter, which forwards them to the ranks once
    # They may be sent to every process of the job, as systemd and Slurm do: what they mean is the starter's to say.
    for number in HANDED_ON:
        signal.signal(number, signal.SIG_IGN)
    processes.end_with_parent(starter, signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    os.close(imported)
    remedy = "look at the file system that Python is on, or raise --start-timeout"
    message = f"hvdtrain.starter: error: its modules were not imported within {import_seconds:.0f} s: {remedy}"
    with import_timeout.limited(import_seconds, message):
        program = run_script.find_program(words)
        import_once(run_script.source(program), asked)
    if not oversubscribe and reduces_on_gpus():
        from hvdtrain.engines import gpu  # imports torch, which is imported by now

        gpu.refuse_too_many_for_gpus(ranks, gpu.gpus_here(os.environ))
    os.write(done, b".")
    os.close(done)
    serve_forks(listener, starter, program)  # read once: it may be a pipe, as of `<(cat train.py)`
    os._exit(0)


def leave_terminal() -> None:
    """Enter a process group of its own, which is in the background of the terminal, if there is one."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # else writing stops the process, after `stty tostop`


def listen_for_requests() -> socket.socket:
    """Return the socket at which a forker is asked for ranks."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    # An abstract socket leaves no file behind. Only the same user may connect (`receive`).
    listener.bind(f"\0hvdtrain-{os.getpid()}-{os.urandom(8).hex()}")
    # The ranks of a host ask at once.
    listener.listen(4096)
    return listener


def main() -> int:
    """Run the forker of --restarts. Returns its exit code; in a rank, this does not return.

    If it fails, its clients become the ranks themselves.
    """
    starter, words = os.getppid(), sys.argv[1:]
    leave_terminal()  # its signals are for the launcher
    for number in (signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    listener = listen_for_requests()
    print(listener.getsockname()[1:].decode(), flush=True)  # noqa: T201 (to the wrapper, which waits for it)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1):
        os.dup2(null, descriptor)
    os.close(null)
    try:
        source = run_script.source(run_script.find_program(words))
        # Programs that import hvdtrain set their number of threads after the fork. Others would keep this process's.
        if not any(name.split(".")[0] == "hvdtrain" for name in modules_of(source)):
            return 0
        import_once(source, ())
    except UserError:  # no such program: each rank says so
        return 1
    except Exception as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())
        warn(f"--restarts: each rank imports torch by itself ({why})")
        return 1
    serve_forks(listener, starter)
    os._exit(0)


def reduces_on_gpus() -> bool:
    """Return whether torch and Horovod are built for GPUs. Does not initialize CUDA."""
    torch, hvd = sys.modules.get("torch"), sys.modules.get("horovod.torch")
    return torch is not None and torch.version.cuda is not None and hvd is not None and bool(hvd.nccl_built())


def serve_forks(listener: socket.socket, starter: int, program: run_script.Program | None = None) -> None:
    """Fork a rank for each connection. Returns once the starter has ended and no rank is left; not in the ranks.

    program: of all ranks; None: each rank reads what it is asked for, which may have been changed between two attempts.
    """
    ranks: dict[int, Rank] = {}  # by pid
    signals = SignalSocket()
    signals.listen([signal.SIGCHLD])
    with selectors.DefaultSelector() as selector:
        selector.register(signals.socket, selectors.EVENT_READ)
        selector.register(listener, selectors.EVENT_READ)
        while ranks or os.getppid() == starter:
            for key, _ in selector.select(CHILD_CHECK_SECONDS):
                if key.fileobj is signals.socket:
                    signals.received()
                elif key.fileobj is listener:
                    connections = [rank.connection for rank in ranks.values()]
                    if rank := fork(listener.accept()[0], [signals, listener, *connections], program):
                        ranks[rank.pid] = rank
                        selector.register(rank.connection, selectors.EVENT_READ, rank)
                else:  # who asked for this rank is gone
                    selector.unregister(key.fileobj)
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        if key.data.request.proxy:
                            os.killpg(key.data.pid, signal.SIGKILL)
                        else:
                            os.kill(key.data.pid, signal.SIGTERM)
            ended = [(exit_code(rank.pid), rank) for rank in ranks.values() if child_has_ended(rank.pid)]
            for code, rank in sorted(ended, key=lambda end: (end[0] >= 0, end[0] != 1)):  # killed, failed, others
                del ranks[rank.pid]
                with contextlib.suppress(KeyError):  # who asked for it is gone
                    selector.unregister(rank.connection)
                tell(rank.connection, b"%d" % code)
                rank.connection.close()


def child_has_ended(pid: int) -> bool:
    """Return whether a child process has ended. If it has failed, kill what it leaves behind, such as DataLoader workers."""
    # WNOWAIT leaves a zombie, so that its pid, which is also its process group, is not reused.
    ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if ended is not None and (ended.si_code != os.CLD_EXITED or ended.si_status != 0):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
    return ended is not None


def exit_code(pid: int) -> int:
    """Return the exit code of a child process that has ended; negative: the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def tell(connection: socket.socket, line: bytes) -> None:
    """Send a line to who asked for a rank."""
    with contextlib.suppress(OSError):  # gone
        connection.sendall(line + b"\n")


def fork(
    connection: socket.socket, others: Sequence[socket.socket | SignalSocket], program: run_script.Program | None
) -> Rank | None:
    """Fork the rank that is asked for over `connection`. Returns None if the request was invalid or the fork failed.

    others: sockets that the rank does not need. Does not return in the rank.
    """
    streams: list[int] = []
    forker, pid, mask = os.getpid(), None, signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        asked = receive(connection, streams)
        signal.pthread_sigmask(signal.SIG_BLOCK, HANDED_ON)  # for the rank: until it does not ignore them as its forker
        pid = os.fork()
    except (OSError, ValueError, TypeError) as error:
        tell(connection, REFUSED + f" {getattr(error, 'strerror', '')}".encode())
        connection.close()
    if pid == 0:
        for other in others:
            other.close()
        become_rank(connection, asked, streams, forker, program, mask)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    for stream in streams:
        os.close(stream)
    if pid is None:
        return None
    with contextlib.suppress(OSError):  # the child may have done this itself, and may have exited
        os.setpgid(pid, pid)
    tell(connection, b"%d" % pid)
    return Rank(pid, connection, asked)


def receive(connection: socket.socket, streams: list[int]) -> Request:
    """Return a request, and add its standard streams to `streams`. Raises OSError, ValueError or TypeError."""
    connection.settimeout(FORK_REQUEST_SECONDS)
    # The name of an abstract socket is in /proc/net/unix, and has no file rights: every user of the host can connect.
    if peer(connection)[1] != os.geteuid():
        raise PermissionError("another user")
    head, descriptors, _, _ = socket.recv_fds(connection, 8, 3)
    streams += descriptors
    while len(head) < 8 and (part := connection.recv(8 - len(head))):
        head += part
    length = int.from_bytes(head)
    if len(streams) != 3 or length > MOST_REQUEST_BYTES:
        raise ValueError("not a client's hello")
    body = bytearray()
    while len(body) < length and (part := connection.recv(length - len(body))):
        body += part
    asked = Request(**json.loads(body))
    connection.settimeout(None)
    return asked


def become_rank(
    connection: socket.socket, asked: Request, streams: Sequence[int], forker: int, program: run_script.Program | None,
    mask: Collection[int],
) -> NoReturn:  # fmt: skip
    """Take over the state of who asked for the rank, and run the program. mask: the signals that it blocks."""
    leave_terminal()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    # A program that handles SIGTERM can still save a checkpoint.
    processes.end_with_parent(forker, signal.SIGTERM)
    asker = peer(connection)[0]
    processes.starter, processes.proxy = (None, asker) if asked.proxy else (asker, None)
    for number in HANDED_ON:
        signal.signal(number, signal.SIG_IGN if number in asked.ignored else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    if signal.SIGINT not in asked.ignored:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(asked.environment)
    os.environ.pop(FORK_SERVER_VARIABLE, None)
    os.chdir(asked.directory)
    os.umask(asked.umask)
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, asked.cores)
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    like = (sys.stdin, sys.stdout, sys.stderr)
    sys.stdin, sys.stdout, sys.stderr = (stream_of(number, like[number], unbuffered) for number in range(3))
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # type: ignore[misc] # they are Final
    if "numpy" in sys.modules:  # else its global generator would be the same in all ranks. (Python reseeds its own.)
        sys.modules["numpy"].random.seed()
    gc.enable()
    if asked.proxy:  # it has no use for the message, and must notice when this connection is closed
        connection.close()
    try:
        program = program or run_script.find_program(asked.words)
    except UserError as error:
        exit_codes.end_with(error)
    run_script.run_rank(program, lambda code: tell(connection, FAILED + b" %d" % code))


def stream_of(number: int, like: TextIO | None, unbuffered: bool) -> io.TextIOWrapper:
    """Return a standard stream as the interpreter creates it at startup. number: the file descriptor. like: that of this
    process, whose encoding is by the locale, PYTHONIOENCODING and others; None if it was closed."""
    encoding, errors = getattr(like, "encoding", None), getattr(like, "errors", "backslashreplace")
    made = open(number, "w" if number else "r", encoding=encoding, errors=errors, closefd=False)  # noqa: SIM115
    # Trap: `write_through` alone fills the buffer below the text, which a killed rank loses. And lines stay whole.
    lines = unbuffered or number == 2 or os.isatty(number)
    made.reconfigure(line_buffering=lines, write_through=unbuffered)
    return made


# ---- what the ranks share


def import_once(source: str, asked: Sequence[str]) -> None:
    """Import what the ranks of a program with this `source` share. asked: modules to import, too."""
    run_script.prepare_exit()
    gc.disable()
    preload(source, asked)
    # Turn off the exit handlers of what is imported by now, so that the ranks do not run them. torch registers hundreds of
    # them, which would copy 28 MB of shared pages in each rank.
    for each in gc.get_objects():
        if type(each) is weakref.finalize:
            each.atexit = False
    gc.freeze()  # the garbage collector would write to memory pages that the ranks share


def modules_of(source: str) -> list[str]:
    """Return the safe modules in the top-level import statements of `source`, in their order.

    For `from a import b`, the list has both a and a.b, which may be a module.
    """
    found: list[str] = []
    for statement in ast.parse(source).body:
        if isinstance(statement, ast.Import):
            found += [alias.name for alias in statement.names]
        elif isinstance(statement, ast.ImportFrom) and statement.level == 0 and statement.module:
            found += [statement.module, *(f"{statement.module}.{alias.name}" for alias in statement.names)]
    return [name for name in dict.fromkeys(found) if name.split(".")[0] in SAFE]


def preload(source: str, asked: Sequence[str]) -> None:
    """Import the modules that a program with this `source` imports, and those in `asked`.

    Raises UserError if a module in `asked` cannot be imported, or an import is not safe before a fork.
    """
    # torch.cuda.is_available() then asks NVML, as device_count() does. CUDA's own answer would keep CUDA from the ranks.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    with contextlib.suppress(ImportError):
        import numpy  # noqa: F401 - its OpenBLAS starts threads, and handles forks itself
    allowed = len(processes.own_threads())
    wanted = [*FIRST_IMPORTS, *modules_of(source)]
    if any(name.startswith("hvdtrain.") for name in wanted):
        wanted += OF_HVDTRAIN
    if "hvdtrain.training" in wanted:
        wanted.append(OF_OPTIMIZERS)
    for name in wanted:
        _load(name)  # ignore errors: each rank will report them itself
    _check(allowed, "what the program imports")
    for name in asked:
        if error := _load(name):
            raise UserError(f"--import {name} cannot be imported: {type(error).__name__}: {error}", everywhere=True)
        _check(allowed, f"--import {name}")


def _load(name: str) -> Exception | None:
    parent, _, attribute = name.rpartition(".")
    if parent in sys.modules and hasattr(sys.modules[parent], attribute):
        return None
    try:
        importlib.import_module(name)
    except Exception as error:
        return error
    return None


def _check(allowed: int, what: str) -> None:
    """Raise UserError if importing `what` did something that does not survive a fork. allowed: number of threads."""
    done = []
    # A fork copies only the calling thread: what another one had locked stays locked for ever.
    if len(processes.own_threads()) > allowed:
        done.append("starts threads")
    torch = sys.modules.get("torch")
    if torch is not None and (torch.cuda.is_initialized() or _keeps_cuda_from_ranks()):
        done.append("starts CUDA")
    if "mpi4py.MPI" in sys.modules:
        done.append("starts MPI")
    if done:
        remedy = "leave it out" if what.startswith("--") else "leave --local-ranks out"
        raise UserError(f"{what} {' and '.join(done)}, which does not survive a fork: {remedy}", everywhere=True)


def _keeps_cuda_from_ranks() -> bool:
    """Return whether a rank that is forked now could not use this host's GPUs."""
    import torch

    from hvdtrain.engines import gpu

    if not gpu.gpus_here(os.environ):
        return False
    # torch notes that CUDA was in use in a handler of fork, which only the child runs.
    if (pid := os.fork()) == 0:
        os._exit(int(torch.cuda._is_in_bad_fork()))
    return os.waitpid(pid, 0)[1] != 0


if __name__ == "__main__":
    sys.exit(main())
