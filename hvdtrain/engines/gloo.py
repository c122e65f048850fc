"""What Gloo needs of a host, checked before Horovod starts: it would crash."""

import contextlib
import os
import socket
from collections.abc import Mapping
from pathlib import Path

from hvdtrain.engines import files
from hvdtrain.engines.errors import UserError

GLOO_SIZES = ("SIZE", "LOCAL_SIZE", "CROSS_SIZE")  # of the groups in which Gloo connects every rank with every other
GLOO_SPARE_FILES = 16  # open files besides Gloo's connections: the watchdog's, metrics, checkpoints
SERVER_SECONDS = 30.0  # for the rendezvous server to accept a connection


def refuse_unknown_own_name(name: str) -> None:
    """Raise UserError where the host's own `name` has no address of this host: Gloo looks it up, and crashes without one."""
    try:
        addresses = socket.getaddrinfo(
            os.fsencode(name), None, type=socket.SOCK_STREAM
        )  # bytes: any name that a host may have
    except OSError:
        remedy = f"add `127.0.0.1 {name}` to /etc/hosts (podman run --add-host {name}:127.0.0.1)"
        raise UserError(f"this host's own name {name} does not resolve, and Gloo needs it: {remedy}") from None
    for family, kind, _, _, address in addresses:
        with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
            probe.bind(address)
            return
    message = f"this host's own name {name} resolves to {addresses[0][4][0]}, which is not an address of this host"
    raise UserError(f"{message}, and Gloo needs one: correct the name's line in /etc/hosts")


def refuse_absent_server(environment: Mapping[str, str]) -> None:
    """Raise UserError where Horovod's rendezvous server does not answer, as where variables of a job that is over are
    left: Horovod would crash."""
    names = ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT")
    address, port = (environment.get(name, "") for name in names)
    address = address.partition("/")[0]  # behind it is what only the job may know
    try:
        socket.create_connection((address.removesuffix(f":{port}"), int(port)), SERVER_SECONDS).close()
    except (OSError, ValueError, OverflowError) as error:  # ValueError: not a number, or not a host name
        message = ", ".join(f"{name}={value[:80]!r}" for name, value in zip(names, (address, port), strict=True))
        remedy = "if they are left over from another job, unset all HOROVOD_* variables"
        raise UserError(f"no rendezvous server at {message} ({error}): {remedy}") from None


def refuse_too_few_files(size: int, local_size: int, cross_size: int) -> None:
    """Allow this process as many open files as Gloo's connections need. Raise UserError where that is not permitted: Gloo
    would crash."""
    # Measured: 4 + 4 * size on one host, where each other rank is in two of Gloo's three groups.
    needed = sum(1 for _ in Path("/proc/self/fd").iterdir()) + GLOO_SPARE_FILES + 2 * (size + local_size + cross_size)
    if not files.allow_open_files(needed):
        remedy = f"raise `ulimit -n` to {needed}, or use fewer ranks"
        raise UserError(f"this user may open fewer files than Gloo needs for {size} ranks: {remedy}")


def refuse_unusable(environment: Mapping[str, str]) -> None:
    """Raise UserError where Horovod would crash in Gloo."""
    refuse_absent_server(environment)
    refuse_unknown_own_name(socket.gethostname())
    refuse_too_few_files(*(int(environment.get(f"HOROVOD_{name}", "1")) for name in GLOO_SIZES))
