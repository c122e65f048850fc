"""`hvdtrain.reduce` under real launchers."""

import json

import pytest

from tests.e2e.launchers import LAUNCHERS, PYTHON, TORCHRUN, Done, launch, several

HOROVOD = f"{LAUNCHERS['mpirun']} {PYTHON} -m hvdtrain.reduce"
STARTS = {
    "horovod": HOROVOD,
    "ddp": f"{TORCHRUN} -m hvdtrain.reduce --engine ddp",
    "serial": f"{PYTHON} -m hvdtrain.reduce --engine serial",
}


REFUSED = {
    "bfloat16": ("--dtype bfloat16", "use float32, float64, float16, int32, int64\n"),
    "uint8": ("--dtype uint8 --sweep", "use float32, float64, float16, int32, int64\n"),
}


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> dict[str, Done]:
    """Two ranks under mpirun, one run after the other."""
    runs = {"adasum": "--reduction adasum --dtype float16", **{name: flags for name, (flags, _) in REFUSED.items()}}
    return several("mpirun", 2, tmp_path_factory.mktemp("two"), runs, "hvdtrain.reduce")


def in_order(done: Done, ranks: int, results: str) -> None:
    assert done.code == 0, done
    lines = [line for line in done.stdout.splitlines() if line]
    before = [f"before {rank} data {rank + 1}" for rank in range(ranks)]
    assert lines == before + [f"after {rank} data {results}" for rank in range(ranks)], done


@pytest.mark.parametrize("start", ["horovod", pytest.param("ddp", marks=pytest.mark.slow)])
def test_before_and_after_in_the_order_of_ranks(start):
    in_order(launch(STARTS[start].format(ranks=4)), 4, "10")


@pytest.mark.slow
def test_adasum_of_halves(two):
    in_order(two["adasum"], 2, "1.5")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", REFUSED)
def test_a_dtype_that_horovod_refuses_is_one_line_that_names_the_others(dtype, two):
    done = two[dtype]
    assert done.code == 2, done
    said = [line for line in done.stderr.splitlines(keepends=True) if "hvdtrain" in line]
    assert len(said) == 1, done
    assert said[0].endswith(REFUSED[dtype][1])
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("start", "ranks"), [("ddp", 2), ("serial", 1)])
def test_sweep_writes_table_json_and_picture(start, ranks, tmp_path):
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
    assert (tmp_path / "new/reduce.png").read_bytes().startswith(b"\x89PNG")
