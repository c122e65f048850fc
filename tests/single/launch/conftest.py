"""Horovod's source as our patches leave it: its launcher runs from there, without a build."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "launch"))

import horovod_source
import target


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The patched release; skipped where only its wheel was needed so far."""
    sdist = target.default_cache() / "sources" / horovod_source.SDIST
    if not sdist.is_file():
        pytest.skip("Horovod's source is not in the cache: the wheel was")
    root = horovod_source.unpack(horovod_source.checked_sdist(sdist), tmp_path_factory.mktemp("source"))
    horovod_source.apply_patches(root)
    return root
