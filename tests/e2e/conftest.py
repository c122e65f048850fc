"""What holds for every test with a real launcher: a time limit of its own, and nothing left behind.

Looked for after each test, and after each module for what its shared fixtures started: processes, shared memory and
semaphores in /dev/shm, folders in TMPDIR. Each has a TMPDIR and a mark in the environment of its own, by which its own are
told from those of a neighbour that runs at the same time.
"""

import contextlib
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from .launchers import GRACE_SECONDS, MARK, kill, members

LIMIT, SLOW_LIMIT = 300, 600  # seconds; a launch has less, and says more when it is over (`launch`)
SHARED_MEMORY = Path("/dev/shm")
TORCHS_OWN = ("torchinductor_", "torchelastic_")  # its cache; the empty log folders that torchrun never removes


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(SLOW_LIMIT if item.get_closest_marker("slow") else LIMIT))


def shared_memory() -> set[str]:
    """Return what lies in /dev/shm and is this user's."""
    found = set()
    with contextlib.suppress(OSError):
        for path in SHARED_MEMORY.iterdir():
            with contextlib.suppress(OSError):  # gone meanwhile
                if path.stat().st_uid == os.geteuid():
                    found.add(str(path))
    return found


def mapped(paths: set[str]) -> set[str]:
    """Return those of `paths` that a living process uses: a neighbour's."""
    used = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            text = maps.read_text(errors="replace")
            used |= {path for path in paths if path in text}
    return used


def left(job: str, before: set[str], folder: Path) -> dict[str, list]:
    new = shared_memory() - before
    return {
        "processes": members(job),
        "shared memory": sorted(new - mapped(new)) if new else [],
        "temporary files": sorted(path.name for path in folder.iterdir() if not path.name.startswith(TORCHS_OWN)),
    }


@contextlib.contextmanager
def nothing_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    job = f"{os.environ.get('PYTEST_XDIST_WORKER', 'test')}-{uuid.uuid4().hex[:12]}"
    folder = Path(
        tempfile.mkdtemp(prefix="hvd")
    )  # short: Open MPI has sockets below it, whose names have 107 characters
    before = shared_memory()
    monkeypatch.setenv(MARK, job)
    monkeypatch.setenv("TMPDIR", str(folder))
    try:
        yield
        until = time.monotonic() + GRACE_SECONDS
        while any((found := left(job, before, folder)).values()) and time.monotonic() < until:
            time.sleep(0.1)
    finally:
        kill(job)
        shutil.rmtree(folder, ignore_errors=True)
    assert not any(found.values()), f"left behind: {found}"


@pytest.fixture(scope="module", autouse=True)
def nothing_left_by_the_module() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch, nothing_left(monkeypatch):
        yield


@pytest.fixture(autouse=True)
def nothing_left_by_the_test(nothing_left_by_the_module, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with nothing_left(monkeypatch):
        yield
