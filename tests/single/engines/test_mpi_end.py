"""The end of MPI, in real processes, with an MPI whose end is not answered."""

import pytest

from tests.single.forked import ends_of

IMPORTS = """
import atexit, sys, threading, time
from types import SimpleNamespace
from hvdtrain.engines import horovod
"""
SCRIPT = """
horovod.END_SECONDS = 3.0  # many times what a thread needs to begin
atexit.register(print, "an earlier exit handler")

def shutdown():
    print("barrier" if arrived else "no barrier")
    print("MPI has removed its files")
    if {unanswered}:
        time.sleep(1000)
    print("answered")

arrived = []
basics = SimpleNamespace(shutdown=lambda: time.sleep(1000))
hvd = SimpleNamespace(barrier={barrier}, shutdown=shutdown, mpi_ops=SimpleNamespace(_basics=basics))
if {unanswered}:
    atexit.register(basics.shutdown)  # as Horovod does
horovod.shut_down_at_exit(hvd, killed=False)  # of a training before
horovod.shut_down_at_exit(hvd, killed={killed})
sys.stdout.write("kept, ")
sys.exit(75)
"""


FAILS = "lambda: 1 / 0"  # Horovod was shut down
ARRIVES = "lambda: arrived.append(1)"
CASES = {  # killed, unanswered, barrier; and what is said
    "killed": ((True, True, ARRIVES), "kept, barrier\nMPI has removed its files\n"),
    "killed after a shutdown": ((True, True, FAILS), "kept, no barrier\nMPI has removed its files\n"),
    "killed, and answered": ((True, False, ARRIVES), "kept, barrier\nMPI has removed its files\nanswered\n"),
    "at its end": ((False, False, FAILS), "kept, no barrier\nMPI has removed its files\nanswered\n"),
}


@pytest.fixture(scope="module")
def ends(tmp_path_factory):
    names = ("killed", "unanswered", "barrier")
    scripts = {name: SCRIPT.format(**dict(zip(names, how, strict=True))) for name, (how, _) in CASES.items()}
    return ends_of(IMPORTS, scripts, tmp_path_factory.mktemp("ends"))


@pytest.mark.parametrize("name", CASES)
def test_a_killed_job_does_not_wait_for_an_answer_and_keeps_its_exit_code(name, ends):
    assert ends[name] == (75, CASES[name][1] + "an earlier exit handler\n", "")
