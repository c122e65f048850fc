"""The golden hashes: they notice a changed value, and nothing that differs between two equal runs."""

import json

import pytest
import torch
from safetensors.torch import save_file

from hvdtrain.checkpoint import contents
from hvdtrain.engines.portable import flattened
from tests.golden import __main__ as golden
from tests.golden.table import RUNS


def record(path, *lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return golden.digest(golden.metrics(path))


def test_a_loss_counts_and_a_time_does_not(tmp_path):
    train = {"event": "train", "step": 1, "epoch": 1, "loss": 0.5, "time": 1.0, "loading_seconds": 0.1}
    hashes = [
        record(tmp_path / "metrics.jsonl", line)
        for line in (train, train | {"time": 2.0, "loading_seconds": 0.2}, train | {"loss": 0.25})
    ]
    assert hashes[0] == hashes[1] != hashes[2]


def test_of_a_step_that_was_taken_twice_the_last_counts(tmp_path):
    first, again = ({"event": "train", "step": 1, "epoch": 1, "loss": loss} for loss in (0.5, 0.25))
    killed = record(tmp_path / "metrics.jsonl", first, {"event": "resume", "step": 0}, again)
    assert killed == record(tmp_path / "metrics.jsonl", again)


def saved(out, step, **tensors):
    (out / "checkpoints").mkdir(parents=True, exist_ok=True)
    named = {name.replace("__", "."): torch.as_tensor(value) for name, value in tensors.items()}
    save_file(named, out / "checkpoints" / f"step-{step:08d}.safetensors")
    return golden.checkpoint(out)["checkpoint"]


@pytest.mark.parametrize("name", ["model__weight", "optimizer__0", "registered__slow__3", "buffers"])
def test_each_bit_of_the_newest_checkpoint_counts(tmp_path, name):
    hashes = [saved(tmp_path, step, **{name: [value, 2.0]}) for step, value in enumerate((1.0, 1.0, 1.0 + 2**-23))]
    assert hashes[0] == hashes[1] != hashes[2]


def test_how_a_checkpoint_calls_and_joins_what_ranks_have_of_their_own_does_not_count(tmp_path):
    first = saved(tmp_path, 1, optimizer__0=[3.0], buffers=[[1.0, 2.0], [5.0, 6.0]])
    packed = [flattened({"mean": torch.tensor(one)}) for one in ([1.0, 2.0], [5.0, 6.0])]
    ranks = [{"buffers": (value, len(row))} for value, row in packed]
    own = {"own": contents.json_tensor(ranks), "own__bytes": torch.cat([row for _, row in packed])}
    assert first == saved(tmp_path, 2, optimizer__momentum=[3.0], **own)
    assert first != saved(tmp_path, 4, optimizer__momentum=[3.0], **own | {"own__bytes": own["own__bytes"] + 1})
    assert first != saved(tmp_path, 3, optimizer__0=[[3.0]], buffers=[[1.0, 2.0], [5.0, 6.0]])


def test_a_changed_a_missing_and_a_new_hash_are_named(capsys):
    expected = {"serial": {"parameters": "aa", "gone": "bb"}}
    assert golden.compare(expected, {"serial": {"parameters": "aa", "gone": "bb"}}) == 0
    assert golden.compare(expected, {"serial": {"parameters": "ab", "new": "cc"}}) == 1
    assert capsys.readouterr().out.count("CHANGED serial") == 3


def test_the_file_has_every_run_and_those_that_are_killed_end_as_those_that_are_not():
    pairs = {"killed": "gloo-2", "killed-ddp": "plain-ddp", "killed-schedule": "schedule", "killed-stream": "stream"}
    for entry in json.loads(golden.FILE.read_text()):
        assert list(entry["hashes"]) == list(RUNS)
        assert all(entry["hashes"][killed] == entry["hashes"][whole] for killed, whole in pairs.items())


def test_virtual_ranks_have_the_same_hashes_on_any_number_of_processes():
    """One process, two of MPI and three of torchrun; and one process, and eight that are killed and go on as three."""
    for entry in json.loads(golden.FILE.read_text()):
        rows = {name: hashes for name, hashes in entry["hashes"].items() if name.startswith("virtual")}
        if rows:  # not of a processor on which they were not run
            assert rows["virtual"] == rows["virtual-mpi-2"] == rows["virtual-ddp-3"]
            assert rows["virtual-schedule"] == rows["virtual-killed"]
