"""What only a GPU can show: the rows of hvdtrain.gpu_day that judge, each as a test.

    python -m pytest tests/gpu          on a host with an NVIDIA GPU; with one, its ranks share it

Where there is none, each is skipped, and says so. The rows of speed have no threshold, and are not here.
"""

import os
import subprocess
import sys
import time

import pytest

from hvdtrain.analysis.gpu_rows import ROWS, Day, NotRun
from tests.hidden_gpus import seeing

COUNT = "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)"
JUDGED = (
    "build", "doctor", "one-rank", "sums", "ranks", "ddp", "dataparallel", "amp", "deterministic", "cpu-loss",
    "host-reads", "killed", "terminated", "stopped",
)  # fmt: skip


@pytest.fixture(scope="module")
def gpus() -> int:
    """How many there are, asked in another process: pytest's own must not start CUDA."""
    done = subprocess.run(
        [sys.executable, "-c", COUNT], env=seeing(dict(os.environ)), capture_output=True, text=True, timeout=120
    )
    return int(done.stdout) if done.returncode == 0 else 0


@pytest.mark.timeout(900)
@pytest.mark.parametrize("row", [row for row in ROWS if row.name in JUDGED], ids=lambda row: row.name)
def test_row(row, gpus, tmp_path, monkeypatch):
    if gpus < row.gpus:
        pytest.skip(f"needs {row.gpus} GPU{'s'[: row.gpus > 1]}; torch sees {gpus}")
    for name in set(os.environ) - set(visible := seeing(dict(os.environ))):
        monkeypatch.delenv(name)
    for name, value in visible.items():
        monkeypatch.setenv(name, value)
    day = Day(tmp_path, "cuda", quick=False, gpus=gpus, until=time.monotonic() + 800)
    day.begin(row.name)
    try:
        showed = row.run(day)
    except NotRun as error:
        pytest.skip(str(error))
    assert showed.ok, f"must show: {row.must}\nshowed: {showed.text}\n" + "\n".join(day.commands)
