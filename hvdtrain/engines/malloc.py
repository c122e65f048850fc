"""Make glibc's malloc keep freed memory."""

import ctypes
from collections.abc import Mapping

# <malloc.h>; see mallopt(3). 32 MiB is the maximum of M_MMAP_THRESHOLD.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
NEVER, LARGEST = 2**31 - 1, 32 * 2**20
OWN_CHOICE = ("GLIBC_TUNABLES", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_TRIM_THRESHOLD_")


def keep_freed_memory(environment: Mapping[str, str]) -> bool:
    """Make malloc keep freed memory for the next step. Return whether this succeeded. Settings in `environment` are kept.

    By default, malloc returns the memory of a step's activations to the kernel, which must then allocate, clear and map
    every page again in the next step: for the ConvNet with a batch of 64, 2,900 page faults and a third of the time
    (docs/evidence/tuning.md). With this setting, the process keeps the memory of its largest step.
    """
    if any(name in environment for name in OWN_CHOICE):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # not glibc
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, LARGEST)) and bool(mallopt(M_TRIM_THRESHOLD, NEVER))
