"""The doctor's checks of GPUs, on facts that this machine does not have; a check that fails hides no other."""

import json
import socket
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hvdtrain import doctor
from hvdtrain.checks import host, nvidia_smi, ranks
from hvdtrain.checks.findings import Findings, Here, show
from hvdtrain.guards import limits

# Columns and spellings are those of driver 580; the values are made up.
GPU = "NVIDIA H100 80GB HBM3, 81559, 580.65.06, Disabled, Default"
H100 = ["H100", "81559", "580.65.06", "Disabled", "Default"]  # as gpus.ABOUT


def put(directory: Path, gpus: list[str], code: int = 0) -> None:
    """Write an nvidia-smi that lists `gpus` into `directory`, which belongs on PATH."""
    path = directory / "nvidia-smi"
    path.write_text("\n".join(["#!/bin/sh", "cat <<E", *gpus, "E", f"exit {code}", ""]))
    path.chmod(0o755)


def faults(found: Findings) -> list[str]:
    return [f"{f['level']}: {f['what']}: {f['do']}" for f in found.all if f["level"] != "ok"]


def h100(mig: str = "Disabled", mode: str = "Default") -> list[str]:
    return [*H100[:3], mig, mode]


@pytest.mark.parametrize(
    ("there", "seen", "visible", "expected"),
    [
        ([], 0, None, []),
        ([H100, H100], 2, None, []),
        # GPUs that would be left idle: a torch without CUDA or for another driver, a container without --nv.
        ([H100] * 8, 0, None, ["problem: torch sees none of the 8 GPUs of this host"]),
        ([H100] * 8, 0, "", []),  # hidden on purpose
        # Modes.
        ([h100(mig="Enabled")], 1, None, ["warning: MIG is on (H100): one rank per GPU"]),
        ([h100(mig="[N/A]")], 1, None, []),
        ([h100(mode="Exclusive_Process")], 1, None,
         ["warning: compute mode of H100 is Exclusive_Process: nvidia-smi -c 0"]),
        ([h100(mode="Prohibited")], 1, None, ["problem: compute mode of H100 is Prohibited: nvidia-smi -c 0"]),
    ],
)  # fmt: skip
def test_gpus_as_nvidia_smi_lists_them(there, seen, visible, expected):
    found = Findings()
    nvidia_smi.judge_gpus(found, there, seen, visible)
    shown = faults(found)
    assert len(shown) == len(expected), shown
    assert all(fault.startswith(begins) for fault, begins in zip(shown, expected, strict=True)), shown


def test_equal_gpus_are_one_line():
    found = Findings()
    nvidia_smi.judge_gpus(found, [H100, H100], 2, None)
    assert [f["what"] for f in found.all] == [
        "2 x H100, 81559 MiB, driver 580.65.06, MIG Disabled, compute mode Default"
    ]


@pytest.mark.parametrize(
    ("cores", "fault"),
    [([[0, 1], [0, 1]], ""), ([[0], [1]], ""), ([[0], [0]], "warning: cores: 1; ranks on this host: 2; ")],
)
def test_ranks_that_are_bound_to_cores_of_their_own_have_enough(cores, fault, monkeypatch):
    found, engine = Findings(), SimpleNamespace(rank=1, local_size=2)
    monkeypatch.setattr(ranks, "cores_of_ranks", lambda _: [("a", mine) for mine in cores])
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(cores[1]))
    ranks.check_cores(found, Here(None), engine)
    assert [shown.startswith(fault) for shown in faults(found)] == [True] * bool(fault)


def test_a_build_without_nccl_is_no_fault_where_the_cpu_trains(monkeypatch):
    """On a GPU, the engine refuses it as it starts."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 5))
    found = Findings()
    doctor.check_build(found, Here(SimpleNamespace(engine="horovod", device="cpu")))
    assert faults(found) == []


def test_with_gpus_dev_shm_must_hold_what_nccl_wants(monkeypatch):
    monkeypatch.setattr(host.shutil, "disk_usage", lambda path: SimpleNamespace(total=2**29, free=2**40))
    for gpu, expected in ((False, []), (True, ["warning: /dev/shm is 512 MiB: docker run --ipc=host"])):
        found = Findings()
        host.check_memory_and_disk(found, Here(SimpleNamespace(), gpus=gpu))
        assert [fault.partition(";")[0] for fault in faults(found)] == expected


def test_what_leaves_a_host_without_memory_or_space_is_a_problem(monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(host.shutil, "disk_usage", lambda path: SimpleNamespace(total=2**40, free=2**20))
    monkeypatch.setattr(host, "free_memory", lambda: 2**21)
    found = Findings()
    host.check_memory_and_disk(found, Here(SimpleNamespace()))
    assert [fault.partition(": ")[2].partition(":")[0] for fault in faults(found)] == [
        "2 MiB of memory are free", "/dev/shm has 1 MiB left", f"{tmp_path} has 1 MiB left"
    ]  # fmt: skip
    monkeypatch.setenv("TMPDIR", str(tmp_path / "nothing"))  # tempfile would take another one
    found = Findings()
    host.check_memory_and_disk(found, Here(SimpleNamespace()))
    assert f"problem: {tmp_path}/nothing cannot be written" in "".join(faults(found))


SMI = """#!/bin/sh
case $1 in
*ecc*) printf '0, 0\\n1, [N/A]\\n2, 3\\n' ;;
*recovery*) echo 'Field "gpu_recovery_action" is not a valid field to query.' && exit 2 ;;
*) printf 'GPU-a, No\\nGPU-b, Yes\\n' ;;
esac
"""


def test_errors_that_nvidia_smi_counts(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for script, said in (
        (SMI, ["GPU 2: 3 uncorrectable memory errors", "GPU-b: memory rows could not be remapped",
               "GPU-b: memory rows wait for a reset"]),
        ("#!/bin/sh\necho 'Unable to determine the device handle for GPU0: Unknown Error'; exit 255\n",
         ["nvidia-smi ended with 255: Unable to determine the device handle for GPU0: Unknown Error"]),
    ):  # fmt: skip
        (tmp_path / "nvidia-smi").write_text(script)
        (tmp_path / "nvidia-smi").chmod(0o755)
        found = Findings()
        nvidia_smi.check_gpu_errors(found, Here(SimpleNamespace()))
        assert [finding["what"] for finding in found.all] == said
    (tmp_path / "nvidia-smi").unlink()
    found = Findings()
    nvidia_smi.check_gpu_errors(found, Here(SimpleNamespace()))
    assert found.all == []


@pytest.mark.parametrize(
    ("variable", "named", "missing"),
    [
        ("NCCL_SOCKET_IFNAME", "^docker,virbr", []),
        ("NCCL_SOCKET_IFNAME", "=lo", []),
        ("NCCL_SOCKET_IFNAME", "l", []),
        ("NCCL_SOCKET_IFNAME", "=l", ["=l"]),
        ("NCCL_SOCKET_IFNAME", "lo,ib9", ["ib9"]),
        ("GLOO_SOCKET_IFNAME", "l", []),
        ("OMPI_MCA_btl_tcp_if_include", "l,127.0.0.0/8,lo", ["l"]),
    ],
)
def test_interfaces_that_are_named_must_be_there_but_not_those_that_are_excluded(variable, named, missing, monkeypatch):
    monkeypatch.setenv(variable, named)
    found = Findings()
    host.check_interfaces(found, Here(SimpleNamespace()))
    expected = [f"problem: {variable}={name}: no such interface here" for name in missing]
    assert [fault.partition(": name one of")[0] for fault in faults(found) if variable in fault] == expected


@pytest.mark.parametrize(("listed", "taken"), [(["fd00::5"], "fd00::5"), (["fd00::5", "10.0.0.5"], "10.0.0.5")])
def test_a_name_may_have_addresses_of_ipv6_alone(listed, taken, monkeypatch):
    entries = [
        (socket.AF_INET6 if ":" in one else socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, 0)) for one in listed
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: entries)
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-host.invalid")
    found, here = Findings(), Here(None)
    host.check_name(found, here)
    assert (faults(found), here.address) == ([], taken)


def test_a_name_may_be_as_long_as_linux_allows(monkeypatch):
    """Python takes no text of 64 characters without a dot for a name, but bytes."""
    monkeypatch.setattr(socket, "gethostname", lambda: "a" * 64)
    found = Findings()
    host.check_name(found, Here(None))
    assert f"this host's name {'a' * 64} does not resolve" in "".join(faults(found))


def test_a_user_id_without_a_name_needs_a_home(monkeypatch):
    found = Findings()
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("os.getuid", lambda: 4_242_424)  # as in a container; pathlib asks for its entry in /etc/passwd
    host.check_home(found, Here(SimpleNamespace()))
    assert [(each["level"], each["do"][:11]) for each in found.all] == [("problem", "export HOME")]
    monkeypatch.setenv("HOME", "/tmp")
    host.check_home(found, Here(SimpleNamespace()))
    assert len(found.all) == 1


def test_an_output_directory_that_cannot_be_looked_at_is_a_finding(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["doctor.py", "--engine", "serial", "--output-dir", f"{tmp_path}/{'x' * 300}"])
    assert doctor.main() == 1
    assert "cannot be written (File name too long)" in capsys.readouterr().out


def test_the_doctor_names_a_gpu_that_would_be_left_idle(tmp_path, monkeypatch, capsys):
    """nvidia-smi lists one, torch sees none, and nobody has hidden it: a node whose container lacks --nv."""
    put(tmp_path, [GPU])
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for device, code in (("auto", 1), ("cpu", 0)):
        monkeypatch.setattr(sys, "argv", ["doctor.py", "--engine", "serial", "--device", device, "--json"])
        assert doctor.main() == code
        said = [f["what"] for f in json.loads(capsys.readouterr().out)["findings"] if f["level"] == "problem"]
        assert [what.partition(" (")[0] for what in said] == ["torch sees none of the 1 GPUs of this host"] * code


def test_a_rank_that_does_not_come_is_waited_for_as_in_training(monkeypatch, capfd):
    """Horovod over MPI waits for ever, and the doctor said nothing."""
    monkeypatch.setattr(limits, "LIMIT_CHECK_SECONDS", 0.01)
    monkeypatch.setattr(limits, "WAITING_LINE_SECONDS", 0.03)
    monkeypatch.setattr(doctor, "start_engine", lambda *_, **__: time.sleep(0.5))
    monkeypatch.setattr(doctor, "ALONE", ())
    monkeypatch.setattr(sys, "argv", ["doctor.py", "--engine", "serial"])
    doctor.main()
    assert "waits for the other ranks to start the engine, at " in capfd.readouterr().err


def test_a_check_that_fails_is_a_finding_and_hides_no_other(monkeypatch, capsys):
    def check_odd_things(found, here):
        raise ValueError("odd")

    monkeypatch.setattr(doctor, "ALONE", (check_odd_things, host.check_launcher))
    monkeypatch.setattr(sys, "argv", ["doctor.py", "--engine", "serial"])
    assert doctor.main() == 1
    said = capsys.readouterr().out
    assert "problem  odd things: ValueError: odd" in said
    assert "started alone" in said


def test_findings_are_said_without_control_characters(capsys):
    show([{"level": "problem", "what": "a\x1b[2Jb", "why": "c\rd", "do": "e\x9bf", "ranks": [0]}], 1, as_json=False)
    said = capsys.readouterr().out
    assert all(c.isprintable() or c == "\n" for c in said)
    assert r"a\x1b[2Jb" in said


# ---- what nvidia-smi says


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
