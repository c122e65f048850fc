"""`make bench`, its cheapest row: measured once, written down, and what was not measured said so."""

import re

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
    assert (tmp_path / "speed.png").read_bytes().startswith(b"\x89PNG")


def test_a_row_that_needs_what_is_not_there_says_so(tmp_path):
    where = f"--results {tmp_path}/results --docs {tmp_path}"
    done = launch(f"{PYTHON} -m tests.bench --rows whole --repeats 1 {where}", cwd=ROOT)
    assert done.code == 0, done
    assert "needs MNIST: name its directory with --data-dir" in (tmp_path / "speed.md").read_text()


def test_start_up_is_measured_in_seconds_and_memory():
    done = launch(f"{PYTHON} -m tests.bench.starting --ways starter --ranks 2 --rounds 1", cwd=ROOT)
    assert done.code == 0, done
    seconds, mebibytes = re.search(r"\| 2 \| starter \| ([0-9.]+) \(.*\) \| ([0-9,]+) \|", done.stdout).groups()
    assert float(seconds) > 0.5  # torch was imported
    assert float(mebibytes.replace(",", "")) > 100


@pytest.mark.parametrize(("asks", "megabytes"), [("own", ["0.0", "0.3"]), ("each", ["0.1", "32.7"])])
def test_the_rendezvous_of_many_ranks_is_measured(asks, megabytes):
    done = launch(f"{PYTHON} -m tests.bench.rendezvous --ranks 8,50 --asks {asks}", cwd=ROOT)
    assert done.code == 0, done
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["8", "50"], done
    assert [line.partition("s, ")[2].split()[0] for line in lines] == megabytes, done
