"""Every call of `horovod.torch` under real launchers: over MPI and Gloo, 2 and 3 ranks, our waiting code on and off."""

import itertools
import os
import shlex

import pytest

from tests.e2e.launchers import LAUNCHERS, PYTHON, ROOT, launch

pytestmark = pytest.mark.slow
TUNED = {"HOROVOD_CYCLE_TIME": "0.1", "OMPI_MCA_mpi_yield_when_idle": "1", "OMP_NUM_THREADS": "1"}
# HOROVOD_WAKE_ON_ENQUEUE=1 is our waiting code (launch/patches/18 and 19); 0 polls as the release does.
# Each pair of values is in one of these cases. After a change of launch/patches: HVDTRAIN_TEST_EVERY_CALL=1, for all 24, and
# a thousand restarts.
CASES = [
    ("mpirun", 2, 1, "none"), ("gloo", 3, 0, "none"), ("mpirun", 3, 0, "static"), ("gloo", 2, 1, "static"),
    ("mpirun", 3, 1, "dynamic"), ("gloo", 2, 0, "dynamic"),
]  # fmt: skip
RESTARTS = 100
if "HVDTRAIN_TEST_EVERY_CALL" in os.environ:
    RESTARTS = 1000
    CASES = list(itertools.product(("mpirun", "gloo"), (2, 3), (1, 0), ("none", "static", "dynamic")))


def run(launcher: str, ranks: int, wake: int, sets: str, **variables: str) -> None:
    suite = shlex.quote(str(ROOT / "tests" / "horovod_calls"))
    start = LAUNCHERS[launcher].format(ranks=ranks)
    variables |= TUNED | {"HOROVOD_WAKE_ON_ENQUEUE": str(wake), "HVDTRAIN_TEST_PROCESS_SETS": sets}
    command = f"{start} {PYTHON} -m pytest -x -q --color=no -p no:cacheprovider -W ignore {suite}"
    done = launch(command, **{"timeout": 600 if "HVDTRAIN_TEST_RESTARTS" in variables else 200}, **variables)
    assert done.code == 0, done
    assert done.stdout.count(" passed") == ranks, done


@pytest.mark.parametrize(("launcher", "ranks", "wake", "sets"), CASES)
def test_every_call(launcher, ranks, wake, sets):
    run(launcher, ranks, wake, sets)


@pytest.mark.parametrize("wake", [1, 0])
def test_many_restarts_in_one_process(wake):
    run("gloo", 2, wake, "none", HVDTRAIN_TEST_RESTARTS=str(RESTARTS))


@pytest.mark.parametrize("way", ["shutdown", "exit", "thread"])
@pytest.mark.parametrize("launcher", ["mpirun", "gloo"])
def test_a_job_ends_whenever_its_ranks_do(launcher, way):
    """HVDTRAIN_TEST_ENDINGS=60 makes it sixty different ends of each kind, on 3 and 2 ranks in turn."""
    program = shlex.quote(str(ROOT / "tests" / "horovod_calls" / "ending.py"))
    for seed in range(int(os.environ.get("HVDTRAIN_TEST_ENDINGS", "1"))):
        start = LAUNCHERS[launcher].format(ranks=3 - seed % 2)
        done = launch(f"{start} {PYTHON} {program} {way} {seed}", HOROVOD_WAKE_ON_ENQUEUE="1", **TUNED)
        assert (done.code, done.left_behind) == (0, 0), (seed, done)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("launcher", ["mpirun", "gloo"])
def test_a_group_of_more_tensors_than_horovod_remembers(launcher, ranks):
    """As released, ranks forgot different ones, and hung or crashed."""
    program = shlex.quote(str(ROOT / "tests" / "horovod_calls" / "groups.py"))
    start = LAUNCHERS[launcher].format(ranks=ranks)
    done = launch(f"{start} {PYTHON} {program} 1500", HOROVOD_DISABLE_GROUP_FUSION="1", **TUNED)
    assert done.code == 0, done
