"""What nvidia-smi says, and that it may be missing, slow or wrong."""

import pytest

from hvdtrain.checks import gpus
from tests.single.checks.nvidia_smi import GPU, put


@pytest.fixture
def said(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return lambda *what, **more: put(tmp_path, *what, **more)


def test_gpus(said):
    slices = GPU.format(1).replace("Disabled", "Enabled").replace("81559", "[N/A]")
    said([GPU.format(0), slices])
    first, second = gpus.listed()
    assert first.uuid == "GPU-5c2b0000-0000-0000-0000-000000000000"
    assert str(first) == "NVIDIA H100 80GB HBM3, 81,559 MiB, driver 580.65.06, MIG Disabled, compute mode Default"
    assert (second.mig_mode_current, second.memory_total) == ("Enabled", 0)
    said([])
    assert gpus.listed() == []


def test_an_nvidia_smi_that_is_missing_fails_or_says_something_else(said, tmp_path, monkeypatch):
    said(["one, two"])
    with pytest.raises(OSError, match="said 'one, two' instead of 7 values"):
        gpus.listed()
    said(["NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver"], code=9)
    with pytest.raises(OSError, match="ended with 9: NVIDIA-SMI has failed"):
        gpus.listed()
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr(gpus, "LIMIT", 0.2)
    with pytest.raises(OSError, match="no answer"):
        gpus.listed()
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(OSError, match="no nvidia-smi on PATH"):
        gpus.listed()


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
    assert gpus.too_old(driver, cuda) == oldest
