"""Directories of this user for what processes share: unpacked data sets, tokens, indexes of shards, compiled code.

If eight ranks each unpack and hash 55 MB, two cores need a second or more. Therefore the first process does so and stores
the result, and the others map it. The cache is optional: if it is not writable, every process does the work itself.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hvdtrain.engines import files

STALE_SECONDS = 3600.0  # age after which a partial file is considered abandoned


def directory(name: str, kind: str = "datasets") -> Path | None:
    """Return $XDG_CACHE_HOME/hvdtrain/KIND/NAME (default: in ~/.cache), created if needed.

    None if that fails, or if another user could write there: what is in the cache counts as verified.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        # According to the XDG specification, relative paths are ignored.
        root = Path(base) if base.startswith("/") else Path.home() / ".cache"
        path = root / "hvdtrain" / kind / name
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        mine = not path.is_symlink() and path.stat().st_uid == os.geteuid() and not files.others_may_write(path)
    except (OSError, RuntimeError):  # RuntimeError: the user has no home directory
        return None
    return path if mine else None


@contextmanager
def locked(path: Path, seconds: float) -> Iterator[None]:
    """Context manager for work that one process of the host does in directory `path`, while the others wait.

    After `seconds`, or where there are no locks, the process does it beside the others: files are replaced as a whole.
    """
    lock = None
    with suppress(OSError):  # also TimeoutError
        lock = files.Lock(path, seconds)
    try:
        yield
    finally:
        if lock is not None:
            lock.release()
