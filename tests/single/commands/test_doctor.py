"""The doctor's checks of GPUs, on facts that this machine does not have; and that a check which fails hides no other."""

import json
import socket
import sys
from types import SimpleNamespace

import pytest
import torch

from hvdtrain import doctor
from hvdtrain.analysis.nvidia_smi import Gpu
from hvdtrain.checks import gpus, host
from hvdtrain.checks.findings import Findings, Here
from tests.single.analysis.nvidia_smi import GPU, put

H100 = Gpu("GPU-1", "H100", "580.65.06", "Disabled", "Default", 81559, 4)


def faults(found: Findings) -> list[str]:
    return [f"{f['level']}: {f['what']}: {f['do']}" for f in found.all if f["level"] != "ok"]


@pytest.mark.parametrize(
    ("there", "cuda", "seen", "visible", "expected"),
    [
        ([], "13.2", 0, None, []),
        ([H100, H100._replace(uuid="GPU-2", memory_used=7000)], "13.2", 2, None, []),
        # An old driver: CUDA does not start. With a package for forward compatibility it does.
        ([H100._replace(driver_version="535.104.05")], "13.2", 0, None,
         ["problem: driver 535.104.05, but CUDA 13.2 of this torch needs 580 or newer: update the driver"]),
        ([H100._replace(driver_version="535.104.05")], "13.2", 1, None, []),
        ([H100._replace(driver_version="535.104.05")], "12.8", 1, None, []),
        # GPUs that would be left idle.
        ([H100], None, 0, None, ["problem: 1 GPUs here, but this torch has no CUDA: install a torch with CUDA"]),
        ([H100] * 8, "13.2", 0, None, ["problem: torch sees none of the 8 GPUs of this host: in a container: --nv"]),
        ([H100] * 8, "13.2", 0, "", []),  # hidden on purpose
        # Modes.
        ([H100._replace(mig_mode_current="Enabled")], "13.2", 1, None, ["warning: MIG is on (H100): one rank per GPU"]),
        ([H100._replace(mig_mode_current="[N/A]")], "13.2", 1, None, []),
        ([H100._replace(compute_mode="Exclusive_Process")], "13.2", 1, None,
         ["warning: compute mode of H100 is Exclusive_Process: nvidia-smi -c 0"]),
        ([H100._replace(compute_mode="Prohibited")], "13.2", 1, None,
         ["problem: compute mode of H100 is Prohibited: nvidia-smi -c 0"]),
    ],
)  # fmt: skip
def test_gpus_as_nvidia_smi_lists_them(there, cuda, seen, visible, expected):
    found = Findings()
    gpus.judge(found, there, cuda, seen, visible)
    shown = faults(found)
    assert len(shown) == len(expected), shown
    assert all(fault.startswith(begins) for fault, begins in zip(shown, expected, strict=True)), shown


def test_equal_gpus_are_one_line():
    found = Findings()
    gpus.judge(found, [H100, H100._replace(uuid="GPU-2", memory_used=9)], "13.2", 2, None)
    assert [f["what"] for f in found.all] == [
        "2 x H100, 81,559 MiB, driver 580.65.06, MIG Disabled, compute mode Default"
    ]


@pytest.mark.parametrize(
    ("places", "shared", "expected"),
    [
        ([["a", "GPU-1"], ["a", "GPU-2"], ["b", "GPU-1"]], "", []),  # a UUID counts within a host: containers may copy it
        ([["a", "GPU-1"], ["a", "GPU-2"], ["a", "GPU-1"]], "", ["problem: ranks 0 and 2 share a GPU on a: H100, GPU-1"]),
        ([["a", "GPU-1"]] * 2, "1", ["warning: ranks 0 and 1 share a GPU on a: H100, GPU-1"]),
        ([["a", ""], ["a", ""]], "", []),  # on processors, or where torch tells no UUID
    ],
)  # fmt: skip
def test_two_ranks_on_one_gpu(places, shared, expected, monkeypatch):
    """Whatever each rank calls it: with one GPU visible to each, both say cuda:0."""
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", shared)
    about = SimpleNamespace(uuid=places[0][1], name="H100")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: about)
    sent = []

    def gather(mine, name):
        sent.append(mine)
        return [[*place, "H100"] for place in places]

    engine = SimpleNamespace(device=torch.device("cuda", 0), all_gather_object=gather)
    found = Findings()
    gpus.check_one_rank_per_gpu(found, Here(SimpleNamespace()), engine)
    assert sent == [[socket.gethostname(), places[0][1], "H100"]]
    assert [fault.startswith(line) for fault, line in zip(faults(found), expected, strict=True)] == [True] * len(
        expected
    )


def test_with_gpus_dev_shm_must_hold_what_nccl_wants(monkeypatch):
    monkeypatch.setattr(host.shutil, "disk_usage", lambda path: SimpleNamespace(total=2**29, free=2**40))
    for gpu, expected in ((False, []), (True, ["warning: /dev/shm is 512 MiB: docker run --ipc=host"])):
        monkeypatch.setattr(torch.cuda, "is_available", lambda gpu=gpu: gpu)
        found = Findings()
        host.check_memory_and_disk(found, Here(SimpleNamespace()))
        assert [fault.partition(";")[0] for fault in faults(found)] == expected


def test_the_doctor_names_a_gpu_that_would_be_left_idle(tmp_path, monkeypatch, capsys):
    """nvidia-smi lists one, torch sees none, and nobody has hidden it: a node whose container lacks --nv."""
    put(tmp_path, [GPU.format(0)])
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for device, code in (("auto", 1), ("cpu", 0)):
        monkeypatch.setattr(sys, "argv", ["doctor.py", "--engine", "serial", "--device", device, "--json"])
        assert doctor.main() == code
        said = [f["what"] for f in json.loads(capsys.readouterr().out)["findings"] if f["level"] == "problem"]
        assert said == ["torch sees none of the 1 GPUs of this host"] * code


def test_a_check_that_fails_is_a_finding_and_hides_no_other(monkeypatch, capsys):
    def check_odd_things(found, here):
        raise ValueError("odd")

    monkeypatch.setattr(doctor, "ALONE", (check_odd_things, host.check_launcher))
    monkeypatch.setattr(sys, "argv", ["doctor.py", "--engine", "serial"])
    assert doctor.main() == 1
    said = capsys.readouterr().out
    assert "problem  odd things: ValueError: odd" in said
    assert "started alone" in said
