"""Make glibc's malloc keep freed memory."""

import ctypes
from collections.abc import Mapping

# <malloc.h>; mallopt(3) says what they mean, and that no block above 32 MiB can be asked to come from the heap.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
NEVER, LARGEST = 2**31 - 1, 32 * 2**20
OWN_CHOICE = ("GLIBC_TUNABLES", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_TRIM_THRESHOLD_")


def keep_freed_memory(environment: Mapping[str, str]) -> bool:
    """Have malloc keep what is freed for the next step; tell whether it will. Not where `environment` has its own choice.

    As it comes, malloc returns the activations of a step to the kernel, which then has to find, clear and map every page of
    the next step's again: for the ConvNet and a batch of 64, 2,900 page faults and a third of the time (docs/results.md).
    A process keeps the memory of its largest step, which it would soon need again.
    """
    if any(name in environment for name in OWN_CHOICE):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library than glibc
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, LARGEST)) and bool(mallopt(M_TRIM_THRESHOLD, NEVER))
