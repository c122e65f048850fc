"""A digest is of a tensor's values, wherever they lie in memory."""

import json
import sys
from pathlib import Path

import pytest
import torch

from hvdtrain import audit


@pytest.fixture
def recorder(monkeypatch):
    """The module that runs inside of an audited program."""
    monkeypatch.setenv("HVDTRAIN_AUDIT", json.dumps({"log": "", "out": "", "whole": True, "kill": None}))
    monkeypatch.syspath_prepend(str(Path(audit.__file__).parent / "boot"))
    import hvdtrain_audit_recorder

    monkeypatch.setattr(hvdtrain_audit_recorder, "torch", torch)
    yield hvdtrain_audit_recorder
    del sys.modules["hvdtrain_audit_recorder"]


@pytest.mark.parametrize("count", [3, 2_000, 2_001])
def test_where_a_tensor_begins_in_memory_does_not_count_and_each_value_does(recorder, count):
    values = torch.arange(1.0, count + 1)
    apart = torch.cat([torch.zeros(1), values])[
        1:
    ]  # as a part of a broadcast of many: it begins within a word of 64 bits
    assert recorder.raw(values) == recorder.raw(apart)
    changed = values.clone()
    changed[count // 2] = -1.0
    assert recorder.raw(values) != recorder.raw(changed)
