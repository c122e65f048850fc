"""A rehearsal of the first day on a GPU: every row's commands, on processors. nvidia-smi is replaced: it lists a GPU."""

import json
import sys

import pytest

from hvdtrain.analysis.gpu_rows import ROWS
from hvdtrain.gpu_day import PAGE, RECORD
from tests.e2e.launchers import BIN, environment, launch
from tests.single.analysis.nvidia_smi import GPU, put

# In parts: each within the limit of a launch.
NAMES = [row.name for row in ROWS]
PARTS = [NAMES[first : first + 8] for first in range(0, len(NAMES), 8)]


@pytest.mark.slow
@pytest.mark.parametrize("names", PARTS, ids=lambda names: f"{names[0]} to {names[-1]}")
def test_every_row_runs_on_processors(names, tmp_path):
    (tools := tmp_path / "tools").mkdir()
    put(tools, [GPU.format(0)])
    path = f"{tools}:{BIN}:{environment()['PATH']}"
    out = tmp_path / "out"
    flags = f"--device cpu --quick --only {','.join(names)} --output-dir {out}"
    done = launch(f"{sys.executable} -m hvdtrain.gpu_day {flags}", timeout=840, PATH=path)
    rows = {row["name"]: row for row in json.loads((out / RECORD).read_text())["rows"]}
    seen = {name: (rows[name]["verdict"], rows[name]["showed"]) for name in names}
    wrong = {name: what for name, what in seen.items() if what[0] != "ok"}
    assert wrong == {}, done
    assert done.code == 0, done
    assert done.left_behind == 0, done
    assert (out / PAGE).read_text().startswith("# The first day on a GPU\n\n**A rehearsal on the processor.**")
