"""For all tests, in whatever process pytest runs."""

import os

from tests.hidden_gpus import HIDDEN

os.environ.update(HIDDEN)  # before any test imports torch; what a test starts inherits it
