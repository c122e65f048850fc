"""How many DataLoader workers /dev/shm has room for. A directory with so much room left stands in its place."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from hvdtrain.engines.errors import UserError
from hvdtrain.inputs.loading import needed, workers_that_fit

MIB, BATCH = 2**20, 2 * 256 * 3 * 224**2  # of training and of an evaluation


@pytest.fixture
def left(monkeypatch):
    def leave(free: int | None):
        def usage(path):
            if free is None:
                raise FileNotFoundError(path)
            return SimpleNamespace(free=free)

        monkeypatch.setattr(shutil, "disk_usage", usage)

    return leave


def test_what_a_node_with_sixteen_cores_and_one_with_eight_ranks_need():
    assert needed(15, BATCH, 1) / 1e9 == pytest.approx(2.4, abs=0.05)
    assert needed(3, BATCH // 2, 8) / 1e9 == pytest.approx(2.2, abs=0.05)
    assert needed(0, BATCH, 8) == 0  # the rank itself loads


@pytest.mark.parametrize(
    ("asked", "free", "expected"),
    [
        (None, 4096 * MIB, (15, None)),
        (None, 1024 * MIB,
            (6, "6 DataLoader workers instead of 15, which need 2,278 MiB: /dev/shm has 1,024 MiB left: ")),
        (4, 1024 * MIB, (4, None)),
        (0, 1 * MIB, (0, None)),
        (None, None, (15, None)),  # none here
    ],
)  # fmt: skip
def test_automatic_workers_are_as_many_as_fit(asked, free, expected, left):
    left(free)
    workers, line = workers_that_fit(asked, 15, BATCH, 1, Path("/dev/shm"))
    assert workers == expected[0]
    assert line is None if expected[1] is None else line.startswith(expected[1])
    assert free is None or needed(workers, BATCH, 1) <= free


@pytest.mark.parametrize(
    ("asked", "ranks", "said"),
    [
        (8, 1, "the batches of 8 DataLoader workers need 1,250 MiB: make it larger .*, or take --workers 2"),
        (2, 8, "the batches of 2 DataLoader workers of each of 8 ranks need 2,940 MiB: .*, or take --workers 0"),
        (None, 8, "the batches of 1 DataLoader worker of each of 8 ranks need 1,764 MiB: .*, or take --workers 0"),
    ],
)
def test_more_than_fit_are_refused_in_one_line(asked, ranks, said, left):
    left(512 * MIB)
    with pytest.raises(UserError, match=f"/dev/shm has 512 MiB left, and {said}"):
        workers_that_fit(asked, 15, BATCH, ranks)
