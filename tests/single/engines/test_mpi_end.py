"""The end of MPI, in real processes, with an MPI whose end is not answered."""

import subprocess
import sys

import pytest

SCRIPT = """
import atexit, sys, threading, time
from types import SimpleNamespace
from hvdtrain.engines import horovod

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


@pytest.mark.parametrize(
    ("killed", "unanswered", "barrier", "said"),
    [
        (True, True, "lambda: arrived.append(1)", "kept, barrier\nMPI has removed its files\n"),
        (True, True, "lambda: 1 / 0", "kept, no barrier\nMPI has removed its files\n"),  # Horovod was shut down
        (True, False, "lambda: arrived.append(1)", "kept, barrier\nMPI has removed its files\nanswered\n"),
        (False, False, "lambda: 1 / 0", "kept, no barrier\nMPI has removed its files\nanswered\n"),
    ],
)
def test_a_killed_job_does_not_wait_for_an_answer_and_keeps_its_exit_code(killed, unanswered, barrier, said):
    script = SCRIPT.format(killed=killed, unanswered=unanswered, barrier=barrier)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (75, said + "an earlier exit handler\n", "")
