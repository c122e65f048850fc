"""The cache of built wheels: one directory per target, with complete entries only."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
from pathlib import Path

from steps import user_cache
from target import Target


def default_cache() -> Path:
    """Return the default cache directory."""
    return user_cache() / "hvdtrain"


def cached_wheel(entry: Path) -> Path | None:
    """Return the wheel of a cache entry, or None if the entry is incomplete or damaged."""
    try:
        record = json.loads((entry / "entry.json").read_text())
        wheel = entry / record["wheel"]
        return wheel if hashlib.sha256(wheel.read_bytes()).hexdigest() == record["sha256"] else None
    except (OSError, ValueError, KeyError):
        return None


def store_wheel(entry: Path, wheel: Path, target: Target) -> Path:
    """Store a wheel and return its path. Each file gets its final name when it is complete, the record last."""
    record = {
        "wheel": wheel.name,
        "sha256": hashlib.sha256(wheel.read_bytes()).hexdigest(),
        "built_against": dataclasses.asdict(target),
    }
    partial = entry / f".{wheel.name}.{os.getpid()}"
    try:
        shutil.copyfile(wheel, partial)
        partial.replace(entry / wheel.name)
        partial.write_text(json.dumps(record, indent=2) + "\n")
        partial.replace(entry / "entry.json")
    finally:
        partial.unlink(missing_ok=True)
    return entry / wheel.name
