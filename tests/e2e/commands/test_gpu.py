"""A rehearsal of tests/gpu on processors: every test, rate and script runs, so that none fails on a typo where a GPU is."""

import json
import os
from pathlib import Path

import pytest

from tests.e2e.launchers import BIN, PYTHON, ROOT, environment, launch
from tests.gpu.rates import rows


def without_ssh(folder: Path) -> str:
    """Return a PATH on which all is found but ssh: some machines with a GPU have none."""
    path = [Path(BIN), *map(Path, environment()["PATH"].split(os.pathsep))]
    for place, directory in enumerate(path):
        if (directory / "ssh").exists():
            path[place] = folder / str(place)
            path[place].mkdir(parents=True)
            for program in directory.iterdir():
                if program.name not in ("ssh", "slogin", "rsh"):
                    (path[place] / program.name).symlink_to(program)
    return os.pathsep.join(map(str, path))


@pytest.mark.slow
@pytest.mark.leaves("pytest-of-")  # directories of the pytest that it starts
@pytest.mark.timeout(2400)
def test_the_script_runs_its_tests_and_rates_on_processors(tmp_path):
    own = dict(OUT=str(tmp_path / "out"), WORK=str(tmp_path / "work"), DEVICE="cpu", QUICK="--quick", NO_INSTALL="1")
    own |= dict(TESTS_AT_ONCE="2", TEST_SECONDS="1500", PATH=without_ssh(tmp_path / "bin"))
    done = launch("bash tests/gpu/alone.sh 2300", timeout=2350, **own)
    assert done.code == 0, done
    assert "tests ended with 0" in done.stdout, done
    assert "rates ended with 0" in done.stdout, done
    assert "error" not in done.stdout, done  # also what is compiled ahead
    measured = [json.loads(line)["row"] for line in (tmp_path / "out" / "rates.jsonl").read_text().splitlines()]
    assert measured == list(rows())


@pytest.mark.slow
def test_without_a_gpu_each_is_skipped_with_the_reason_in_sight():
    done = launch(f"{PYTHON} -m pytest -q -m gpu -p no:cacheprovider tests/gpu -k sum_of", cwd=ROOT, **dict(os.environ))
    assert done.code == 0, done
    assert "torch sees no GPU here" in done.stdout, done
