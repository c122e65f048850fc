"""The tests of tests/parallel, the same files at every rank count and under every launcher."""

import shlex

import pytest

from tests.e2e.launchers import LAUNCHERS, PYTHON, ROOT, TORCHRUN, launch

RANKS = (1, 2, 3)
# Over MPI (horovodrun starts mpirun) and Gloo, at two and three ranks; then the rest of the combinations.
CASES = [("horovodrun", "horovod", 2), ("gloo", "horovod", 3)]
REST = [(launcher, "horovod", ranks) for launcher in LAUNCHERS for ranks in RANKS]
REST += [("torchrun", "ddp", ranks) for ranks in RANKS] + [
    ("mpirun", "ddp", 2),
    ("gloo", "ddp", 2),
    ("starter", "ddp", 3),
]
CASES += [pytest.param(*case, marks=pytest.mark.slow) for case in REST if case not in CASES]


@pytest.mark.leaves("pytest-of-")  # the suite's own temporary files
@pytest.mark.parametrize(("launcher", "engine", "ranks"), CASES)
def test_parallel_suite(launcher, engine, ranks):
    start = {**LAUNCHERS, "torchrun": TORCHRUN}[launcher].format(ranks=ranks)
    python = "" if launcher == "torchrun" else PYTHON
    suite = f"{python} -m pytest -x -q --color=no -p no:cacheprovider {shlex.quote(str(ROOT))}/tests/parallel"
    done = launch(f"{start} {suite}", timeout=200, HVDTRAIN_TEST_ENGINE=engine)
    assert done.code == 0, done
    assert done.stdout.count(" passed") == ranks, done
