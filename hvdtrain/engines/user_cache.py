"""This user's cache directory. Used also before torch is imported."""

import os
from pathlib import Path

from hvdtrain.engines import files


def directory(name: str, kind: str = "datasets") -> Path | None:
    """Return $XDG_CACHE_HOME/hvdtrain/KIND/NAME (default: in ~/.cache), created if needed.

    None if that fails, or if another user could write there: what is in the cache counts as verified.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        # According to the XDG specification, relative paths are ignored.
        root = Path(base) if base.startswith("/") else Path.home() / ".cache"
        root.mkdir(parents=True, exist_ok=True)
        path = root
        for part, mode in (("hvdtrain", 0o755), (kind, 0o755), (name, 0o700)):
            path = path / part
            path.mkdir(mode=mode, exist_ok=True)
        mine = not path.is_symlink() and path.stat().st_uid == os.geteuid() and not files.others_may_write(path)
    except (OSError, RuntimeError):  # RuntimeError: the user has no home directory
        return None
    return path if mine else None
