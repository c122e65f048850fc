"""The fork server of `launch/*.sh --restarts`. It imports all modules once, and forks the ranks of every attempt.

python -m hvdtrain.engines.forking.server (-m MODULE | FILE) ARGUMENTS

The server prints its name. The launcher starts client.py for each rank, with that name in HVDTRAIN_FORK_SERVER. A rank gets
the standard streams, environment and working directory of its client, and has its own process group, as under mpirun. If a
client ends, its rank is killed. The server exits after the process that started it, once no rank is left.
It supports only programs that import hvdtrain, because these set their number of threads after the fork.
"""

import contextlib
import gc
import io
import json
import os
import secrets
import selectors
import signal
import socket
import struct
import sys
from typing import NamedTuple

from hvdtrain.engines import processes, program
from hvdtrain.engines.errors import UserError
from hvdtrain.engines.forking import leaving, preload
from hvdtrain.engines.forking.client import HANDED_ON, VARIABLE

LOOK_SECONDS = 1.0  # between two checks whether the parent process still runs
HELLO_SECONDS = 10.0  # time limit for a connected client to send its request
MOST_BYTES = 2**26  # limit for a client's environment and arguments


class Client(NamedTuple):
    """The client of a rank. pid: of the rank."""

    socket: socket.socket
    pid: int


class Place(NamedTuple):
    """The process state that a rank takes over from its client."""

    words: list[str]
    environment: dict[str, str]
    directory: str
    umask: int
    cores: list[int]
    ignored: list[int]  # ignored signals


def listen() -> socket.socket:
    """Return a listening abstract Unix socket with a random name."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    # An abstract socket leaves no file behind. Only the same user may connect (`receive`).
    listener.bind(f"\0hvdtrain-{os.getpid()}-{secrets.token_hex(8)}")
    listener.listen(4096)
    return listener


def serve(listener: socket.socket, starter: int) -> program.Program | None:
    """Fork ranks until the starter has ended. Returns None in the server, and the program in each rank."""
    ranks: dict[int, Client] = {}  # by pid
    wake, wake_end = socket.socketpair()
    wake.setblocking(False)
    wake_end.setblocking(False)
    signal.set_wakeup_fd(wake_end.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    with selectors.DefaultSelector() as selector:
        selector.register(wake, selectors.EVENT_READ)
        selector.register(listener, selectors.EVENT_READ)
        while ranks or os.getppid() == starter:
            for key, _ in selector.select(LOOK_SECONDS):
                if key.fileobj is wake:
                    with contextlib.suppress(BlockingIOError):
                        wake.recv(4096)
                elif key.fileobj is listener:
                    server = os.getpid()
                    client = fork(listener)
                    if isinstance(client, Place):
                        signal.set_wakeup_fd(-1)
                        for other in (wake, wake_end, listener, *(rank.socket for rank in ranks.values())):
                            other.close()
                        return become_rank(client, server)
                    if client is not None:
                        ranks[client.pid] = client
                        selector.register(client.socket, selectors.EVENT_READ, client.pid)
                elif key.data in ranks:  # the client is gone: kill its rank
                    selector.unregister(key.fileobj)
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.killpg(key.data, signal.SIGKILL)
            for pid, client in list(ranks.items()):
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    with contextlib.suppress(OSError):  # the client may be gone
                        client.socket.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))
                    with contextlib.suppress(KeyError):
                        selector.unregister(client.socket)
                    client.socket.close()
                    del ranks[pid]
    return None


def fork(listener: socket.socket) -> Client | Place | None:
    """Accept a connection and fork a rank for it.

    Returns the Client in the server, the Place in the rank, and None if the request was invalid or the fork failed.
    """
    connection, _ = listener.accept()
    streams: list[int] = []
    try:
        place = receive(connection, streams)
        pid = os.fork()
    except (OSError, ValueError, TypeError):
        connection.close()
        for stream in streams:
            os.close(stream)
        return None
    if pid == 0:
        os.setpgid(0, 0)
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        processes.PROXY[:] = [peer(connection)[0]]
        connection.close()
        return place
    with contextlib.suppress(OSError):  # the child may have done this itself, and may have exited
        os.setpgid(pid, pid)
    for stream in streams:
        os.close(stream)
    with contextlib.suppress(OSError):
        connection.sendall(b"%d\n" % pid)
    return Client(connection, pid)


def peer(connection: socket.socket) -> tuple[int, int]:
    """Return pid and user ID of the process at the other end of `connection`."""
    pid, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, user


def receive(connection: socket.socket, streams: list[int]) -> Place:
    """Return a client's request, and add its standard streams to `streams`. Raises OSError, ValueError or TypeError."""
    connection.settimeout(HELLO_SECONDS)
    if peer(connection)[1] != os.geteuid():
        raise PermissionError("another user")
    head, descriptors, _, _ = socket.recv_fds(connection, 8, 3)
    streams += descriptors
    while len(head) < 8 and (part := connection.recv(8 - len(head))):
        head += part
    length = int.from_bytes(head)
    if len(streams) != 3 or length > MOST_BYTES:
        raise ValueError("not a client's hello")
    body = bytearray()
    while len(body) < length and (part := connection.recv(length - len(body))):
        body += part
    place = Place(**json.loads(body))
    connection.settimeout(None)
    return place


def become_rank(place: Place, server: int) -> program.Program:
    """Take over the state of the client in this process, and return the program."""
    processes.end_with_parent(server, signal.SIGTERM)
    for number in HANDED_ON:
        signal.signal(number, signal.SIG_IGN if number in place.ignored else signal.SIG_DFL)
    if signal.SIGINT not in place.ignored:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(place.environment)
    os.chdir(place.directory)
    os.umask(place.umask)
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, place.cores)
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout, sys.stderr = stream(1, unbuffered), stream(2, unbuffered, errors="backslashreplace")
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # type: ignore[misc]
    preload.fresh_generators()
    gc.enable()
    return program.find(place.words)


def stream(number: int, unbuffered: bool, errors: str = "strict") -> io.TextIOWrapper:
    """Return a standard stream as the interpreter creates it at startup. number: the file descriptor."""
    made = open(number, "w", errors=errors, closefd=False)  # noqa: SIM115
    made.reconfigure(line_buffering=number == 2 or os.isatty(number), write_through=unbuffered)
    return made


def main() -> int:
    """Run the server. Returns its exit code; in a forked rank, runs the program and does not return.

    If it fails, its clients become the ranks themselves.
    """
    try:
        found, shared = import_and_serve()
    except UserError:  # no such program: each rank says so
        return 1
    except Exception as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())
        print(f"warning: --restarts: each rank imports torch by itself ({why})", file=sys.stderr, flush=True)
        return 1
    if found is None:
        return 0
    os.environ.pop(VARIABLE, None)
    leaving.run_and_leave(found, shared, lambda code: None)


def import_and_serve() -> tuple[program.Program | None, frozenset[str]]:
    """Return the program in a rank, None in the server at its end; and the modules that were imported before the fork."""
    starter, words = os.getppid(), sys.argv[1:]
    os.setpgid(0, 0)  # signals from the terminal are for the launcher
    for number in (signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    listener = listen()
    print(listener.getsockname()[1:].decode(), flush=True)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1):
        os.dup2(null, descriptor)
    os.close(null)
    gc.disable()
    source = program.source(program.find(words))
    if not any(name.split(".")[0] == "hvdtrain" for name in preload.modules_of(source)):
        return None, frozenset()
    preload.preload(source, ())
    preload.forget_finalizers()
    gc.freeze()  # the collector would write into pages that the ranks share
    shared = frozenset(sys.modules)
    return serve(listener, starter), shared


if __name__ == "__main__":
    sys.exit(main())
