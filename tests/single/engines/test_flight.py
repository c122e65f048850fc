"""The last collectives of a GPU, when a job hangs. Gloo's recorder is the real one. tests/gpu stops a rank under NCCL."""

import os
import pickle
import subprocess
import sys

import pytest
import torch

from hvdtrain.guards import evidence

OVER_GLOO = """
import pathlib, sys, torch, torch.distributed as dist
from hvdtrain.guards import evidence
evidence.record_collectives(kind="fr")
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for _ in range(100):
    dist.all_reduce(torch.ones(4, 5))
dist.broadcast(torch.ones(6), 0)
evidence.write_collectives(pathlib.Path(sys.argv[1]) / "collectives", 3)
"""


@pytest.mark.slow
def test_torchs_tools_read_the_file(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name not in evidence.RING_SIZES}
    words = [sys.executable, "-c", OVER_GLOO, str(tmp_path)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done
    content = pickle.loads((tmp_path / "collectives" / "rank_3").read_bytes())
    assert [each["collective_seq_id"] for each in content["entries"]][-2:] == [100, 101]
    assert len(content["entries"]) == int(evidence.RING)


@pytest.mark.parametrize(("version", "place"), [("2.10.0", 1), ("2.11.0+cu130", 0)])
def test_the_ring_is_asked_for_by_the_name_that_this_torch_does_not_warn_of(version, place, monkeypatch):
    monkeypatch.setattr(evidence, "_recorder", "")
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion(version))
    own, name = evidence.RING_SIZES[0], evidence.RING_SIZES[place]
    for environment, expected in (({}, {name: evidence.RING}), ({own: "0"}, {own: "0"})):
        evidence.record_collectives(environment)
        assert environment == expected


def test_nothing_is_written_where_nothing_is_recorded(monkeypatch, tmp_path):
    monkeypatch.setattr(evidence, "_recorder", "")
    evidence.write_collectives(tmp_path / "none", 0)
    assert list(tmp_path.iterdir()) == []
