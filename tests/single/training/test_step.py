"""Parts of a step that other versions of torch take another way."""

import pytest
import torch

from hvdtrain.training.step import autocasts


@pytest.mark.parametrize("version", ["this torch", "torch 2.3"])
def test_autocast_is_seen_on_the_device_that_it_is_of(version, monkeypatch):
    enabled = torch.is_autocast_enabled

    def seen(device_type: str) -> bool:
        with monkeypatch.context() as patch:
            if version == "torch 2.3":  # a function for each, without an argument
                patch.setattr(torch, "is_autocast_enabled", lambda: enabled("cuda"))
                patch.setattr(torch, "is_autocast_cpu_enabled", lambda: enabled("cpu"))
            return autocasts(device_type)

    assert not seen("cpu")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert seen("cpu")
        assert not seen("cuda")
    assert not seen("cpu")
