"""Fixtures for tests that every rank runs: one engine for the whole session, and MPI's own answers as the oracle.

    mpirun -np 3 python -m pytest tests/parallel          directly, with Horovod; HVDTRAIN_TEST_ENGINE names another engine
    pytest tests/e2e/test_parallel.py                     under every launcher, at 1, 2 and 3 ranks, with a time limit

A test that fails on one rank leaves the others in their collective, so the first failure ends the rank (`-x`) and the
launcher ends the job.
"""

import os

import pytest

from hvdtrain.world import announced, start


@pytest.fixture(scope="session")
def world():
    with start(os.environ.get("HVDTRAIN_TEST_ENGINE", "horovod"), device="cpu") as world:
        yield world


@pytest.fixture(scope="session")
def mpi(world):
    """mpi4py's MPI over the same ranks: another implementation to compare with."""
    if not announced().launcher.startswith("mpirun"):
        pytest.skip("started without MPI: no MPI among the ranks to compare with")
    import mpi4py

    mpi4py.rc.initialize = world.engine != "horovod"  # Horovod has done so, and finishes it too
    mpi4py.rc.finalize = world.engine != "horovod"
    from mpi4py import MPI

    assert MPI.COMM_WORLD.size == world.size
    return MPI
