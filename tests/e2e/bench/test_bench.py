"""`make bench`, its cheapest row: measured once, written down, and what was not measured said so."""

import pytest

from tests.e2e.launchers import PYTHON, ROOT, launch

pytestmark = pytest.mark.slow


def test_a_row_is_measured_and_written_down_and_more_repeats_are_added(tmp_path):
    where = f"--results {tmp_path}/results --docs {tmp_path}"
    for _ in range(2):
        done = launch(f"{PYTHON} -m tests.bench --rows start-2 --add --repeats 1 {where}", cwd=ROOT)
        assert done.code == 0, done
    page = (tmp_path / "speed.md").read_text()
    measured = [line for line in page.splitlines() if line.startswith("| start-2 | ") and "**" in line]
    assert len(measured) == 1, page
    assert "| 2 |" in measured[0], page
    assert "not measured yet" in page


def test_a_row_that_needs_what_is_not_there_says_so(tmp_path):
    where = f"--results {tmp_path}/results --docs {tmp_path}"
    done = launch(f"{PYTHON} -m tests.bench --rows whole --repeats 1 {where}", cwd=ROOT)
    assert done.code == 0, done
    assert "needs MNIST: name its directory with --data-dir" in (tmp_path / "speed.md").read_text()


def test_the_paths_of_a_step_and_of_a_checkpoint_are_those_that_are_taken():
    done = launch(f"{PYTHON} -m tests.bench.paths --functions step", cwd=ROOT)
    assert done.code == 0, done
    functions = [line.split()[-1] for line in done.stdout.splitlines() if line.startswith(("loop/", "engines/"))]
    assert {"Step.backward", "Step.update", "HorovodEngine.synchronize"} <= set(functions), done
    assert not [name for name in functions if "checkpoint" in name.lower()], done
    rows = [line.split("|")[1:3] for line in done.stdout.splitlines() if line.startswith("| ")]
    files = {name.strip(): int(number) for name, number in rows if number.strip().isdigit()}
    assert files["step"] < files["checkpoint"], done
    assert files["eager imports of training/__init__.py"] > files["eager imports of loop/step.py"] > 1
