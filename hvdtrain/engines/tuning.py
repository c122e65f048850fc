"""Environment variables that make Horovod and MPI fast. They are read in `hvd.init()`. Does not import torch."""

from collections.abc import Mapping

from hvdtrain.engines.cores import share_of_host
from hvdtrain.engines.launchers import bound_by_default

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
}
# Reduce each bucket of gradients separately. If buckets are fused with others that happen to be ready, the order of the
# sums changes from run to run.
# Trap: this also puts every ungrouped tensor into a group of its own, and is not safe with `hvd.join()`: the zeros that a
# joined rank contributes for a tensor that it did not queue are fused with their neighbors on that rank, but not on the
# others (MPI_ERR_TRUNCATE; unpatched Horovod 0.28.1, its own `test_torch.py -k join_allreduce`).
FIXED_SUMS = {"HOROVOD_DISABLE_GROUP_FUSION": "1"}
# Over NCCL: `synchronize` has the GPU wait for the sums, instead of the thread that queues the GPU's work.
ON_GPUS = {"HOROVOD_ENABLE_ASYNC_COMPLETION": "1"}


def tuned_environment(environment: Mapping[str, str], wanted: Mapping[str, str] = FAST | FIXED_SUMS) -> dict[str, str]:
    """Return the `wanted` variables that are not in `environment`. Set them before `hvd.init()`."""
    return {name: value for name, value in wanted.items() if name not in environment}


def own_script(environment: Mapping[str, str], ranks: int, cores: int, quota: float) -> str:
    """Return a line that compares the threads of a user's Horovod script on this host without and with hvdtrain.tuned.

    ranks: number of ranks on this host. cores: that each may run on without mpirun's default binding. quota: see
    `cpu_quota`.
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
