"""Settings for speed and for where a rank runs: variables of Horovod and MPI, read in `hvd.init()`, and those of malloc.
And what Gloo needs of a host.

Does not import torch.
"""

import contextlib
import ctypes
import os
import socket
from collections.abc import Mapping
from pathlib import Path

from hvdtrain.engines import files
from hvdtrain.engines.errors import UserError
from hvdtrain.engines.launchers import GLOO_ALONE, OPEN_MPI_NAME, alone_in_pid_namespace, in_batch_shell

# With the defaults, each rank has three threads that spin or poll: MPI's progress engine, Horovod's background thread, and
# the thread that waits for a result. On a host with as many ranks as cores, they take CPU time from the threads that
# compute (measured in docs/evidence/speed.md).
FAST = {
    # MPI yields the core while it polls. Open MPI reads this in MPI_Init; other MPIs ignore it.
    "OMPI_MCA_mpi_yield_when_idle": "1",
    # Waiting threads sleep until they are woken. Only our build of Horovod has this (launch/patches/18 and 19).
    "HOROVOD_WAKE_ON_ENQUEUE": "1",
    # Polling interval in milliseconds. The default of 1 ms is a large part of a small model's step. Our build polls only
    # while other ranks are late.
    "HOROVOD_CYCLE_TIME": "0.1",
    # How many tensors Horovod remembers, and need not negotiate again. Read before there is a model, so more than models
    # have; the default of RELEASED_CAPACITY is less. Half a megabyte for each rank.
    "HOROVOD_CACHE_CAPACITY": "65536",
}
RELEASED_CAPACITY = "1024"
# Reduce each bucket of gradients separately. If buckets are fused with others that happen to be ready, the order of the
# sums changes from run to run.
# Trap: this also puts every ungrouped tensor into a group of its own, and is not safe with `hvd.join()`: the zeros that a
# joined rank contributes for a tensor that it did not queue are fused with their neighbors on that rank, but not on the
# others (MPI_ERR_TRUNCATE; unpatched Horovod 0.28.1, its own `test_torch.py -k join_allreduce`).
FIXED_SUMS = {"HOROVOD_DISABLE_GROUP_FUSION": "1"}
# Over NCCL: `synchronize` has the GPU wait for the sums, instead of the thread that queues the GPU's work. Only for a build
# with launch/patches/optional/caller-waits.patch.
ON_GPUS = {"HOROVOD_ENABLE_ASYNC_COMPLETION": "1"}
# Open MPI ends a rank a second after its mpirun was killed. With this delay in seconds, the rank has the time to save a
# checkpoint (guards/watch.py). It is less than `resume.RUN_LOCK_SECONDS`, for which the next attempt waits.
# Also an MPI error then ends its rank later by as much.
ABORT_DELAY = {"OMPI_MCA_opal_abort_delay": "8"}

# <malloc.h>; see mallopt(3). 32 MiB is the maximum of M_MMAP_THRESHOLD.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
NEVER, LARGEST = 2**31 - 1, 32 * 2**20
OWN_CHOICE = ("GLIBC_TUNABLES", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_TRIM_THRESHOLD_")


def tuned_environment(environment: Mapping[str, str], wanted: Mapping[str, str] = FAST | FIXED_SUMS) -> dict[str, str]:
    """Return the `wanted` variables that are not in `environment`. Set them before `hvd.init()`."""
    return {name: value for name, value in wanted.items() if name not in environment}


def prepare_environment(size: int, launcher: str, *, gloo_built: bool) -> list[str]:
    """Set what the place of this rank needs, whatever the tuning. Return notes of it. Raises UserError where Horovod would
    crash."""
    # Without a launcher, Open MPI 4 would start a daemon first. That takes time, and fails if MPI was relocated.
    os.environ.setdefault("OMPI_MCA_ess_singleton_isolated", "1")
    in_slurm = launcher == "Slurm" or (launcher == "none" and in_batch_shell(os.environ))
    if size == 1 and in_slurm and "PMIX_RANK" not in os.environ and gloo_built:
        os.environ.update(GLOO_ALONE)  # Open MPI would end a single process of a Slurm job, for want of PMI
    if launcher == OPEN_MPI_NAME:
        os.environ.update(tuned_environment(os.environ, ABORT_DELAY))
    if "HOROVOD_GLOO_RENDEZVOUS_ADDR" in os.environ:
        refuse_unusable(os.environ)
    first = ""
    with contextlib.suppress(OSError):  # /proc may hide the processes of others (hidepid)
        first = Path("/proc/1/comm").read_text().strip()
    if not alone_in_pid_namespace(os.environ, os.getppid(), first) or "OMPI_MCA_btl" in os.environ:
        return []
    os.environ.update({"OMPI_MCA_btl": "self,tcp"})
    return ["MPI over TCP: each rank has a PID namespace of its own, where MPI's shared memory crashes"]


def keep_freed_memory(environment: Mapping[str, str]) -> bool:
    """Make malloc keep freed memory for the next step. Return whether this succeeded. Settings in `environment` are kept.

    By default, malloc returns the memory of a step's activations to the kernel. For the ConvNet with a batch of 64, that
    takes a third of the time (docs/evidence/tuning.md). With this setting, the process keeps the memory of its largest step.
    """
    if any(name in environment for name in OWN_CHOICE):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # not glibc
        return False
    # Else the kernel allocates, clears and maps each page of a
    # step's activations again: 2,900 page faults for the ConvNet.
    return bool(mallopt(M_MMAP_THRESHOLD, LARGEST)) and bool(mallopt(M_TRIM_THRESHOLD, NEVER))


# ---- what Gloo needs of a host, checked before Horovod starts: it would crash

GLOO_SIZES = ("SIZE", "LOCAL_SIZE", "CROSS_SIZE")  # of the groups in which Gloo connects every rank with every other
GLOO_SPARE_FILES = 16  # open files besides Gloo's connections: the watchdog's, metrics, checkpoints
SERVER_SECONDS = 30.0  # for the rendezvous server to accept a connection


def refuse_unknown_own_name(name: str) -> None:
    """Raise UserError where the host's own `name` has no address of this host: Gloo looks it up, and crashes without one."""
    try:
        # Bytes: any name that a host may have.
        addresses = socket.getaddrinfo(os.fsencode(name), None, type=socket.SOCK_STREAM)
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
