"""The tests of tests/parallel, the same files at every rank count and under every launcher."""

import sys

import pytest

from .launchers import LAUNCHERS, ROOT, TORCHRUN, launch

ENGINES = [*((launcher, "horovod") for launcher in LAUNCHERS), ("mpirun", "ddp"), ("torchrun", "ddp")]


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize(("launcher", "engine"), ENGINES)
def test_parallel_suite(launcher, engine, ranks):
    start = {**LAUNCHERS, "torchrun": TORCHRUN}[launcher].format(ranks=ranks)
    python = "" if launcher == "torchrun" else sys.executable
    suite = f"{python} -m pytest -x -q --color=no -p no:cacheprovider {ROOT}/tests/parallel"
    done = launch(f"{start} {suite}", timeout=120, HVDTRAIN_TEST_ENGINE=engine)
    assert done.code == 0, done
    assert done.stdout.count(" passed") == ranks, done
