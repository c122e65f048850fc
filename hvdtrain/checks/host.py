"""This host without its GPUs: launchers, names, network interfaces, memory, disk, data."""

import os
import shutil
import socket
import tempfile
from pathlib import Path

import torch

from hvdtrain.checks.findings import Findings, Here
from hvdtrain.data import idx
from hvdtrain.engines.launchers import announced

LEAST_SHARED_MEMORY = 256 * 2**20  # bytes; the default in containers is 64 MiB
LEAST_FOR_NCCL = 2**30  # bytes; what NVIDIA's containers recommend
LEAST_SCRATCH = 2**30  # bytes
SLOW_INTERFACE = 1000  # Mbit/s


def check_launcher(found: Findings, here: Here) -> None:
    """Report what started this process, or which launchers are on PATH."""
    told = announced()
    if told.launcher != "none":
        found.ok(f"started by {told.launcher}: {told.size} ranks")
        return
    able = [name for name in ("horovodrun", "mpirun", "srun", "ssh") if shutil.which(name)]
    found.ok(f"started alone; launchers on PATH: {', '.join(able) or 'none'}")
    if "SLURM_JOB_ID" in os.environ:
        do = "`srun python -m hvdtrain.doctor`, or launch/slurm.sbatch"
        found.warning("in a Slurm job, but not started by srun or mpirun", "one process trains, the others idle", do)


def check_home(found: Findings, here: Here) -> None:
    """Check that this user has a home directory: a container may run with any user id."""
    try:
        Path.home()
    except RuntimeError:
        do = "export HOME=DIR, a directory that you can write to"
        found.problem("HOME is not set, and this user id has no name", "mpirun crashes (SIGSEGV, exit code 139)", do)


def check_name(found: Findings, here: Here) -> None:
    """Check that this host's name resolves, and note its address."""
    name = socket.gethostname()
    try:
        here.address = socket.gethostbyname(name)
    except OSError as error:
        do = f"echo '127.0.1.1 {name}' >> /etc/hosts (one host), or the host's real address there or in DNS (several)"
        found.problem(f"this host's name {name} does not resolve ({error})", "Gloo aborts, with a core dump", do)
        return
    found.ok(f"{name} resolves to {here.address}")


def check_interfaces(found: Findings, here: Here) -> None:
    """Check that the named network interfaces exist, and report the speed of each that is up."""
    import psutil

    known, states = psutil.net_if_addrs(), psutil.net_if_stats()
    for variable in ("HOROVOD_GLOO_IFACE", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "OMPI_MCA_btl_tcp_if_include"):
        named = os.environ.get(variable, "")
        for name in [] if named.startswith("^") else named.split(","):  # ^: all but these
            plain = name.lstrip("=")
            if plain and "/" not in plain and not any(interface.startswith(plain) for interface in known):
                do = f"name one of {', '.join(sorted(known))} ({variable}, or --interface)"
                found.problem(f"{variable}={name}: no such interface here", "the ranks would not find each other", do)
    for name in sorted(known):
        state = states.get(name)
        addresses = [entry.address for entry in known[name] if entry.family == socket.AF_INET]
        if name == "lo" or state is None or not state.isup or not addresses:
            continue
        speed = f"{state.speed} Mbit/s" if state.speed else "speed unknown"
        line = f"interface {name}: {addresses[0]}, {speed}, MTU {state.mtu}"
        if 0 < state.speed < SLOW_INTERFACE:
            found.warning(line, "gradients would crawl", "choose a faster one with --interface, or --compression fp16")
        else:
            found.ok(line)


def check_memory_and_disk(found: Findings, here: Here) -> None:
    """Check the sizes of /dev/shm and of the scratch directory."""
    shared = shutil.disk_usage("/dev/shm") if Path("/dev/shm").is_dir() else None
    least = LEAST_FOR_NCCL if torch.cuda.is_available() else LEAST_SHARED_MEMORY
    if shared is None or shared.total < least:
        size = "missing" if shared is None else f"{shared.total / 2**20:.0f} MiB"
        do = "docker run --ipc=host; Kubernetes: emptyDir medium Memory at /dev/shm; Singularity shares the host's"
        found.warning(f"/dev/shm is {size}", "NCCL, MPI and data loader workers end in a bus error when it is full", do)
    scratch = Path(tempfile.gettempdir())
    try:
        with tempfile.NamedTemporaryFile(dir=scratch) as file:
            file.write(b"x")
        free = shutil.disk_usage(scratch).free
    except OSError as error:
        do = "set TMPDIR to a local disk"
        found.problem(f"{scratch} cannot be written: {error.strerror}", "MPI and torch need it", do)
        return
    if free < LEAST_SCRATCH:
        what = f"{scratch} has {free / 2**20:.0f} MiB left"
        found.warning(what, "MPI and torch keep files there", "set TMPDIR to a directory with more space")
    else:
        found.ok(f"scratch {scratch}: {free / 2**30:.0f} GiB free")


def check_data(found: Findings, here: Here) -> None:
    """Report where MNIST would be read from."""
    directory = here.flags.data_dir
    data = idx.load("mnist" if directory is not None else "auto", directory, download=False)
    found.ok(f"data: {data.reason}")
