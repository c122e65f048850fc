"""Fixtures for tests that every rank runs: one engine for the whole session, and MPI's own answers as the oracle.

    mpirun -np 3 python -m pytest tests/parallel          directly
    pytest tests/e2e/test_parallel.py                     under every launcher, at 1, 2 and 3 ranks, with a time limit

A test that fails on one rank leaves the others in their collective, so the first failure ends the rank (`-x`) and the
launcher ends the job.
"""

import pytest

from hvdtrain.world import start


@pytest.fixture(scope="session")
def world():
    with start("horovod", device="cpu") as world:
        yield world


@pytest.fixture(scope="session")
def mpi(world):
    """mpi4py's communicator over the same ranks: another implementation to compare with."""
    if not (world.hvd.mpi_built() and world.hvd.mpi_enabled()):
        pytest.skip("Horovod runs over Gloo here: no MPI among the ranks to compare with")
    import mpi4py

    mpi4py.rc.initialize = False  # Horovod has done so, and finishes it too
    mpi4py.rc.finalize = False
    from mpi4py import MPI

    assert MPI.COMM_WORLD.size == world.size
    return MPI
