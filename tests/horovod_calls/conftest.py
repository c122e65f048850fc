"""Horovod as our patches leave it: what scripts call, with nothing of hvdtrain between. Every rank runs these files.

    horovodrun --gloo -np 3 python -m pytest tests/horovod_calls       directly
    pytest tests/e2e/engines/test_horovod_calls.py           over MPI and Gloo, 2 and 3 ranks

Values are small integers, exact in every type and order of summation, so that every build and setting has to give the
same. HVDTRAIN_TEST_PROCESS_SETS says which process sets there are besides the global one: `none`, `static` (named in
`hvd.init`) or `dynamic`. They decide how Horovod's background thread waits (launch/patches/18 and 19).

A test that fails on one rank leaves the others in their collective: run with `-x`, and with a time limit.
"""

import os

import horovod.torch
import pytest

SETS = ("none", "static", "dynamic")


class Sets:
    """The process sets of even and of odd ranks, as registered with `hvd.init`: at 2 ranks one member each."""

    def __init__(self, kind: str):
        self.kind = kind
        self.even = self.odd = None

    def init(self, hvd) -> None:
        os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = str(int(self.kind == "dynamic"))
        if self.kind != "static":
            hvd.init()
            return
        # Ranks are named before `hvd.init` tells how many there are: the launcher knows.
        size = int(os.environ.get("OMPI_COMM_WORLD_SIZE") or os.environ["HOROVOD_SIZE"])
        self.even, self.odd = (hvd.ProcessSet(list(range(first, size, 2))) for first in (0, 1))
        hvd.init(process_sets=[self.even, self.odd])


@pytest.fixture(scope="session")
def sets():
    return Sets(os.environ.get("HVDTRAIN_TEST_PROCESS_SETS", "none"))


@pytest.fixture(scope="session")
def hvd(sets):
    """Horovod, running. Where MPI carries it, it can be started once in a process only."""
    sets.init(horovod.torch)
    yield horovod.torch
    horovod.torch.shutdown()


@pytest.fixture
def restartable(hvd):
    if hvd.mpi_enabled():
        pytest.skip("MPI cannot be started twice in one process")
    return hvd
