"""Ask a forker (forker.py) for a rank. As a program, started by a launcher in place of a rank under --restarts:

HVDTRAIN_FORK_SERVER=NAME mpirun -np 2 python -m hvdtrain.launching.fork_client -m hvdtrain.mnist ...

It forwards signals to the rank and exits as the rank exits. Without a forker, it becomes the rank itself, as if it had been
started without the client. It imports few modules, because it is started for each rank and each restart.
"""

import contextlib
import json
import math
import os
import resource
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Mapping
from typing import NamedTuple, NoReturn

from hvdtrain.launching import import_timeout, startup

FORK_SERVER_VARIABLE = "HVDTRAIN_FORK_SERVER"  # the forker's name, an abstract Unix socket
HANDED_ON = (
    signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT,
)  # fmt: skip


class Request(NamedTuple):
    """The process state that a rank takes over from who asks for it, besides the standard streams."""

    words: list[str]  # the program, see `run_script.find_program`
    environment: dict[str, str]
    directory: str
    umask: int
    cores: list[int]
    ignored: list[int]  # ignored signals
    proxy: bool  # whether the asking process stands for the rank; else it is the rank's launcher


def fork_request(words: list[str], environment: Mapping[str, str], *, proxy: bool) -> Request:
    """Return a request for a rank with the state of this process."""
    # A process can only read its umask by setting another one.
    umask = os.umask(0)
    os.umask(umask)
    ignored = [int(number) for number in HANDED_ON if signal.getsignal(number) == signal.SIG_IGN]
    cores = sorted(os.sched_getaffinity(0))
    return Request(words, dict(environment), os.getcwd(), umask, cores, ignored, proxy)  # noqa: PTH109


def send(forker: socket.socket, asked: Request, streams: tuple[int, int, int] = (0, 1, 2)) -> None:
    """Send a request. The forker answers with lines: the pid of the rank, and, when it has ended, its exit code."""
    body = json.dumps(asked._asdict()).encode()
    socket.send_fds(forker, [len(body).to_bytes(8)], streams)
    forker.sendall(body)


def main() -> NoReturn:
    """Run the client, or become the rank if there is no forker."""
    import_timeout.report_start()
    startup.hear_signals()  # until there is a rank, as the imports of one without a forker do
    words = sys.argv[1:]
    name = os.environ.pop(FORK_SERVER_VARIABLE, None)
    # PMI_FD: the launchers of MPICH and Intel MPI use a file descriptor that only a child process inherits.
    if name and "PMI_FD" not in os.environ:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as forker, contextlib.suppress(OSError, ValueError):
            forker.settimeout(import_timeout.limit_seconds() or None)
            forker.connect(f"\0{name}")
            if peer(forker)[1] != os.geteuid():  # everybody can see the name, and take it when the forker has ended
                raise PermissionError("the forker is another user's")
            send(forker, fork_request(words, os.environ, proxy=True))
            answers = forker.makefile("rb", buffering=0)
            wait_for_answer(forker, import_timeout.limit_seconds() or math.inf)
            pid = int(answers.readline())  # ValueError: the forker has ended, or could not fork
            forker.settimeout(None)
            forward_signals(pid)
            wait_for_answer(forker)
            answer = answers.readline()
            end_as(int(answer) if answer.endswith(b"\n") else 1)  # 1: the forker was killed, which also ends its ranks
    os.execv(sys.executable, [sys.executable, *words])


def wait_for_answer(forker: socket.socket, limit: float = math.inf) -> None:
    """Return once there is one, or the end of the connection. Raises TimeoutError after `limit` seconds."""
    until = time.monotonic() + limit
    # In turns of a second: Python handles a signal that comes right before a call that waits when that returns, not before.
    while not select.select([forker], [], [], max(0.0, min(1.0, until - time.monotonic())))[0]:
        if time.monotonic() >= until:
            raise TimeoutError


def peer(connection: socket.socket) -> tuple[int, int]:
    """Return pid and user ID of the process at the other end of `connection`."""
    pid, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, user


def forward_signals(pid: int) -> None:
    """From now on, send signals that this process receives to the rank."""

    def forward(number: int, frame: object) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.kill(pid, number)

    for number in HANDED_ON:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, forward)


def end_as(code: int) -> NoReturn:
    """Exit with this code, or by the signal -code."""
    if code < 0:
        # The rank has already written a core dump, if enabled.
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
