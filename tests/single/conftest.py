"""What a test trains in this process ends with the test: its time limit for the end (hangs/leaving.py), too."""

import sys

import pytest


@pytest.fixture(autouse=True)
def this_process_works_on():
    yield
    if leaving := sys.modules.get("hvdtrain.hangs.leaving"):
        leaving.stop()
