"""DistributedDataParallel's own time limit ends no job: how long a rank may keep the others waiting is ours to say."""

import pytest

from tests.e2e.launchers import TORCHRUN, launch


@pytest.mark.slow
def test_a_collective_may_take_longer_than_the_meeting(tmp_path):
    script = tmp_path / "late.py"
    script.write_text("""
import time, torch
from hvdtrain.engines import ddp
from hvdtrain.engines.start import start
ddp.MEETING_SECONDS = 20.0
with start("ddp") as engine:
    if engine.rank == 1:
        time.sleep(25)
    print("sum", engine.sum(torch.ones(1), "late").item())
""")
    done = launch(f"{TORCHRUN.format(ranks=2)} {script}")
    assert done.code == 0, done
    assert done.stdout.count("sum 2.0") == 2
