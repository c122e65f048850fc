"""The tests of tests/parallel, the same files at every rank count and under every launcher."""

import sys

import pytest

from .launchers import LAUNCHERS, ROOT, launch


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_parallel_suite(launcher, ranks):
    start = LAUNCHERS[launcher].format(ranks=ranks)
    suite = f"{sys.executable} -m pytest -x -q --color=no -p no:cacheprovider {ROOT}/tests/parallel"
    done = launch(f"{start} {suite}", timeout=120)
    assert done.code == 0, done
    assert done.stdout.count(" passed") == ranks, done
