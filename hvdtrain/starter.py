"""Start Horovod over Gloo (on GPUs: NCCL) where something starts one process per rank and nothing else: no ssh, no MPI.

srun --ntasks 8 python -m hvdtrain.starter -m hvdtrain.mnist         Slurm, also without PMIx
MASTER_ADDR=a MASTER_PORT=9000 WORLD_SIZE=2 RANK=0 python -m hvdtrain.starter -m hvdtrain.mnist     on host a
MASTER_ADDR=a MASTER_PORT=9000 WORLD_SIZE=2 RANK=1 python -m hvdtrain.starter -m hvdtrain.mnist     on host b

Rank 0 runs the rendezvous server in a thread of its process, on the interface of the job; each rank then becomes the
program. Exit codes and signals are the program's own.
"""

import argparse
import json
import os
import socket
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Container, Sequence
from typing import NamedTuple

from hvdtrain.engines import flags as cli
from hvdtrain.engines import program
from hvdtrain.engines.errors import UserError
from hvdtrain.engines.exit_codes import run
from hvdtrain.engines.launchers import announced
from hvdtrain.engines.rendezvous import Rendezvous, meeting_point

POLL_SECONDS = 0.1
# Only straight to rank 0: a proxy variable of the site's must not send the ranks elsewhere.
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Place(NamedTuple):
    """A rank's place among the hosts, in Horovod's words: `cross` counts the hosts that have a rank of this local rank."""

    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int


def place(rank: int, hosts: list[str]) -> Place:
    """Return the place of `rank`, given the host name of every rank."""
    local_rank = hosts[:rank].count(hosts[rank])
    peers = [host for host, count in Counter(hosts).items() if count > local_rank]  # in order of their first ranks
    return Place(local_rank, hosts.count(hosts[rank]), peers.index(hosts[rank]), len(peers))


def resolve(host: str, deadline: float) -> str:
    """Return the IPv4 address of `host`; a name may take its time to appear (Kubernetes: once the pod runs)."""
    while True:
        try:
            return str(socket.getaddrinfo(host, None, socket.AF_INET)[0][4][0])
        except (OSError, UnicodeError) as error:  # UnicodeError: no name at all
            if time.monotonic() > deadline or isinstance(error, UnicodeError):
                raise UserError(
                    f"{host}, where rank 0 should be, has no address ({error}): check MASTER_ADDR"
                ) from None
            time.sleep(POLL_SECONDS)


def interface_with(address: str) -> str:
    """Return the name of this host's interface that has `address`."""
    import psutil  # Horovod's launcher needs it too

    wanted = "127.0.0.1" if address.startswith("127.") else address  # Debian gives a host's own name 127.0.1.1
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == wanted for entry in entries):
            return name
    here = f"{socket.gethostname()}, where rank 0 runs"
    raise UserError(f"{address} is not an address of {here}: set MASTER_ADDR to this host, or name its --interface")


def address_of(interface: str) -> str:
    """Return the IPv4 address of this host's `interface`."""
    import psutil

    for entry in psutil.net_if_addrs().get(interface, []):
        if entry.family == socket.AF_INET:
            return str(entry.address)
    raise UserError(f"--interface {interface}: not on this host, or without an IPv4 address (`ip -br addr` lists them)")


def address_towards(address: str) -> str:
    """Return this host's own IPv4 address on the way to `address`."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))  # sends nothing: only asks for the route
        except OSError as error:
            raise UserError(f"{address}, where rank 0 should be, cannot be reached: {error.strerror}") from None
        return str(probe.getsockname()[0])


def meet_as_rank_0(address: str, port: int, size: int, deadline: float) -> list[str]:
    """Serve the meeting point and return the host name of every rank, once all have come."""
    try:
        server = Rendezvous(address, port)
    except OSError as error:
        how = "set MASTER_PORT (or --port) to a free port above 1023, the same for every rank"
        raise UserError(f"cannot listen on {address}:{port} ({error.strerror}): {how}") from None
    server.put("hosts", "0", socket.gethostname().encode())
    wait_for(lambda: server.get("hosts"), size, deadline, f"{address}:{port}")
    came = server.get("hosts")
    hosts = [came[str(rank)].decode(errors="replace") for rank in range(size)]
    server.expect(hosts)
    server.put("known", "hosts", json.dumps(hosts).encode())
    server.put("met", "0", b"")
    # This process may be done before a slower rank has asked, and the server with it.
    wait_for(lambda: server.get("met"), size, deadline, f"{address}:{port}")
    return hosts


def wait_for(came: Callable[[], Container[str]], size: int, deadline: float, where: str) -> None:
    """Return once every rank's number is among those that `came`."""
    while missing := [str(rank) for rank in range(size) if str(rank) not in came()]:
        if time.monotonic() > deadline:
            loopback = " (a loopback address: other hosts cannot reach it)" if where.startswith("127.") else ""
            raise UserError(f"rank {', '.join(missing)} did not come to {where}{loopback}: were all {size} started?")
        time.sleep(POLL_SECONDS)


def meet(address: str, port: int, rank: int, deadline: float) -> list[str]:
    """Tell rank 0 that this rank is there, and return the host name of every rank."""
    base, host = f"http://{address}:{port}", socket.gethostname().encode()
    request(urllib.request.Request(f"{base}/hosts/{rank}", data=host, method="PUT"), deadline)
    answer = request(urllib.request.Request(f"{base}/known/hosts"), deadline)
    request(urllib.request.Request(f"{base}/met/{rank}", data=b"", method="PUT"), deadline)
    return [str(name) for name in json.loads(answer)]


def request(what: urllib.request.Request, deadline: float) -> bytes:
    """Return the server's answer, once it has one."""
    while True:
        try:
            with DIRECT.open(what, timeout=5) as response:
                return bytes(response.read())
        except OSError as error:  # HTTPError too
            said = "not every rank came" if getattr(error, "code", 0) == 404 else getattr(error, "reason", error)
            if time.monotonic() > deadline:
                raise UserError(f"no meeting at rank 0's {what.host}: {said}") from None
            time.sleep(POLL_SECONDS)


def environment(rank: int, hosts: list[str], address: str, port: int, interface: str) -> dict[str, str]:
    """Return what Horovod's launcher would have put into this rank's environment."""
    mine = place(rank, hosts)
    return {
        "HOROVOD_HOSTNAME": hosts[rank],
        "HOROVOD_RANK": str(rank),
        "HOROVOD_SIZE": str(len(hosts)),
        "HOROVOD_LOCAL_RANK": str(mine.local_rank),
        "HOROVOD_LOCAL_SIZE": str(mine.local_size),
        "HOROVOD_CROSS_RANK": str(mine.cross_rank),
        "HOROVOD_CROSS_SIZE": str(mine.cross_size),
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": address,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_IFACE": interface,
        "NCCL_SOCKET_IFNAME": os.environ.get("NCCL_SOCKET_IFNAME", interface),
    }


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the starter's own options, and the rest: what to run."""
    parser = cli.Parser("hvdtrain.starter", __doc__)
    parser.usage = "hvdtrain.starter [OPTIONS] (-m MODULE | FILE) ARGUMENTS"
    parser.add_argument("--interface", help="network interface of the job (default: the one that reaches rank 0)")
    parser.add_argument(
        "--port", type=cli.positive_int, help="port of the meeting point (default: MASTER_PORT, or from the job)"
    )
    parser.add_argument("--wait", type=cli.positive, default=120.0, help="seconds to wait for all ranks (default: 120)")
    end = 0
    while end < len(argv) and argv[end].startswith("--"):
        end += 1 if "=" in argv[end] or argv[end] == "--help" else 2
    return parser.parse_args(argv[:end]), list(argv[end:])


def main() -> int:
    options, words = parse(sys.argv[1:])
    if not words or words == ["-m"]:
        raise UserError("nothing to run: name a module, as in `-m hvdtrain.mnist`, or a file", everywhere=True)
    told = announced()
    if told.launcher == "horovodrun":
        raise UserError("horovodrun has started Horovod already: leave hvdtrain.starter out", everywhere=True)
    if told.size > 1:
        deadline = time.monotonic() + options.wait
        host, port = meeting_point(os.environ, told.launcher)
        port = options.port or port
        address = resolve(host, deadline)
        if options.interface is not None:
            interface, own = options.interface, address_of(options.interface)
        else:
            own = address if told.rank == 0 else address_towards(address)
            interface = interface_with(own)
        if told.rank == 0:
            address = own
            hosts = meet_as_rank_0(address, port, told.size, deadline)
        else:
            hosts = meet(address, port, told.rank, deadline)
        os.environ.update(environment(told.rank, hosts, address, port, interface))
    program.run(program.find(words))
    return 0


if __name__ == "__main__":
    run(main)
