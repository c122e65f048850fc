"""`hvdtrain.scaling --model-of` on what was really measured: one host, and two joined by a slow wire."""

import json
import sys

import pytest

from tests.e2e.cluster import Cluster, needs_hosts
from tests.e2e.launchers import PYTHON, launch

pytestmark = pytest.mark.slow
TINY = "--batch-size 4 --repeats 2 --steps 2 --warmup-steps 1"
SWEEP = "hvdtrain.reduce --sweep --dtype float32 --seconds-per-size 0.05"
WIRE_MBIT = 20  # so slow that the wire is what counts, however busy this machine is


@pytest.fixture(scope="module")
def one_host(tmp_path_factory):
    """Directories of a measured training and of a sweep; two ranks, horovod over Gloo."""
    out = tmp_path_factory.mktemp("one")
    training = f"hvdtrain.scaling --engines horovod-gloo --ranks 2 --rounds 1 --output-dir {out}/training -- {TINY}"
    sweep = f"{SWEEP} --max-bytes 1048576 --output-dir {out}/sweep"
    for command in (
        f"{PYTHON} -m {training}",
        f"horovodrun --gloo -np 2 {PYTHON} -m {sweep}",
    ):
        done = launch(command, timeout=200)
        assert done.code == 0, done
    return out


def predict(directories: str, flags: str):
    command = f"{PYTHON} -m hvdtrain.scaling --model-of {directories} --bandwidth-gbit {WIRE_MBIT / 1000}"
    return launch(f"{command} --latency-us 50 {flags}", timeout=100)


def test_it_predicts_what_was_measured_here(one_host, tmp_path):
    done = predict(f"{one_host}/training {one_host}/sweep", f"--output-dir {tmp_path}")
    assert done.code == 0, done
    assert "| 4,096 | 2,048 | ring |" in done.stdout, done
    (engine,) = json.loads((tmp_path / "prediction.json").read_text())["engines"]
    assert engine["engine"] == "horovod over Gloo"
    assert engine["gradient_bytes_on_wire"] == 4 * 29034  # ConvNet's parameters
    assert engine["fit"]["points"] == 19  # 4 bytes to 1 MiB in powers of two
    (check,) = engine["checks"]
    assert (check["what"], check["ranks"], check["hosts"]) == ("step", 2, 1)
    assert (tmp_path / "prediction-horovod-over-gloo.png").stat().st_size > 5000


def test_steps_of_one_number_of_ranks_are_too_little(one_host, tmp_path):
    done = predict(f"{one_host}/training", f"--output-dir {tmp_path}")
    assert done.code == 2, done
    assert len(done.stderr.splitlines()) == 1, done
    assert "too few points to fit" in done.stderr, done


@needs_hosts
@pytest.mark.slow
def test_a_slow_wire_is_as_slow_as_predicted(one_host, tmp_path):
    with Cluster(tmp_path, ["a", "b"], rate=f"{WIRE_MBIT}mbit") as cluster:
        command = [sys.executable, "-m", "hvdtrain.starter", "-m", *SWEEP.split(), "--output-dir", f"{tmp_path}/two"]
        command += ["--min-bytes", "1048576", "--max-bytes", "1048576"]
        meeting = dict(WORLD_SIZE="2", MASTER_ADDR="a", MASTER_PORT="9000")
        ranks = {host: cluster.start(host, command, RANK=str(rank), **meeting) for rank, host in enumerate("ab")}
        for done in cluster.finish(ranks, 120).values():
            assert done.code == 0, done
    out = tmp_path / "out"
    done = predict(f"{one_host}/training {one_host}/sweep", f"--measured {tmp_path}/two --output-dir {out}")
    assert done.code == 0, done
    (engine,) = json.loads((out / "prediction.json").read_text())["engines"]
    check = next(check for check in engine["checks"] if check["what"] == "all-reduce")
    assert (check["ranks"], check["hosts"], check["bytes"]) == (2, 2, 2**20)
    # No bucket of this size gets through faster than the wire lets it: what is predicted is a bound from below.
    assert check["measured_seconds"]["middle"] > 0.8 * 2**20 * 8 / (WIRE_MBIT * 1e6)
    assert check["predicted_seconds"]["least"] < 1.1 * check["measured_seconds"]["most"]
    assert check["predicted_seconds"]["most"] > 0.8 * 2**20 * 8 / (WIRE_MBIT * 1e6)
