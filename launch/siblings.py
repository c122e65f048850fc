"""Finds complete environments of other clones on this machine, by links in the cache, for a new clone to reuse."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path

import packages

RECORD = "hvdtrain-setup.json"
SAME = ("python", "requirements", "options", "horovod")


def announce(cache: Path, venv: Path) -> None:
    """Register a complete environment for later set-ups."""
    with contextlib.suppress(OSError):  # no cache: the next clone installs for itself
        (cache / "environments").mkdir(parents=True, exist_ok=True)
        link = cache / "environments" / hashlib.sha256(os.fsencode(venv)).hexdigest()[:16]
        if not link.is_symlink():
            link.symlink_to(venv)


def find(cache: Path, venv: Path, wanted: dict[str, object]) -> Path | None:
    """Return a complete environment, other than `venv`, with what is wanted, unmodified since its set-up; or None."""
    for link in sorted((cache / "environments").glob("*")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            found = link.readlink()
            if not (found / RECORD).is_file():
                link.unlink()  # that clone is gone
                continue
            record = json.loads((found / RECORD).read_text())
            if found == venv or found.stat().st_uid != os.getuid() or record["state"] != "complete":
                continue
            if any(record["wanted"][name] != wanted[name] for name in SAME):
                continue
            if record["packages"] == packages.packages(found) and packages.all_whole(found):
                return found
    return None
