"""On a node with GPUs, every test still trains on processors: nothing that a test starts sees one."""

import os
import subprocess
import sys

import pytest

from tests.e2e.cluster import SET_ENVIRONMENT
from tests.e2e.launchers import ROOT, environment, launch
from tests.hidden_gpus import HIDDEN, KEPT

SHOW = "import os; print([os.environ.get(name) for name in {!r}])"
NONE = "['', '', '']"


def test_no_process_of_a_test_sees_a_gpu():
    show = SHOW.format([*HIDDEN])
    assert {name: os.environ.get(name) for name in HIDDEN} == HIDDEN
    assert subprocess.check_output([sys.executable, "-c", show], text=True).strip() == NONE
    assert launch(f'{sys.executable} -c "{show}"').stdout.strip() == NONE


@pytest.mark.parametrize("name", HIDDEN)
def test_a_launch_hides_what_this_process_sees(name, monkeypatch):
    """Those that run without pytest, as make chaos does, start with `environment`, too."""
    monkeypatch.setenv(name, "0,1")
    assert environment()[name] == ""
    assert f" {name}=" in SET_ENVIRONMENT  # a login on another host begins with an environment of its own


def test_pytest_hides_them_before_the_tests_are_imported(tmp_path):
    """And the tests for GPUs are given those that were there, however pytest was started."""
    show = "import os, sys, subprocess, tests.conftest, tests.hidden_gpus as gpus; "
    show += "print(os.environ['CUDA_VISIBLE_DEVICES'] + '.', gpus.GIVEN, flush=True); "
    worker = (
        "subprocess.run([sys.executable, '-c', sys.argv[1]])"  # as pytest-xdist starts one, with the same environment
    )
    bare = {name: value for name, value in os.environ.items() if name not in (*HIDDEN, KEPT)}
    for given in ({"CUDA_VISIBLE_DEVICES": "3"}, {}):
        shown = subprocess.check_output(
            [sys.executable, "-c", show + worker, show], text=True, cwd=ROOT, env=bare | given
        )
        assert shown.splitlines() == [f". {given}"] * 2
