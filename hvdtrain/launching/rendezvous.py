"""Rendezvous of a job's ranks: the address of rank 0, the secret of the job, and requests to a server (meeting.py)."""

import contextlib
import hmac
import os
import re
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import NamedTuple

from hvdtrain.engines import atomic, files
from hvdtrain.engines.errors import UserError

ANSWER_SECONDS = 30.0  # time limit of one request
PORTS = 4  # which a rank needs at least, for the others and for the store
MOST_NAMED_RANKS = 8  # ranks or hosts named in one message
SECRET_VARIABLE = "HVDTRAIN_JOB_SECRET"
SHORTEST = 16  # characters
SECRET_REMEDY = f"set {SECRET_VARIABLE} to the same secret on every host, such as the output of `openssl rand -hex 32`"


def first_few(late: Sequence[object]) -> str:
    """Return the first few items as text, such as "1, 2 and 6 more"."""
    more = len(late) - MOST_NAMED_RANKS
    return ", ".join(map(str, late[:MOST_NAMED_RANKS])) + (f" and {more} more" if more > 0 else "")


def own_address_towards(host: str) -> str:
    """Return the local IPv4 address used to reach `host`. Raises OSError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # To connect a UDP socket sends nothing: the kernel only chooses the route, and with it the address.
        probe.connect((host, 9))
        return str(probe.getsockname()[0])


def require_free_ports() -> None:
    """Raise UserError if this host has no ports left for connections."""
    with contextlib.ExitStack() as held:
        try:
            for _ in range(PORTS):
                # Without a free port, torch tries again for two minutes, and blames the other ranks.
                held.enter_context(socket.socket()).bind(("", 0))
        except OSError as error:
            remedy = "end what holds them (ss -tan), or widen net.ipv4.ip_local_port_range"
            raise UserError(f"no ports are free on this host ({error.strerror}): {remedy}") from error


def meeting_point(environment: Mapping[str, str], launcher: str) -> tuple[str, int]:
    """Return the host and port of rank 0: from MASTER_ADDR and MASTER_PORT, from Kubeflow's PET_MASTER_ADDR and
    PET_MASTER_PORT, or from the Slurm job. Raises UserError."""
    host = environment.get("MASTER_ADDR") or environment.get("PET_MASTER_ADDR")
    port = environment.get("MASTER_PORT") or environment.get("PET_MASTER_PORT")
    if host and port:
        if not re.fullmatch("[0-9]{1,5}", port) or not 0 < int(port) < 65536:
            raise UserError(f"MASTER_PORT={port[:40]!r} is not a port: set a number from 1024 to 65535")
        return host, int(port)
    if launcher == "Slurm":
        return slurm_meeting_point(environment)
    raise UserError(
        f"{launcher} does not tell the ranks where to meet: set MASTER_ADDR and MASTER_PORT, or use torchrun"
    )


class Server(NamedTuple):
    """A rendezvous server. token: what that of hvdtrain.starter wants to hear; empty: that of horovodrun wants nothing."""

    host: str
    port: int
    token: str = ""

    @property
    def address(self) -> str:
        """HOROVOD_GLOO_RENDEZVOUS_ADDR, to which Horovod appends `:PORT/SCOPE/KEY` and puts `http://` in front.

        Trap: it sends nothing else, so the token is in the path: http://HOST:PORT/TOKEN:PORT/SCOPE/KEY.
        """
        return f"{self.host}:{self.port}/{self.token}" if self.token else self.host

    @property
    def prefix(self) -> str:
        """The beginning of each path."""
        return f"/{self.token}:{self.port}" if self.token else ""


def horovods_server(environment: Mapping[str, str]) -> Server | None:
    """Return the rendezvous server of `horovodrun --gloo` or hvdtrain.starter; None if there is none."""
    address, _, token = environment.get("HOROVOD_GLOO_RENDEZVOUS_ADDR", "").partition("/")
    port = environment.get("HOROVOD_GLOO_RENDEZVOUS_PORT", "")
    host = address.removesuffix(f":{port}") if token else address
    return Server(host, int(port), token) if host and port.isdecimal() else None


def put_value(server: Server, scope: str, key: str, value: bytes) -> None:
    """Store `value` under /`scope`/`key` on a rendezvous server. Raises OSError."""
    server_request(server, "PUT", f"/{scope}/{key}", value)


def wait_for(server: Server, scope: str, key: str, seconds: float) -> bytes:
    """Wait until there is a value under /`scope`/`key`, and return it. Raises OSError; TimeoutError after `seconds`."""
    until = time.monotonic() + seconds
    while (value := server_request(server, "GET", f"/{scope}/{key}")) is None:
        if time.monotonic() > until:
            raise TimeoutError(f"rank 0 did not connect within {seconds:.0f} s")
        time.sleep(0.05)
    return value


def server_request(
    server: Server, method: str, path: str, body: bytes = b"", seconds: float = ANSWER_SECONDS
) -> bytes | None:
    """Return the body of the answer; None if there is no such key.

    Raises OSError, also if nothing comes for `seconds`; PermissionError if the server knows another secret.
    """
    where = f"{server.host}:{server.port}"
    connection = HTTPConnection(server.host, server.port, timeout=seconds)
    try:
        connection.request(method, f"{server.prefix}{path}", body)
        response = connection.getresponse()
        answer = response.read()
    except HTTPException as error:
        raise ConnectionError(f"{where} is not a rendezvous server ({error!r:.80})") from None
    finally:
        connection.close()
    if response.status == 403:
        raise PermissionError(f"{where} does not know the secret of this job")
    return answer if response.status == 200 else None


def slurm_meeting_point(environment: Mapping[str, str]) -> tuple[str, int]:
    """Return the first host of this job step, and a port derived from the job ID. Raises UserError."""
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "localhost")
    number = environment.get("SLURM_JOB_ID", "0")
    if not re.fullmatch("[0-9]{1,20}", number):
        raise UserError(f"SLURM_JOB_ID={number[:40]!r} is not a number: set MASTER_ADDR and MASTER_PORT")
    # Slurm writes `a[1,3-4],b`. In a container there is no `scontrol` to expand that.
    first = re.sub(r"\[([0-9]+)[^]]*\]", r"\1", nodes).split(",")[0].strip()
    if not first:
        raise UserError("Slurm names no host (SLURM_JOB_NODELIST is empty): set MASTER_ADDR and MASTER_PORT")
    # All tasks compute this port without asking each other, and two jobs of a host seldom have the same.
    return first, 20_000 + int(number) % 10_000


# ---- the secret that the processes of a job share, by which their rendezvous server knows them


def job_secret(environment: Mapping[str, str], size: int) -> str:
    """Return the secret of a job of `size` starters. Raises UserError if they could not all know it.

    It is in the environment, or else in a file of this user's cache, which hosts that share the home directory share.
    """
    # Not from the command line, which every user of a host can read.
    if given := environment.get(SECRET_VARIABLE):
        if len(given) < SHORTEST:
            raise UserError(f"{SECRET_VARIABLE} has {len(given)} characters, which can be guessed: {SECRET_REMEDY}")
        return given
    if size == 1:
        return secrets.token_hex(32)
    if "KUBERNETES_SERVICE_HOST" in environment:
        # Pods share no home directory, and have no other users. A network policy keeps other pods away.
        return f"a job in Kubernetes at {environment.get('MASTER_ADDR') or environment.get('PET_MASTER_ADDR')}"
    directory = files.cache_directory("job", "secrets")
    if directory is None:
        raise UserError(
            f"this user has no private cache directory, in which the hosts find the job's secret: {SECRET_REMEDY}"
        )
    path = directory / "secret"
    try:
        with contextlib.suppress(FileNotFoundError):
            return read_secret(path)
        # A hard link appears with its whole content, or fails where one is there: all processes read the same secret.
        own = path.with_name(f".secret.{os.getpid()}-{secrets.token_hex(4)}{atomic.PARTIAL}")
        with os.fdopen(os.open(own, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(32))
        with contextlib.suppress(FileExistsError):  # that of another process, which was first
            path.hardlink_to(own)
        own.unlink()
        return read_secret(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}, the job's secret, cannot be used ({error}): remove it, or {SECRET_REMEDY}") from error


def read_secret(path: Path) -> str:
    """Return the secret in a file. Raises OSError, ValueError."""
    secret = files.read_small(path, most=1000, owner=os.geteuid()).decode()
    if len(secret) < SHORTEST:
        raise ValueError("too short")
    return secret


def token(secret: str, port: int) -> str:
    """Return what a request to the rendezvous server at `port` names to be heard: made from the secret, not itself one."""
    return hmac.digest(secret.encode(errors="surrogateescape"), f"rendezvous at port {port}".encode(), "sha256").hex()
