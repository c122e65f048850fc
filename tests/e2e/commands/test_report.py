"""The report of a real run that was killed and started again."""

import pytest

from tests.chaos.lineage import attacked
from tests.e2e.launchers import PYTHON, launch, train


@pytest.mark.slow
def test_a_run_that_was_killed_and_one_on_another_number_of_ranks(tmp_path):
    restarted, alone, report = (tmp_path / name for name in ("restarted", "alone", "report"))
    killed = attacked(restarted, flags="--log-steps 2", attack=dict(rank=1, point="backward", count=6, kind="kill"))
    assert killed.code not in (0, 2, 75), killed
    for done in (attacked(restarted, flags="--log-steps 2"), train("alone", 1, f"--output-dir {alone}")):
        assert done.code == 0, done
    done = launch(f"{PYTHON} -m hvdtrain.report {restarted} {alone} --output-dir {report}")
    assert (done.code, done.stdout) == (0, f"{report}/report.html: open it in a browser\n"), done
    page = (report / "report.html").read_text()
    assert "1 restart, from step 3" in page
    assert page.count("data:image/png;base64,") == 4
