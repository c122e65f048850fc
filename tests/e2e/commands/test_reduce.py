"""`hvdtrain.reduce --sweep` under a real launcher. (docs/quickstart.md has the values before and after.)"""

import json

import pytest

from tests.e2e.launchers import TORCHRUN, launch


@pytest.mark.slow
def test_sweep_writes_table_and_json(tmp_path):
    flags = f"--engine ddp --sweep --max-bytes 64 --seconds-per-size 0.01 --output-dir {tmp_path}/new"
    done = launch(f"{TORCHRUN.format(ranks=2)} -m hvdtrain.reduce {flags}", timeout=120)
    assert done.code == 0, done
    result = json.loads((tmp_path / "new/reduce.json").read_text())
    assert (result["engine"], result["world_size"]) == ("ddp", 2)
    measured = [(row["dtype"], row["bytes"]) for row in result["rows"]]
    assert measured == [(dtype, size) for dtype in ("float32", "float16") for size in (4, 8, 16, 32, 64)]
    assert all(row["bus_bytes_per_second"] > 0 for row in result["rows"])
    table = [line.split() for line in done.stdout.splitlines() if " float" in line]
    assert [(row[2], int(row[0])) for row in table] == measured, done
