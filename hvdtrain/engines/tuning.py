"""The variables that make Horovod and MPI fast, each read once in `hvd.init()`. Does not import torch."""

from collections.abc import Mapping

from hvdtrain.engines.cores import share_of_host
from hvdtrain.engines.launchers import bound_by_default

# As released, each rank has three threads that spin or poll: MPI's progress engine, Horovod's background cycle, and the
# one that waits for a result. On a host with as many ranks as cores they take the cores from the threads that compute
# (docs/speed.md has the measurements).
FAST = {
    # MPI gives up its time slice while it polls. Open MPI reads it in MPI_Init; the others do not know it.
    "OMPI_MCA_mpi_yield_when_idle": "1",
    # Our build's (launch/patches/18 and 19): waiting threads sleep until they are woken. Horovod as released ignores it,
    "HOROVOD_WAKE_ON_ENQUEUE": "1",
    # and polls, in milliseconds; its default of 1 is much of a small model's step. Ours only while others are late.
    "HOROVOD_CYCLE_TIME": "0.1",
}
# Each bucket of gradients travels by itself: fused with whichever others happen to be ready, sums lose their order.
# Trap: it makes a group of its own of every ungrouped tensor, too, and is not safe where a rank calls `hvd.join()`: what
# a joined rank puts in for a tensor that it did not queue is fused with its neighbours there and not on the others
# (MPI_ERR_TRUNCATE; Horovod 0.28.1 as released, its own `test_torch.py -k join_allreduce`).
FIXED_SUMS = {"HOROVOD_DISABLE_GROUP_FUSION": "1"}


def tuned_environment(environment: Mapping[str, str], wanted: Mapping[str, str] = FAST | FIXED_SUMS) -> dict[str, str]:
    """Return the `wanted` variables that `environment` does not have: to be set before `hvd.init()`."""
    return {name: value for name, value in wanted.items() if name not in environment}


def own_script(environment: Mapping[str, str], ranks: int, cores: int, quota: float) -> str:
    """Return what a Horovod script of the user's own has on this host, and what hvdtrain.tuned would give it.

    ranks: of this host. cores: that each may run on, once mpirun's own binding is undone. quota: see `cpu_quota`.
    """
    bound, asked = bound_by_default(environment), environment.get("OMP_NUM_THREADS", "")
    have = min(cores, quota)
    own = int(asked) if asked.isdecimal() else 1 if bound else cores
    tuned = int(asked) if asked.isdecimal() else share_of_host(ranks, quota)[0]

    def shown(threads: int) -> str:
        return f"{ranks} rank{'s'[: ranks > 1]} x {threads} thread{'s'[: threads > 1]}"

    said = f"a script of your own: {shown(own)} on {have:g} core{'s'[: have > 1]}{', each rank bound to one' * bound}"
    if own == tuned and not bound:
        return f"{said}, with hvdtrain.tuned as well; threads that wait would no longer poll"
    return f"{said}; with hvdtrain.tuned {shown(tuned)} (python -m hvdtrain.tuned train.py)"
