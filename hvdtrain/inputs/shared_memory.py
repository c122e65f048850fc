"""Whether the batches of DataLoader workers fit into /dev/shm, through which they reach their rank.

Where they do not, the kernel ends a worker with SIGBUS in the middle of training ("bus error").
"""

import shutil
from pathlib import Path

from hvdtrain.engines.errors import UserError
from hvdtrain.inputs.loading import PREFETCH

SHARED = Path("/dev/shm")
REMEDY = "make it larger (docker run --shm-size or --ipc=host; Kubernetes: emptyDir with medium: Memory)"


def needed(workers: int, batch_bytes: int, ranks: int) -> int:
    """Return the bytes that may be in /dev/shm at once: each worker's batches that are ready, and one on its way."""
    return ranks * (workers * PREFETCH + 1) * batch_bytes if workers else 0


def workers_that_fit(
    asked: int | None, automatic: int, batch_bytes: int, ranks: int, directory: Path = SHARED
) -> tuple[int, str | None]:
    """Return how many workers each of `ranks` ranks on this host has, and a line where /dev/shm allows fewer than
    `automatic`. asked: with --workers. Raises UserError where as many, or a single one, do not fit."""
    workers = automatic if asked is None else asked
    try:
        free = shutil.disk_usage(directory).free
    except OSError:  # none here: torch takes files elsewhere
        return workers, None
    if needed(workers, batch_bytes, ranks) <= free:
        return workers, None
    fit = (free // (ranks * batch_bytes) - 1) // PREFETCH
    has = f"/dev/shm has {free / 2**20:,.0f} MiB left"
    if asked is None and fit >= 1:
        wanted = needed(automatic, batch_bytes, ranks) / 2**20
        return fit, f"{fit} DataLoader workers instead of {automatic}, which need {wanted:,.0f} MiB: {has}: {REMEDY}"
    wanted = needed(workers if asked is not None else 1, batch_bytes, ranks) / 2**20
    count = f"{asked if asked is not None else 1} DataLoader worker{'s'[: asked is not None and asked > 1]}"
    less = f", or take --workers {max(0, fit)}" if asked is not None else ", or take --workers 0"
    each = f" of each of {ranks} ranks" if ranks > 1 else ""
    raise UserError(f"{has}, and the batches of {count}{each} need {wanted:,.0f} MiB: {REMEDY}{less}")
