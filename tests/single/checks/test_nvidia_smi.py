"""What nvidia-smi says, and that it may be missing, slow or wrong."""

import pytest

from hvdtrain.checks import nvidia_smi
from tests.single.checks.nvidia_smi import GPU, put


@pytest.fixture
def said(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return lambda *what, **more: put(tmp_path, *what, **more)


def test_gpus(said):
    said([GPU, GPU.replace("Disabled", "Enabled")])
    first, second = nvidia_smi.answer("gpu=name")
    assert first == ["NVIDIA H100 80GB HBM3", "81559", "580.65.06", "Disabled", "Default"]
    assert dict(zip(nvidia_smi.ABOUT, second, strict=True))["mig.mode.current"] == "Enabled"
    said([])
    assert nvidia_smi.answer("gpu=name") == []


def test_an_nvidia_smi_that_is_missing_fails_or_says_nothing(said, tmp_path, monkeypatch):
    said(["NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver"], code=9)
    with pytest.raises(OSError, match="ended with 9: NVIDIA-SMI has failed"):
        nvidia_smi.answer("gpu=name")
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr(nvidia_smi, "NVIDIA_SMI_SECONDS", 0.2)
    with pytest.raises(OSError, match="no answer"):
        nvidia_smi.answer("gpu=name")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(OSError, match="no nvidia-smi on PATH"):
        nvidia_smi.answer("gpu=name")
