"""Means, intervals, files of results."""

import json
import math

import pytest
import torch

from hvdtrain.analysis import measuring
from hvdtrain.engines.errors import UserError


def test_student_t_leaves_a_fortieth_on_each_side():
    """Against the density, integrated here (the arithmetic of the table is not ours)."""
    for freedom, quantile in enumerate(measuring.STUDENT_T, start=1):
        x = torch.linspace(0, quantile, 20_001, dtype=torch.float64)
        scale = math.gamma((freedom + 1) / 2) / (math.sqrt(freedom * math.pi) * math.gamma(freedom / 2))
        inside = torch.trapezoid(scale * (1 + x**2 / freedom) ** (-(freedom + 1) / 2), x).item()
        assert inside == pytest.approx(0.475, abs=5e-5), freedom  # three decimals


def test_mean_and_interval():
    assert measuring.mean([1, 2, 3]) == pytest.approx((2, 2 - 4.303 / math.sqrt(3), 2 + 4.303 / math.sqrt(3), 3))
    assert measuring.mean([5.0]) == (5.0, None, None, 1)


def test_results_are_written_whole(tmp_path):
    measuring.make_directory(tmp_path / "a/b")
    measuring.write_json(tmp_path / "a/b/x.json", {"path": tmp_path, "n": 1})
    assert json.loads((tmp_path / "a/b/x.json").read_text()) == {"path": str(tmp_path), "n": 1}
    assert [path.name for path in (tmp_path / "a/b").iterdir()] == ["x.json"]


def test_a_directory_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be written"):
        measuring.make_directory(tmp_path / "file/x")
