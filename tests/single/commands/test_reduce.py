"""hvdtrain.reduce: the value on each rank before and after."""

import sys

import pytest
import torch
from torch import Tensor

from hvdtrain import reduce
from hvdtrain.engines.errors import UserError
from hvdtrain.engines.single import SerialEngine


def run(flags: str, monkeypatch) -> int:
    monkeypatch.setattr(sys, "argv", ["reduce.py", "--engine", "serial", *flags.split()])
    return reduce.main()


@pytest.mark.parametrize(
    ("flags", "after", "dtype"),
    [("", "3", "float32"), ("--reduction max", "1", "float32"), ("--dtype int16", "3", "int16"),
     ("--dtype complex64", "(3+0j)", "complex64")],
)  # fmt: skip
def test_it_is_of_the_type_and_by_the_operation_that_were_asked_for(flags, after, dtype, capsys, monkeypatch):
    def reduced(self, tensor: Tensor, op: str, name: str) -> None:
        assert tensor.dtype == getattr(torch, dtype)
        tensor.mul_(3 if op == "sum" else 1)

    monkeypatch.setattr(SerialEngine, "all_reduce_", reduced)
    assert run(flags, monkeypatch) == 0
    before = "(1+0j)" if dtype == "complex64" else "1"
    assert capsys.readouterr().out == f"before 0 data {before}\nafter 0 data {after}\n"


def test_a_type_that_the_engine_does_not_have_is_one_line(monkeypatch):
    def refuse(self, tensor: Tensor, op: str, name: str) -> None:
        raise ValueError("no such type\nand more")

    monkeypatch.setattr(SerialEngine, "all_reduce_", refuse)
    with pytest.raises(UserError, match=r"^serial has no sum of uint8 \(no such type\): use float32$"):
        run("--dtype uint8", monkeypatch)
