"""The speed of the all-reduce: sizes, bandwidths, a result that is wrong."""

import json
import sys

import pytest
import torch

from hvdtrain import benchmark
from hvdtrain.analysis import measuring
from hvdtrain.engines.errors import Failure, UserError
from hvdtrain.engines.single import SerialEngine


class PretendWorld(SerialEngine):
    """Four ranks of which only this one, rank 0, is there."""

    def __init__(self, wrong: bool = False):
        super().__init__(tuning=False, rank=0, size=1, launcher="none")
        self.size, self.device, self.wrong = 4, torch.device("cpu"), wrong

    def all_reduce_(self, tensor, op, name):
        if op == "sum":
            tensor.mul_(1 + 2 + 3 + 4)
        if self.wrong and tensor.numel() > 1:
            tensor.view(-1)[-1] += 1


def test_bandwidths_are_those_of_nccl_tests():
    row = measuring.measure_messages(PretendWorld(), "float16", 1024, 0.01)
    assert (row["bytes"], row["count"]) == (2048, 1024)
    assert row["algorithm_bytes_per_second"] == pytest.approx(2048 / row["seconds"])
    assert row["bus_bytes_per_second"] == pytest.approx(row["algorithm_bytes_per_second"] * 2 * 3 / 4)
    assert 0 < row["seconds_least"] <= row["seconds"] <= row["seconds_most"]


def test_a_wrong_result_is_never_a_bandwidth():
    with pytest.raises(Failure, match="wrong sum of 1024 float32"):
        measuring.measure_messages(PretendWorld(wrong=True), "float32", 1024, 0.01)


def run(flags: str, monkeypatch) -> int:
    words = f"benchmark.py --engine serial --threads 1 --collectives {flags}"
    monkeypatch.setattr(sys, "argv", words.split())
    return benchmark.main()


def test_sizes_and_types_are_those_that_were_asked_for_and_are_written(monkeypatch, tmp_path):
    flags = f"--min-bytes 16 --max-bytes 64 --seconds-per-size 0.01 --output-dir {tmp_path}"
    for dtype, types in (("--dtype float16", ["float16"]), ("", ["float32", "float16"])):
        assert run(f"{flags} {dtype}", monkeypatch) == 0
        rows = json.loads((tmp_path / "benchmark.json").read_text())["rows"]
        assert [(row["bytes"], row["dtype"]) for row in rows] == [(size, t) for t in types for size in (16, 32, 64)]


def test_what_could_not_be_kept_is_not_begun(capsys, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be written"):
        run(f"--output-dir {tmp_path}/file/x", monkeypatch)
    assert capsys.readouterr().out == ""


def test_seconds_per_size_are_what_a_size_takes(engine, monkeypatch):
    """The clock is the number of all-reduces: a millisecond each."""
    monkeypatch.setattr(measuring, "block_seconds", lambda engine, tensor, name, times: 1e-3)
    for seconds, expected in ((0.05, 10), (0.5, 100)):
        assert measuring.measure_messages(engine, "float32", 4, seconds)["repeats"] == expected * 5
