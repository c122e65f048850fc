"""Rendezvous of a job's ranks: the address of rank 0, and requests to a server (rendezvous_server.py)."""

import re
import socket
import time
from collections.abc import Mapping

from hvdtrain.engines.errors import UserError

SILENCE_SECONDS = 30.0  # time limit of one request


def own_address_towards(host: str) -> str:
    """Return the local IPv4 address used to reach `host`. Connecting a UDP socket sends nothing. Raises OSError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return str(probe.getsockname()[0])


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


def horovods_server(environment: Mapping[str, str]) -> tuple[str, int] | None:
    """Return host and port of the rendezvous server of `horovodrun --gloo` or hvdtrain.starter; None if there is none."""
    address = environment.get("HOROVOD_GLOO_RENDEZVOUS_ADDR")
    port = environment.get("HOROVOD_GLOO_RENDEZVOUS_PORT", "")
    return (address, int(port)) if address and port.isdecimal() else None


def put(server: tuple[str, int], scope: str, key: str, value: bytes) -> None:
    """Store `value` under /`scope`/`key` on a rendezvous server. Raises OSError."""
    request(server, "PUT", f"/{scope}/{key}", value)


def wait_for(server: tuple[str, int], scope: str, key: str, seconds: float) -> bytes:
    """Wait until there is a value under /`scope`/`key`, and return it. Raises OSError; TimeoutError after `seconds`."""
    until = time.monotonic() + seconds
    while (value := request(server, "GET", f"/{scope}/{key}")) is None:
        if time.monotonic() > until:
            raise TimeoutError(f"rank 0 did not connect within {seconds:.0f} s")
        time.sleep(0.05)
    return value


def request(
    server: tuple[str, int], method: str, path: str, body: bytes = b"", seconds: float = SILENCE_SECONDS
) -> bytes | None:
    """Return the body of the answer; None if there is no such key. Raises OSError. seconds: limit of each wait for it."""
    import http.client  # rarely needed, and not imported by torch

    connection = http.client.HTTPConnection(*server, timeout=seconds)
    try:
        connection.request(method, path, body)
        answer = connection.getresponse()
        return answer.read() if answer.status == 200 else None
    except http.client.HTTPException as error:
        raise OSError(f"{server[0]}:{server[1]} is not a rendezvous server ({error!r})") from error
    finally:
        connection.close()


def slurm_meeting_point(environment: Mapping[str, str]) -> tuple[str, int]:
    """Return the first host of this job step, and a port derived from the job ID. Raises UserError.

    Slurm writes `a[1,3-4],b`. In a container there is no `scontrol` to expand that.
    """
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "localhost")
    number = environment.get("SLURM_JOB_ID", "0")
    if not re.fullmatch("[0-9]{1,20}", number):
        raise UserError(f"SLURM_JOB_ID={number[:40]!r} is not a number: set MASTER_ADDR and MASTER_PORT")
    first = re.sub(r"\[([0-9]+)[^]]*\]", r"\1", nodes).split(",")[0].strip()
    if not first:
        raise UserError("Slurm names no host (SLURM_JOB_NODELIST is empty): set MASTER_ADDR and MASTER_PORT")
    return first, 20_000 + int(number) % 10_000
