"""`hvdtrain.scaling` between two hosts: what starts the ranks finds them by ssh, and they meet on the named interface."""

import json
import sys

import pytest

from tests.e2e.cluster import Cluster, needs_hosts, needs_ssh


@needs_hosts
@needs_ssh
@pytest.mark.slow
def test_every_engine_is_measured_on_two_hosts(tmp_path):
    flags = "--engines horovod,horovod-gloo,ddp --ranks 2 --rounds 1 --threads 1 --hosts a:1,b:1 --interface eth0"
    bench = "-- --model convnet --repeats 2 --steps 5"
    command = [sys.executable, "-m", "hvdtrain.scaling", *flags.split(), "--output-dir", str(tmp_path / "out")]
    with Cluster(tmp_path, ["a", "b"], ssh=True) as cluster:
        done = cluster.run("a", [*command, *bench.split()], timeout=200)
    assert done.code == 0, done
    for engine in ("horovod", "horovod-gloo", "ddp"):
        result = json.loads((tmp_path / "out" / "runs" / f"{engine}-2-round1" / "benchmark.json").read_text())
        assert (result["world_size"], result["hosts"]) == (2, 2), result
