"""What nvidia-smi says, and that it may be missing, slow or wrong."""

import pytest

from hvdtrain.checks import nvidia_smi
from tests.single.checks.nvidia_smi import GPU, put


@pytest.fixture
def said(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return lambda *what, **more: put(tmp_path, *what, **more)


def test_gpus(said):
    slices = GPU.format(1).replace("Disabled", "Enabled").replace("81559", "[N/A]")
    said([GPU.format(0), slices])
    first, second = nvidia_smi.gpus()
    assert first.uuid == "GPU-5c2b0000-0000-0000-0000-000000000000"
    assert str(first) == "NVIDIA H100 80GB HBM3, 81,559 MiB, driver 580.65.06, MIG Disabled, compute mode Default"
    assert (second.mig_mode_current, second.memory_total) == ("Enabled", 0)
    said([])
    assert nvidia_smi.gpus() == []


def test_an_nvidia_smi_that_is_missing_fails_or_says_something_else(said, tmp_path, monkeypatch):
    said(["one, two"])
    with pytest.raises(OSError, match="said 'one, two' instead of 7 values"):
        nvidia_smi.gpus()
    said(["NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver"], code=9)
    with pytest.raises(OSError, match="ended with 9: NVIDIA-SMI has failed"):
        nvidia_smi.gpus()
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr(nvidia_smi, "LIMIT", 0.2)
    with pytest.raises(OSError, match="no answer"):
        nvidia_smi.gpus()
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(OSError, match="no nvidia-smi on PATH"):
        nvidia_smi.gpus()


@pytest.mark.parametrize(
    ("driver", "cuda", "oldest"),
    [
        ("535.104.05", "13.2", 580),
        ("580.65.06", "13.2", None),
        ("535.104.05", "12.8", None),
        ("470.10", "12.8", 525),
        ("[N/A]", "13.2", None),
        ("535.104.05", "", None),
        ("535.104.05", "99.1", None),
    ],
)
def test_drivers_that_are_too_old(driver, cuda, oldest):
    assert nvidia_smi.too_old(driver, cuda) == oldest
