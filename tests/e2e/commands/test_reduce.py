"""`hvdtrain.reduce` under real launchers."""

import json

import pytest

from tests.e2e.launchers import LAUNCHERS, PYTHON, TORCHRUN, launch

HOROVOD = f"{LAUNCHERS['mpirun']} {PYTHON} -m hvdtrain.reduce"
STARTS = {
    "horovod": HOROVOD,
    "ddp": f"{TORCHRUN} -m hvdtrain.reduce --engine ddp",
    "serial": f"{PYTHON} -m hvdtrain.reduce --engine serial",
}


@pytest.mark.slow  # docs/quickstart.md has it, too
@pytest.mark.parametrize("start", ["horovod", "ddp"])
def test_before_and_after_in_the_order_of_ranks(start):
    done = launch(STARTS[start].format(ranks=4))
    assert done.code == 0, done
    before = [f"before {rank} data {rank + 1}" for rank in range(4)]
    after = [f"after {rank} data 10" for rank in range(4)]
    assert [line for line in done.stdout.splitlines() if line] == before + after, done


@pytest.mark.slow
@pytest.mark.parametrize(("start", "ranks"), [("ddp", 2), ("serial", 1)])
def test_sweep_writes_table_and_json(start, ranks, tmp_path):
    flags = f"--sweep --max-bytes 64 --seconds-per-size 0.01 --output-dir {tmp_path}/new"
    done = launch(f"{STARTS[start].format(ranks=ranks)} {flags}", timeout=120)
    assert done.code == 0, done
    result = json.loads((tmp_path / "new/reduce.json").read_text())
    assert (result["engine"], result["world_size"]) == (start, ranks)
    measured = [(row["dtype"], row["bytes"]) for row in result["rows"]]
    assert measured == [(dtype, size) for dtype in ("float32", "float16") for size in (4, 8, 16, 32, 64)]
    assert all(row["bus_bytes_per_second"] > 0 for row in result["rows"]) == (ranks > 1)
    table = [line.split() for line in done.stdout.splitlines() if " float" in line]
    assert [(row[2], int(row[0])) for row in table] == measured, done
