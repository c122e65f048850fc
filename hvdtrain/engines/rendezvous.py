"""The rendezvous of the ranks of a job that no launcher connects."""

import contextlib
import re
import socketserver
import subprocess
import threading
from collections import Counter
from collections.abc import Mapping

from hvdtrain.engines.errors import UserError


def meeting_point(environment: Mapping[str, str], launcher: str) -> tuple[str, int]:
    """Return the host and port of rank 0: as told by MASTER_ADDR and MASTER_PORT, or as follows from the Slurm job."""
    host, port = environment.get("MASTER_ADDR"), environment.get("MASTER_PORT")
    if host and port:
        if not re.fullmatch("[0-9]{1,5}", port) or not 0 < int(port) < 65536:
            raise UserError(f"MASTER_PORT={port[:40]!r} is not a port: set a number from 1024 to 65535")
        return host, int(port)
    if launcher == "Slurm":
        return slurm_meeting_point(environment)
    raise UserError(f"{launcher} says not where ranks meet: set MASTER_ADDR and MASTER_PORT, or use torchrun")


def slurm_meeting_point(environment: Mapping[str, str]) -> tuple[str, int]:
    """Return the first host of this job step and a port that follows from the job's number."""
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "localhost")
    number = environment.get("SLURM_JOB_ID", "0")
    if not re.fullmatch("[0-9]{1,20}", number):
        raise UserError(f"SLURM_JOB_ID={number[:40]!r} is not a number: set MASTER_ADDR and MASTER_PORT")
    with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError):
        nodes = subprocess.run(
            ["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=True, timeout=10
        ).stdout
    if not nodes.split():
        raise UserError("Slurm names no host (SLURM_JOB_NODELIST is empty): set MASTER_ADDR and MASTER_PORT")
    return nodes.split()[0], 20_000 + int(number) % 10_000


class Rendezvous:
    """Horovod's own rendezvous server, in a thread of this process: where Gloo's ranks learn each other's sockets.

    It has no authentication: whoever reaches it can misdirect this job's ranks. So it listens on one address only, holds
    nothing but addresses, and unpickles nothing. Raises OSError where `address` cannot be bound.
    """

    def __init__(self, address: str, port: int):
        from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

        class Server(RendezvousHTTPServer):
            daemon_threads = True

            def server_bind(self) -> None:
                # http.server would ask for the full name of its address: seconds, where name resolution is broken.
                socketserver.TCPServer.server_bind(self)

        self._server = Server((address, port), RendezvousHandler, 0)
        threading.Thread(target=self._server.serve_forever, name="rendezvous", daemon=True).start()

    def get(self, scope: str) -> dict[str, bytes]:
        """Return what was put so far under /`scope`/, by key."""
        with self._server.cache_lock:
            return dict(self._server.cache.get(scope, {}))

    def put(self, scope: str, key: str, value: bytes) -> None:
        with self._server.cache_lock:
            self._server.cache.setdefault(scope, {})[key] = value

    def expect(self, hosts: list[str]) -> None:
        """Given the host of each rank, forget a scope once all its ranks have met: Horovod can then be started again."""
        on_host = Counter(hosts)
        sizes = {"global": len(hosts)} | {f"local_{host}": count for host, count in on_host.items()}
        for local_rank in range(max(on_host.values())):
            sizes[f"cross_{local_rank}"] = sum(count > local_rank for count in on_host.values())
        self._server.scope_size.update(sizes)
