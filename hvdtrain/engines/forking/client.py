"""The client of a fork server (server.py). A launcher starts it in place of a rank.

It sends its standard streams and environment to the server, which forks the rank. The client then forwards signals to the
rank and exits with its exit code.

HVDTRAIN_FORK_SERVER=NAME mpirun -np 2 python -m hvdtrain.engines.forking.client -m hvdtrain.mnist ...

Without a server, this process becomes the rank itself, as if it had been started without the client. It imports few modules,
because it is started for each rank and each restart.
"""

import contextlib
import json
import os
import resource
import signal
import socket
import sys
from typing import NoReturn

from hvdtrain.launching import import_timeout

VARIABLE = "HVDTRAIN_FORK_SERVER"  # the server's name, an abstract Unix socket
HANDED_ON = (
    signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT,
)  # fmt: skip


def main() -> NoReturn:
    """Run the client, or become the rank if there is no server."""
    import_timeout.report_start()
    words = sys.argv[1:]
    name = os.environ.pop(VARIABLE, None)
    # PMI_FD: the launchers of MPICH and Intel MPI use a file descriptor that only a child process inherits.
    if name and "PMI_FD" not in os.environ:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
            try:
                server.settimeout(import_timeout.limit_seconds() or None)
                server.connect(f"\0{name}")
                pid = hand_over(server, words)
                server.settimeout(None)
            except OSError:  # the server has ended, or hangs
                pid = None
            if pid is not None:
                stand_for(server, pid)
    os.execv(sys.executable, [sys.executable, *words])


def hand_over(server: socket.socket, words: list[str]) -> int | None:
    """Send this process's state to the server. Return the pid of the rank; None if the server ended. Raises OSError."""
    umask = os.umask(0)
    os.umask(umask)
    place = {
        "words": words,
        "environment": dict(os.environ),
        "directory": os.getcwd(),  # noqa: PTH109
        "umask": umask,
        "cores": sorted(os.sched_getaffinity(0)),
        "ignored": [int(number) for number in HANDED_ON if signal.getsignal(number) == signal.SIG_IGN],
    }
    body = json.dumps(place).encode()
    socket.send_fds(server, [len(body).to_bytes(8)], [0, 1, 2])
    server.sendall(body)
    said = server.makefile("rb", buffering=0).readline()
    return int(said) if said.endswith(b"\n") else None


def stand_for(server: socket.socket, pid: int) -> NoReturn:
    """Forward signals to the rank, and exit as it exits: with the same code, or by the same signal."""
    for number in HANDED_ON:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda number, frame: send(pid, number))
    said = server.makefile("rb", buffering=0).readline()
    code = int(said) if said.endswith(b"\n") else 1  # 1: the server was killed, which also ends its ranks
    if code < 0:
        # The rank has already written a core dump, if enabled.
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code if code >= 0 else 128 - code)


def send(pid: int, number: int) -> None:
    """Send a signal to the rank."""
    with contextlib.suppress(ProcessLookupError):  # it has just ended
        os.kill(pid, number)


if __name__ == "__main__":
    main()
