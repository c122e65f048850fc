"""For all tests, in whatever process pytest runs."""

import os
import signal
import sys

from tests.hidden_gpus import HIDDEN

# Before any test imports torch; what a test starts inherits it.
os.environ.update(HIDDEN)
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # who waits leaves the cores to others: tests run side by side
# What tests import and start is compiled once, and not in each of hundreds of processes.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # under nohup, whose training is to ignore it; tests send it
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
