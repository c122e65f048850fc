"""The bare all-reduce: its flags, its arithmetic."""

import sys

import pytest
import torch

from hvdtrain import reduce
from hvdtrain.engines.errors import UserError
from hvdtrain.engines.single import SerialEngine


class PretendWorld(SerialEngine):
    """Four ranks of which only this one is there: every sum is four times one's own. Enough for the arithmetic."""

    def __init__(self, wrong: bool = False):
        super().__init__(tuning=False, rank=0, size=1, launcher="none")
        self.size, self.device, self.wrong = 4, torch.device("cpu"), wrong

    def all_reduce_(self, tensor, op, name):
        if op == "sum" and tensor.is_floating_point():
            tensor.mul_(4)
        if self.wrong and tensor.numel() > 1:
            tensor.view(-1)[-1] += 1


def test_bandwidths_are_those_of_nccl_tests():
    row = reduce.measure(PretendWorld(), "sum", "float16", 1024, 0.01)
    assert (row["bytes"], row["count"]) == (2048, 1024)
    assert row["algorithm_bytes_per_second"] == pytest.approx(2048 / row["seconds"])
    assert row["bus_bytes_per_second"] == pytest.approx(row["algorithm_bytes_per_second"] * 2 * 3 / 4)
    assert 0 < row["seconds_least"] <= row["seconds"] <= row["seconds_most"]
    assert row["repeats"] % reduce.BLOCKS == 0


def test_a_sweep_that_could_not_be_kept_is_not_begun(capsys, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setattr(
        sys, "argv", ["reduce.py", "--engine", "serial", "--sweep", "--output-dir", str(tmp_path / "file/x")]
    )
    with pytest.raises(UserError, match="cannot be written"):
        reduce.main()
    assert capsys.readouterr().out == ""


def test_a_wrong_result_is_never_a_bandwidth():
    with pytest.raises(RuntimeError, match="wrong sum of 1024 float32"):
        reduce.measure(PretendWorld(wrong=True), "sum", "float32", 1024, 0.01)


@pytest.mark.parametrize(
    ("value", "text"), [(10.0, "10"), (2.5, "2.5"), (10, "10"), (True, "True"), (3 + 0j, "(3+0j)")]
)
def test_numbers_as_people_write_them(value, text):
    assert reduce.text(torch.tensor([value])) == text
