"""Files of results."""

import json

import pytest

from hvdtrain.analysis import measuring
from hvdtrain.engines.errors import UserError


def test_results_are_written_whole(tmp_path):
    measuring.make_directory(tmp_path / "a/b")
    measuring.write_json(tmp_path / "a/b/x.json", {"path": tmp_path, "n": 1})
    assert json.loads((tmp_path / "a/b/x.json").read_text()) == {"path": str(tmp_path), "n": 1}
    assert [path.name for path in (tmp_path / "a/b").iterdir()] == ["x.json"]


def test_a_directory_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be written"):
        measuring.make_directory(tmp_path / "file/x")
