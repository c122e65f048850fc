"""Environment variables that make Horovod and MPI fast. They are read in `hvd.init()`. Does not import torch."""

from collections.abc import Mapping

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
