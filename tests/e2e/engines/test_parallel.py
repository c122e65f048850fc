"""The tests of tests/parallel: the same files at every number of ranks, over either transport, with either engine."""

import shlex

import pytest

from tests.e2e.launchers import LAUNCHERS, PYTHON, ROOT, TORCHRUN, launch

# All at 3 ranks over Gloo, which cost one import, and where parts are uneven. At 2 ranks over MPI, which horovodrun starts,
# the files that look at what is sent, and how.
SENT = ("collectives", "download", "flags", "late", "shards", "training", "waiting")
CASES = [("starter", "horovod", 3, ()), ("horovodrun", "horovod", 2, SENT)]
# Each engine at each number of ranks; under Gloo's other launcher, what is sent, and hosts as workers, which are slow tests.
# Of other launchers with ddp, test_engines.py has a training.
REST = [(launcher, "horovod", ranks, ()) for launcher, ranks in (("mpirun", 1), ("horovodrun", 2), ("mpirun", 3))]
REST += [("gloo", "horovod", 3, (*SENT, "hosts_as_workers")), *(("torchrun", "ddp", ranks, ()) for ranks in (1, 2, 3))]
CASES += [pytest.param(*case, marks=pytest.mark.slow) for case in REST]


@pytest.mark.leaves("pytest-of-")  # the suite's own temporary files
@pytest.mark.parametrize(("launcher", "engine", "ranks", "files"), CASES)
def test_parallel_suite(launcher, engine, ranks, files, request):
    """The slow cases also run the slow tests."""
    start = {**LAUNCHERS, "torchrun": TORCHRUN}[launcher].format(ranks=ranks)
    if launcher == "starter":  # once, and not on each rank; torch's optimizers import the last one
        start += " --import pytest,hvdtrain.training,torch._dynamo"
    python = "" if launcher == "torchrun" else PYTHON
    slow = request.node.get_closest_marker("slow") is not None
    marks = "-m ''" if slow else ""
    folder = ROOT / "tests" / "parallel"
    paths = shlex.join(str(folder / f"test_{name}.py") for name in files) or shlex.quote(str(folder))
    suite = f"{python} -m pytest {marks} -x -q --color=no -p no:cacheprovider {paths}"
    done = launch(f"{start} {suite}", timeout=800 if slow else 350, HVDTRAIN_TEST_ENGINE=engine)
    assert done.code == 0, done
    assert done.stdout.count(" passed") == ranks, done
