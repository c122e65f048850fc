"""For all tests, in whatever process pytest runs."""

import os
import signal

from tests.hidden_gpus import HIDDEN

os.environ.update(HIDDEN)  # before any test imports torch; what a test starts inherits it
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # under nohup, whose training is to ignore it; tests send it
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
