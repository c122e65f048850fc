"""Directories of this user for what processes share: unpacked data sets, tokens, indexes of shards, compiled code.

If eight ranks each unpack and hash 55 MB, two cores need a second or more. Therefore the first process does so and stores
the result, and the others map it. The cache is optional: if it is not writable, every process does the work itself.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hvdtrain.engines import files
from hvdtrain.engines.lock import Lock

STALE_SECONDS = 3600.0  # age after which a partial file is considered abandoned

directory = files.cache_directory


@contextmanager
def locked(path: Path, seconds: float) -> Iterator[None]:
    """Context manager for work that one process of the host does in directory `path`, while the others wait.

    After `seconds`, or where there are no locks, the process does it beside the others: files are replaced as a whole.
    """
    lock = None
    with suppress(OSError):  # also TimeoutError
        lock = Lock(path, seconds)
    try:
        yield
    finally:
        if lock is not None:
            lock.release()
