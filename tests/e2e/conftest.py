"""What holds for every test with a real launcher: a time limit of its own, and nothing left behind.

Looked for after each test, and after each module for what its shared fixtures started: processes, shared memory and
semaphores in /dev/shm, folders in TMPDIR. Each has a TMPDIR and a mark in the environment of its own, by which its own are
told from those of a neighbour that runs at the same time.
"""

import contextlib
import os
import re
import shutil
import signal
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from .launchers import GRACE_SECONDS, MARK, kill, members

LIMIT, SLOW_LIMIT = 400, 900  # seconds; a launch has less, and says more when it is over (`launch`)
FAILED = pytest.StashKey[bool]()
PODMANS_OWN = "libpod_lock"  # in /dev/shm, of all its containers, whoever's
TORCHS_OWN = ("torchinductor_", "torchelastic_")  # its cache; the empty log folders that torchrun never removes

# A shell that runs pytest in the background has it ignore SIGINT; so would each job here, and never stop on one.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(SLOW_LIMIT if item.get_closest_marker("slow") else LIMIT))


def pytest_runtest_setup(item: pytest.Item) -> None:
    until = float(os.environ.get("HVDTRAIN_TEST_UNTIL") or "inf")
    if item.get_closest_marker("slow") and time.time() > until:
        pytest.skip("no time left: HVDTRAIN_TEST_UNTIL has passed")


class Watch(threading.Thread):
    """Looks once a second at what of /dev/shm the processes of a job use: its own, and no neighbour's."""

    def __init__(self, job: str):
        super().__init__(daemon=True)
        self.job = job
        self.used: set[Path] = set()
        self.over = threading.Event()

    def run(self) -> None:
        while not self.over.wait(1.0):
            for pid in members(self.job):
                with contextlib.suppress(OSError):  # it ended meanwhile
                    maps = Path(f"/proc/{pid}/maps").read_text(errors="replace")
                    found = {Path(name) for name in re.findall(r"(/dev/shm/.+)$", maps, re.M)}
                    self.used |= {path for path in found if path.name != PODMANS_OWN}

    def left(self, folder: Path) -> dict[str, list]:
        return {
            "processes": members(self.job),
            "shared memory": sorted(path.name for path in self.used if path.exists()),
            "temporary files": sorted(path.name for path in folder.iterdir() if not path.name.startswith(TORCHS_OWN)),
        }


@contextlib.contextmanager
def nothing_left(node: pytest.Item | pytest.Collector) -> Iterator[None]:
    """Where tests of the node have failed, what they left is removed without a word; so is what `leaves` allows."""
    job = f"{os.environ.get('PYTEST_XDIST_WORKER', 'test')}-{uuid.uuid4().hex[:12]}"
    folder = Path(
        tempfile.mkdtemp(prefix="hvd")
    )  # short: Open MPI has sockets below it, whose names have 107 characters
    allowed = tuple(name for marker in node.iter_markers("leaves") for name in marker.args)
    watch = Watch(job)
    watch.start()

    def found() -> dict[str, list]:
        return {
            what: some
            for what, names in watch.left(folder).items()
            if (some := [name for name in names if not allowed or not str(name).startswith(allowed)])
        }

    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(MARK, job)
            patch.setenv("TMPDIR", str(folder))
            yield
        until = time.monotonic() + GRACE_SECONDS
        while (left := found()) and not node.stash.get(FAILED, False) and time.monotonic() < until:
            time.sleep(0.1)
    finally:
        watch.over.set()
        kill(job)
        for path in watch.used:
            path.unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
    assert not left or node.stash.get(FAILED, False), f"left behind: {left}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Iterator[None]:
    report = yield
    if report.failed:
        item.stash[FAILED] = item.parent.stash[FAILED] = True
    return report


@pytest.fixture(scope="module", autouse=True)
def nothing_left_by_the_module(request: pytest.FixtureRequest) -> Iterator[None]:
    with nothing_left(request.node):
        yield


@pytest.fixture(autouse=True)
def nothing_left_by_the_test(nothing_left_by_the_module, request: pytest.FixtureRequest) -> Iterator[None]:
    with nothing_left(request.node):
        yield
