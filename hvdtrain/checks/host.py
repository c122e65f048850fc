"""This host without its GPUs: launchers, names, network interfaces, memory, disk, data."""

import os
import re
import shutil
import socket
import tempfile
from pathlib import Path

from hvdtrain.checks.findings import Findings, Here
from hvdtrain.engines.launchers import announced

LEAST_SHARED_MEMORY = 256 * 2**20  # bytes; the default in containers is 64 MiB
LEAST_FOR_NCCL = 2**30  # bytes; what NVIDIA's containers recommend
LEAST_SCRATCH = 2**30  # bytes
LEAST_LEFT = 16 * 2**20  # bytes: with less, a start is hopeless
FULL = "NCCL, MPI and data loader workers end in a bus error when it is full"
SLOW_INTERFACE = 1000  # Mbit/s


def check_launcher(findings: Findings, here: Here) -> None:
    """Report what started this process, or which launchers are on PATH."""
    place = announced()
    if place.launcher != "none":
        findings.ok(f"started by {place.launcher}: {place.size} ranks")
        return
    able = [name for name in ("horovodrun", "mpirun", "srun", "ssh") if shutil.which(name)]
    findings.ok(f"started alone; launchers on PATH: {', '.join(able) or 'none'}")
    if "SLURM_JOB_ID" in os.environ:
        do = "`srun python -m hvdtrain.doctor`, or launch/slurm.sbatch"
        findings.warning("in a Slurm job, but not started by srun or mpirun", "one process trains, the others idle", do)


def check_home(findings: Findings, here: Here) -> None:
    """Check that this user has a home directory: a container may run with any user id."""
    try:
        Path.home()
    except RuntimeError:
        do = "export HOME=DIR, a directory that you can write to"
        findings.problem("HOME is not set, and this user id has no name", "mpirun crashes (SIGSEGV, exit code 139)", do)


def check_name(findings: Findings, here: Here) -> None:
    """Check that this host's name resolves, and note its address."""
    name = socket.gethostname()
    try:
        here.address = address_of_host(name)
    except OSError as error:
        do = f"echo '127.0.1.1 {name}' >> /etc/hosts (one host), or the host's real address there or in DNS (several)"
        findings.problem(f"this host's name {name} does not resolve ({error})", "Gloo aborts, with a core dump", do)
        return
    findings.ok(f"{name} resolves to {here.address}")


def address_of_host(name: str) -> str:
    """Return an address of a host: of IPv4, if it has one. Raises OSError."""
    found = socket.getaddrinfo(os.fsencode(name), None, type=socket.SOCK_STREAM)  # bytes: any name that a host may have
    return str(min(found, key=lambda each: each[0] != socket.AF_INET)[4][0])


def check_interfaces(findings: Findings, here: Here) -> None:
    """Check that the named network interfaces exist, and report the speed of each that is up."""
    import psutil

    known, states = psutil.net_if_addrs(), psutil.net_if_stats()
    for variable in ("HOROVOD_GLOO_IFACE", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "OMPI_MCA_btl_tcp_if_include"):
        named = os.environ.get(variable, "")
        for name in [] if named.startswith("^") else named.split(","):  # ^: all but these
            # NCCL and Gloo take "eth" as the beginning of names; MPI, and NCCL "=eth", as a whole one.
            plain, whole = name.lstrip("="), named.startswith("=") or variable.startswith("OMPI")
            if plain and "/" not in plain and plain not in (each[: None if whole else len(plain)] for each in known):
                what = f"{variable}={name}: no such interface here"
                do = f"name one of {', '.join(sorted(known))} ({variable}, or --interface)"
                findings.problem(what, "the ranks would not find each other", do)
    for name in sorted(known.keys() & states.keys() - {"lo"}):
        addresses = [entry.address for entry in known[name] if entry.family == socket.AF_INET]
        if states[name].isup and addresses:
            speed = states[name].speed
            line = f"interface {name}: {addresses[0]}, {speed or 'unknown'} Mbit/s, MTU {states[name].mtu}"
            do = "choose a faster one with --interface, or --compression fp16"
            slow = 0 < speed < SLOW_INTERFACE
            findings.warning(line, "gradients would crawl", do) if slow else findings.ok(line)


def check_memory_and_disk(findings: Findings, here: Here) -> None:
    """Check free memory, and the space of /dev/shm and of the scratch directory. What leaves none of one is a problem."""
    if (free := free_memory()) is not None and free < LEAST_LEFT:
        do = "end what uses it (ps aux --sort -rss), or use another host"
        findings.problem(f"{free / 2**20:.0f} MiB of memory are free", "the kernel would kill a rank", do)
    shared = shutil.disk_usage("/dev/shm") if Path("/dev/shm").is_dir() else None
    if shared is None or shared.total < (LEAST_FOR_NCCL if here.gpus else LEAST_SHARED_MEMORY):
        size = "missing" if shared is None else f"{shared.total / 2**20:.0f} MiB"
        do = "docker run --ipc=host; Kubernetes: emptyDir medium Memory at /dev/shm; Singularity shares the host's"
        findings.warning(f"/dev/shm is {size}", FULL, do)
    if shared is not None and shared.free < LEAST_LEFT:
        do = "remove what earlier jobs have left there, or make it larger"
        findings.problem(f"/dev/shm has {shared.free / 2**20:.0f} MiB left", FULL, do)
    scratch = Path(os.environ.get("TMPDIR") or "/tmp")  # not tempfile.gettempdir(), which tries others
    try:
        with tempfile.NamedTemporaryFile(dir=scratch) as file:
            file.write(b"x")
        free = shutil.disk_usage(scratch).free
    except OSError as error:
        what, do = f"{scratch} cannot be written: {error.strerror}", "set TMPDIR to a local disk"
        findings.problem(what, "MPI and torch need it", do)
        return
    if free < LEAST_SCRATCH:
        level, do = "problem" if free < LEAST_LEFT else "warning", "set TMPDIR to a directory with more space"
        findings.add(level, f"{scratch} has {free / 2**20:.0f} MiB left", "MPI and torch keep files there", do)
    else:
        findings.ok(f"scratch {scratch}: {free / 2**30:.0f} GiB free")


def free_memory() -> int | None:
    """Return how many bytes the kernel could still give to processes on this host; None if it does not say."""
    kilobytes = re.search(r"^MemAvailable: *([0-9]+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    return int(kilobytes[1]) * 1024 if kilobytes else None


def check_data(findings: Findings, here: Here) -> None:
    """Report where MNIST would be read from."""
    from hvdtrain.datasets import mnist_data  # which imports torch

    directory = here.flags.data_dir
    data = mnist_data.load_dataset("mnist" if directory is not None else "auto", directory, download=False)
    findings.ok(f"data: {data.reason}")
