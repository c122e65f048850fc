"""What only all ranks together can tell. Each check is a collective."""

import os
import socket
import statistics
import time
import uuid
from collections import Counter

import torch

from hvdtrain.checks.findings import Findings, Here
from hvdtrain.checks.host import address_of_host
from hvdtrain.engines import atomic, files
from hvdtrain.engines.base import Engine
from hvdtrain.engines.choice import cores_of_ranks
from hvdtrain.engines.cores import cpu_quota, share_of_cores

SMALL, LARGE = 1, 4 * 2**20  # float32 elements: 4 B shows the latency, 16 MiB the bandwidth


def check_places(findings: Findings, here: Here, engine: Engine) -> None:
    """Check that each rank has its own local rank, and report the devices. A collective."""
    place = [socket.gethostname(), engine.local_rank, engine.local_size, str(engine.device)]
    rows = engine.all_gather_object(place, "places")
    on_host = Counter(host for host, *_ in rows)
    for rank, (host, local_rank, local_size, _) in enumerate(rows):
        if local_size != on_host[host] or not 0 <= local_rank < local_size:
            what = f"rank {rank} is told {local_rank} of {local_size} on {host}, which has {on_host[host]} ranks"
            why = "ranks would share a GPU, or look for one that is not there"
            findings.problem(what, why, "give every host its own name")
    hosts = ", ".join(f"{count} on {host}" for host, count in on_host.items())
    findings.ok(f"ranks: {hosts}; devices: {', '.join(sorted({row[3] for row in rows}))}")


def check_alike(findings: Findings, here: Here, engine: Engine) -> None:
    """Check that every rank has the same versions. A collective."""
    rows = engine.all_gather_object(here.versions, "versions")
    for name in sorted({name for row in rows for name in row}):
        values = [row.get(name, "none") for row in rows]
        if len(set(values)) > 1:
            other = next(rank for rank, value in enumerate(values) if value != values[0])
            what = f"{name} differs: rank 0 has {values[0]}, rank {other} has {values[other]}"
            do = "use one environment or image on every host"
            findings.problem(what, "mixed versions hang or give wrong sums", do)
    if all(row == rows[0] for row in rows):
        shown = ", ".join(f"{name} {value}" for name, value in here.versions.items())
        findings.ok(f"every rank alike: {shown}")


def check_neighbours(findings: Findings, here: Here, engine: Engine) -> None:
    """Check that the hosts of the job resolve each other's names. A collective."""
    rows = engine.all_gather_object([socket.gethostname(), here.address], "addresses")
    hosts = dict(rows)
    if len(hosts) == 1:
        return
    for host, address in hosts.items():
        if address.startswith("127.") or address == "::1":
            what, do = (
                f"{host} resolves its own name to {address}",
                f"in {host}'s /etc/hosts give {host} its real address",
            )
            findings.problem(what, "other hosts would connect to themselves", do)
        try:
            address_of_host(host)
        except OSError as error:
            do = f"add {host} to /etc/hosts on {socket.gethostname()}, or to DNS"
            what = f"{host} does not resolve on {socket.gethostname()} ({error})"
            findings.problem(what, "ranks must find each other", do)


def check_cores(findings: Findings, here: Here, engine: Engine) -> None:
    """Check that the threads of this host's ranks fit the cores that they may run on. A collective."""
    cores, quota, threads = cores_of_ranks(engine), cpu_quota(), torch.get_num_threads()
    host = cores[engine.rank][0]
    have = min(len({core for where, theirs in cores if where == host for core in theirs}), quota)
    line = f"cores: {have:g}; ranks on this host: {engine.local_size}; torch threads per rank: {threads}"
    if threads > share_of_cores(engine.rank, cores, quota):
        do = "fewer ranks, OMP_NUM_THREADS=1 (--threads 1), or more cores (--cpus-per-task, --bind-to none)"
        findings.warning(line, "threads compete for cores, and every rank waits for the slowest", do)
    else:
        findings.ok(line)


def check_output(findings: Findings, here: Here, engine: Engine) -> None:
    """Check that rank 0 can write a file in --output-dir and that every rank sees it. A collective."""
    directory = here.flags.output_dir
    if directory is None:
        return
    name = engine.broadcast_object(f".doctor-{uuid.uuid4().hex}", "probe")
    with findings.check("output directory"):
        with engine.raising_together("probe"), files.output_to(directory):
            if engine.rank == 0:
                directory.mkdir(parents=True, exist_ok=True)
                atomic.write_atomically(directory / name, "x", sync=False)
        sees = engine.all_gather_object(os.access(directory / name, os.F_OK), "sees")
        if engine.rank == 0:
            (directory / name).unlink(missing_ok=True)
            if missing := [rank for rank, seen in enumerate(sees) if not seen]:
                what = f"--output-dir {directory}: ranks {missing} do not see what rank 0 writes there"
                do = "name a directory on a shared file system"
                findings.warning(what, "a restarted run would not find its checkpoint on every host", do)
            else:
                findings.ok(f"--output-dir {directory} is written by rank 0 and seen by all")


def check_all_reduce(findings: Findings, here: Here, engine: Engine) -> None:
    """Check and time sums of known numbers, in small and large messages, on the CPU and on the training device."""
    if engine.size == 1:
        findings.ok("one rank, nothing to reduce; to try a transport: `horovodrun -np 2 python -m hvdtrain.doctor`")
        return
    for device in dict.fromkeys([torch.device("cpu"), engine.device]):
        medians = []
        for elements, repeats in ((SMALL, 50), (LARGE, 5)):
            name = f"doctor.{device.type}.{elements}"
            tensor = torch.full((elements,), float(engine.rank + 1), device=device)
            wanted = torch.full_like(tensor, engine.size * (engine.size + 1) / 2)
            # Small whole numbers are exact in float32, in whatever order ranks are added.
            if not torch.equal(engine.sum(tensor, name), wanted):
                what = f"the all-reduce on {device.type} gives a wrong sum"
                do = "make setup SETUP=--fresh; if that does not help, report a bug"
                findings.problem(what, "gradients would be wrong, too", do)
            seconds = []
            for _ in range(repeats):
                engine.barrier()
                began = time.perf_counter()
                # Zeros, because repeated sums of others would become infinite.
                engine.all_reduce_(tensor.zero_(), "sum", name)
                if device.type == "cuda":
                    torch.cuda.synchronize()
                seconds.append(time.perf_counter() - began)
            # The median of the slowest rank, the same on every rank, so that it is shown once.
            medians.append(max(engine.all_gather_object(statistics.median(seconds), f"{name}.seconds")))
        carried = engine.description if device == engine.device else f"{engine.name}, CPU tensors"
        bandwidth = LARGE * 4 / medians[1] / 1e9
        speed = f"{medians[0] * 1e6:.0f} us for 4 B, {bandwidth:.3g} GB/s for 16 MiB (median)"
        findings.ok(f"all-reduce, {carried}: {speed}")
