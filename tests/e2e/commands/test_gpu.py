"""A rehearsal of tests/gpu on processors: every test, rate and script runs, so that none fails on a typo where a GPU is."""

import json
import os

import pytest

from tests.e2e.launchers import BIN, PYTHON, ROOT, environment, launch
from tests.gpu.rates import rows


@pytest.mark.slow
@pytest.mark.leaves("pytest-of-")  # directories of the pytest that it starts
@pytest.mark.timeout(2400)
def test_the_script_runs_its_tests_and_rates_on_processors(tmp_path):
    own = dict(OUT=str(tmp_path / "out"), WORK=str(tmp_path / "work"), DEVICE="cpu", QUICK="--quick", NO_INSTALL="1")
    own |= dict(TESTS_AT_ONCE="2", TEST_SECONDS="1500", PATH=f"{BIN}:{environment()['PATH']}")
    done = launch("bash tests/gpu/alone.sh 2300", timeout=2350, **own)
    assert done.code == 0, done
    assert "tests ended with 0" in done.stdout, done
    measured = [json.loads(line) for line in (tmp_path / "out" / "rates.jsonl").read_text().splitlines()]
    assert {row["row"] for row in measured} == set(rows())
    wrong = {row["row"]: row["error"] for row in measured if "error" in row}
    assert set(wrong) == {"horovod-2x128-patched"}, wrong  # which has nothing to compare with here


def test_without_a_gpu_each_is_skipped_with_the_reason_in_sight():
    done = launch(f"{PYTHON} -m pytest -q -m gpu -p no:cacheprovider tests/gpu -k sum_of", cwd=ROOT, **dict(os.environ))
    assert done.code == 0, done
    assert "torch sees no GPU here" in done.stdout, done
