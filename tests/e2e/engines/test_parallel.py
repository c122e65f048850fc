"""The tests of tests/parallel: the same files at every rank count, under every launcher, with either engine."""

import shlex

import pytest

from tests.e2e.launchers import LAUNCHERS, PYTHON, ROOT, TORCHRUN, launch

# At 2 and 3 ranks, over MPI (horovodrun starts mpirun) and over Gloo, where three ranks cost one import.
CASES = [("horovodrun", "horovod", 2), ("starter", "horovod", 3)]
# Each engine at each number of ranks, over either transport, under each launcher.
REST = [("mpirun", "horovod", 1), ("mpirun", "horovod", 3), ("gloo", "horovod", 2), ("gloo", "horovod", 3)]
REST += [("torchrun", "ddp", 1), ("torchrun", "ddp", 2), ("torchrun", "ddp", 3)]
REST += [("mpirun", "ddp", 2), ("gloo", "ddp", 2), ("starter", "ddp", 3)]
CASES += [pytest.param(*case, marks=pytest.mark.slow) for case in REST]


@pytest.mark.leaves("pytest-of-")  # the suite's own temporary files
@pytest.mark.parametrize(("launcher", "engine", "ranks"), CASES)
def test_parallel_suite(launcher, engine, ranks, request):
    """The slow cases also run the slow tests."""
    start = {**LAUNCHERS, "torchrun": TORCHRUN}[launcher].format(ranks=ranks)
    python = "" if launcher == "torchrun" else PYTHON
    marks = "-m ''" if request.node.get_closest_marker("slow") else ""
    suite = f"{python} -m pytest {marks} -x -q --color=no -p no:cacheprovider {shlex.quote(str(ROOT))}/tests/parallel"
    done = launch(f"{start} {suite}", timeout=200, HVDTRAIN_TEST_ENGINE=engine)
    assert done.code == 0, done
    assert done.stdout.count(" passed") == ranks, done
