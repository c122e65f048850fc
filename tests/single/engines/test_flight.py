"""The last collectives of a GPU, when a job hangs. Gloo's recorder is the real one; for NCCL's, a record stands in as torch
writes it. tests/gpu stops a rank under NCCL."""

import json
import os
import pickle
import subprocess
import sys

import pytest
import torch

from hvdtrain.guards import flight
from hvdtrain.guards.flight import Last, explain, record

NAMES = ["rank 0 on a", "rank 1 on a", "rank 2 on b"]
WHAT = "nccl:all_reduce of 1,000 Float"

OVER_GLOO = """
import pathlib, sys, torch, torch.distributed as dist
from hvdtrain.guards import flight
flight.record(kind="fr")
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for _ in range(100):
    dist.all_reduce(torch.ones(4, 5))
dist.broadcast(torch.ones(6), 0)
print(flight.last())
flight.write(pathlib.Path(sys.argv[1]) / "collectives", 3)
"""


@pytest.mark.slow
def test_glooes_recorder_has_the_last_call_and_torchs_tools_read_the_file(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name not in flight.SIZES}
    words = [sys.executable, "-c", OVER_GLOO, str(tmp_path)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "Last(called=101, done=100, what='gloo:broadcast of 6 Float')", done
    content = pickle.loads((tmp_path / "collectives" / "rank_3").read_bytes())
    assert [each["collective_seq_id"] for each in content["entries"]][-2:] == [100, 101]
    assert len(content["entries"]) == int(flight.RING)


def entry(number: int, state: str, group: str = "0", p2p: bool = False) -> dict:
    about = dict(profiling_name="nccl:all_reduce", input_sizes=[[10, 100]], input_dtypes=["Float"])
    return about | dict(collective_seq_id=number, state=state, process_group=[group, "some"], is_p2p=p2p)


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ([], Last()),
        ([entry(7, "completed"), entry(8, "started"), entry(9, "scheduled")], Last(9, 7, WHAT)),
        ([entry(7, "completed"), entry(30, "started", group="1"), entry(40, "started", p2p=True)], Last(7, 7, "")),
        ([{"of": "another torch"}], Last()),
    ],
)
def test_where_a_rank_is(entries, expected, monkeypatch):
    monkeypatch.setattr(flight, "_dump", lambda form: json.dumps(dict(entries=entries)))
    assert flight.last() == expected


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ({0: Last(9, 8, WHAT), 1: Last(8, 8), 2: Last(10, 8, WHAT)},
         f"  collective 9, {WHAT}, is not done: rank 0 on a and rank 2 on b called it; not rank 1 on a\n"),
        ({0: Last(9, 8, WHAT), 2: Last(9, 8, WHAT)},
         f"  collective 9, {WHAT}, is not done: rank 0 on a and rank 2 on b called it; no answer from rank 1 on a\n"),
        ({0: Last(9, 9), 1: Last(9, 9), 2: Last()}, ""),
        ({0: Last(), 1: Last()}, ""),  # not NCCL
    ],
)  # fmt: skip
def test_the_line_names_the_collective_and_the_ranks_that_did_not_come(found, expected):
    assert explain(found, NAMES) == expected


@pytest.mark.parametrize(("version", "name"), [("2.10.0", flight.SIZES[1]), ("2.11.0+cu130", flight.SIZES[0])])
def test_the_ring_is_asked_for_by_the_name_that_this_torch_does_not_warn_of(version, name, monkeypatch):
    monkeypatch.setattr(flight, "_kind", "")
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion(version))
    for own, expected in (({}, {name: flight.RING}), ({flight.SIZES[0]: "0"}, {flight.SIZES[0]: "0"})):
        record(own)
        assert own == expected


def test_nothing_is_asked_of_torch_where_nothing_is_recorded(monkeypatch, tmp_path):
    monkeypatch.setattr(flight, "_kind", "")
    assert flight.last() == Last()
    flight.write(tmp_path / "none", 0)
    assert list(tmp_path.iterdir()) == []
