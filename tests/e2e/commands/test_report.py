"""The report of a real run that was killed and started again."""

import pytest

from tests.chaos.lineage import attacked
from tests.e2e.launchers import PYTHON, launch, train


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs: two ranks, killed in step 6 and started again; and a shorter one on one rank."""
    restarted, alone = (tmp_path_factory.mktemp(name) for name in ("restarted", "alone"))
    flags = "--log-steps 2"
    killed = attacked(restarted, flags=flags, attack=dict(rank=1, point="backward", count=6, kind="kill"))
    assert killed.code not in (0, 2, 75), killed
    done = attacked(restarted, flags=flags)
    assert done.code == 0, done
    done = train("alone", 1, f"--output-dir {alone}")
    assert done.code == 0, done
    return restarted, alone


@pytest.fixture(scope="module")
def made(runs, tmp_path_factory):
    """The directory of their report."""
    output_dir = tmp_path_factory.mktemp("report")
    done = launch(f"{PYTHON} -m hvdtrain.report {runs[0]} {runs[1]} --output-dir {output_dir}")
    assert done.code == 0, done
    assert done.stdout == f"{output_dir}/report.html: open it in a browser\n"
    return output_dir


@pytest.mark.slow
def test_a_run_that_was_killed_and_one_on_another_number_of_ranks(made):
    page = (made / "report.html").read_text()
    assert "after step 3 (192 samples)" in page
    assert page.count("data:image/png;base64,") == len(list(made.glob("*.png"))) == 6


def test_what_is_no_run_ends_in_one_line(tmp_path):
    done = launch(f"{PYTHON} -m hvdtrain.report {tmp_path}/none --output-dir {tmp_path}/report")
    assert done.code == 2, done
    assert done.stderr.startswith(f"hvdtrain.report: error: {tmp_path}/none is not a directory: name"), done
    assert done.stderr.count("\n") == 1, done
