"""Fixtures for tests that every rank runs: one engine for the whole session.

    mpirun -np 3 python -m pytest tests/parallel          directly, with Horovod; HVDTRAIN_TEST_ENGINE names another engine
    pytest tests/e2e/engines/test_parallel.py             at 1, 2 and 3 ranks, over MPI and Gloo, with a time limit

A test that fails on one rank leaves the others in their collective, so the first failure ends the rank (`-x`) and the
launcher ends the job.
"""

import os
import shutil
import tempfile

import pytest

from hvdtrain.engines.choice import start_engine


@pytest.fixture(scope="session")
def engine():
    with start_engine(os.environ.get("HVDTRAIN_TEST_ENGINE", "horovod"), device="cpu") as engine:
        yield engine


@pytest.fixture(autouse=True)
def _same_collectives(engine):
    """Ranks call the same collectives in the same order, by which a rank that does not is found (guards/diagnosis.py)."""
    yield
    called = [engine.activity.called[0], list(engine.activity.called[1])]
    assert engine.all_gather_object(called, "called") == [called] * engine.size


@pytest.fixture
def shared_directory(engine):
    """Rank 0's, on every rank: all are on one host."""
    directory = engine.broadcast_object(tempfile.mkdtemp() if engine.rank == 0 else None, "directory")
    yield directory
    engine.barrier()
    if engine.rank == 0:
        shutil.rmtree(directory)
