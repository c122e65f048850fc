"""Which GPU each engine takes, or which line it ends with, on machines as torch would describe them: no GPU is needed."""

import contextlib
import os
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hvdtrain.engines import gpu
from hvdtrain.engines.base import Engine
from hvdtrain.engines.ddp import DdpEngine
from hvdtrain.engines.errors import UserError
from hvdtrain.engines.horovod import HorovodEngine
from hvdtrain.engines.single import DataParallelEngine, SerialEngine

OLD_DRIVER = (
    "The NVIDIA driver on your system is too old (found version 12020). Please update your GPU driver by downloading and "
    "installing a new version from the URL: http://www.nvidia.com/Download/index.aspx Alternatively, go to: https://x"
)
NO_DRIVER = (
    "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU and installed a driver from\nx"
)
NO_KERNEL = "CUDA error: no kernel image is available for execution on the device\nx"


class Machine(SimpleNamespace):
    """What torch says here. gpus: visible ones. refuses: what `torch.cuda.init` raises. nccl, rocm: of this Horovod."""

    gpus = 1
    refuses: str | None = None
    cuda: str | None = "13.2"
    hip: str | None = None
    xpu = False
    nccl = True
    rocm = False
    devices = 0  # device files that this process may open
    busy: str | None = None  # what `torch.cuda.set_device` raises
    lacks: str | None = None  # what the first kernel raises
    forked = False  # by a process that had used CUDA


@contextlib.contextmanager
def on(machine: Machine) -> Iterator[list[torch.device]]:
    """Have torch describe `machine`. Yields the devices that were made torch's current one."""
    taken: list[torch.device] = []

    def initialize() -> None:
        if machine.refuses is not None:
            raise RuntimeError(machine.refuses)

    def set_device(device: torch.device) -> None:
        if machine.busy is not None:
            raise RuntimeError(machine.busy)
        taken.append(device)

    def compute(*shape: int, device: torch.device) -> None:
        if machine.lacks is not None:
            raise RuntimeError(machine.lacks)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: machine.gpus > 0 and machine.refuses is None)
        patch.setattr(torch.cuda, "device_count", lambda: machine.gpus)
        patch.setattr(torch.cuda, "init", initialize)
        patch.setattr(torch.cuda, "_is_in_bad_fork", lambda: machine.forked)
        patch.setattr(torch.cuda, "set_device", set_device)
        patch.setattr(torch, "ones", compute)
        patch.setattr(torch.version, "cuda", machine.cuda)
        patch.setattr(torch.version, "hip", machine.hip)
        patch.setattr(torch.xpu, "is_available", lambda: machine.xpu)
        patch.setattr("hvdtrain.engines.gpu.openable", lambda environment: machine.devices, raising=False)
        patch.setattr(torch, "__version__", "2.15.0+cu132")
        yield taken


def engine_of(kind: type[Engine], machine: Machine, local_rank: int = 0, local_size: int = 1) -> Any:
    """Return a rank of an engine as it is before its device is chosen."""
    engine: Any = object.__new__(kind)
    engine.rank, engine.size = local_rank, local_size
    engine.local_rank, engine.local_size, engine.notes = local_rank, local_size, []
    engine.hvd = SimpleNamespace(nccl_built=lambda: machine.nccl, rocm_built=lambda: machine.rocm)
    return engine


H, D, S, P = HorovodEngine, DdpEngine, SerialEngine, DataParallelEngine
IDLE = "GPUs? here would be left idle: this Horovod was built without NCCL: run `make setup SETUP=--gpu`, or .*--device cpu"
TOO_OLD = (
    r"8 GPUs here, but CUDA does not start \(The NVIDIA driver on your system is too old \(found version 12020\)\) with "
    r"torch 2\.15\.0\+cu132: see nvidia-smi; update the driver, install a torch for an older CUDA, or use --device cpu"
)
CHOICES = [
    # engine, --device, machine, the device or the line
    *[(kind, "cpu", Machine(gpus=8, refuses=OLD_DRIVER, nccl=False), "cpu") for kind in (H, D, S, P)],
    *[(kind, "auto", Machine(gpus=0), "cpu") for kind in (H, D, S, P)],
    *[(kind, "auto", Machine(), "cuda:0") for kind in (H, D, S, P)],
    *[(kind, "cuda", Machine(), "cuda:0") for kind in (H, D, S, P)],
    *[(kind, "cuda", Machine(gpus=0), "--device cuda, but torch sees no GPU here: use --device cpu") for kind in (H, D, S)],
    # Horovod without NCCL: the node would train on its CPU
    (H, "auto", Machine(gpus=8, nccl=False), "8 " + IDLE),
    (H, "auto", Machine(nccl=False), "1 " + IDLE),
    (H, "cuda", Machine(gpus=8, nccl=False), "8 " + IDLE),
    (H, "auto", Machine(gpus=0, nccl=False), "cpu"),
    (D, "auto", Machine(nccl=False), "cuda:0"),
    # a driver too old for this torch: NVML counts the GPUs, CUDA does not start
    *[(kind, wanted, Machine(gpus=8, refuses=OLD_DRIVER), TOO_OLD) for kind in (H, D, S, P) for wanted in ("auto", "cuda")],
    (S, "auto", Machine(gpus=0, devices=8, refuses=NO_DRIVER), "8 GPUs here, but .*Found no NVIDIA driver on your system"),
    (S, "auto", Machine(gpus=2, refuses="CUDA error: out of memory\nx"), r"not start \(CUDA error: out of memory\)"),
    (D, "auto", Machine(forked=True, refuses="Cannot re-initialize CUDA in forked subprocess. To use CUDA with x"),
     r"CUDA does not start \(Cannot re-initialize CUDA in forked subprocess\) .*: what started this process had used CUDA"),
    # a torch for CPUs on a node with GPUs
    *[(kind, "auto", Machine(gpus=0, devices=8, cuda=None), "8 GPUs here, but torch .* was built without CUDA: install")
      for kind in (H, D, S)],
    # a GPU that another process holds, or for which this torch was not built
    (D, "auto", Machine(busy="CUDA error: all CUDA-capable devices are busy or unavailable\nx"),
     r"cuda:0 cannot be used \(CUDA error: all CUDA-capable devices are busy or unavailable\): another process may hold it"),
    (H, "auto", Machine(lacks=NO_KERNEL),
     r"cuda:0 cannot be used \(CUDA error: no kernel image .* on the device\): .*, or it needs another torch; or use --dev"),
    # other makers
    (D, "auto", Machine(cuda=None, hip="6.4"), "cuda:0"),
    (H, "auto", Machine(cuda=None, hip="6.4"),
     "1 GPU here, but this Horovod was built without ROCm: use --engine ddp, or --device cpu"),
    (H, "auto", Machine(cuda=None, hip="6.4", rocm=True), "cuda:0"),
    *[(kind, "auto", Machine(gpus=0, xpu=True), r"an Intel GPU \(XPU\), which no engine of hvdtrain uses: use --device cpu")
      for kind in (H, D, S)],
    (S, "cpu", Machine(gpus=0, xpu=True), "cpu"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "wanted", "machine", "expected"), CHOICES)
def test_a_gpu_is_used_or_the_line_says_what_to_type(kind, wanted, machine, expected):
    engine = engine_of(kind, machine)
    with on(machine):
        if expected in ("cpu", "cuda:0"):
            assert str(engine.choose_device(wanted)) == expected
        else:
            with pytest.raises(UserError, match=expected):
                engine.choose_device(wanted)


def test_a_rocm_gpu_is_said_to_be_untried():
    machine = Machine(cuda=None, hip="6.4")
    engine = engine_of(D, machine)
    with on(machine):
        engine.choose_device("auto")
    assert engine.notes == ["an AMD GPU (ROCm): expected to train as others do, but never tried"]


@pytest.mark.parametrize(
    ("gpus", "local_rank", "local_size", "shared", "expected"),
    [
        (8, 3, 8, "", 3),
        (8, 1, 2, "", 1),
        (1, 3, 8, "", 0),  # the scheduler shows each rank its own
        (2, 3, 4, "", 1),  # the scheduler shows each rank two of its own
        (4, 6, 8, "", 2),  # two agents of torchrun, with four GPUs each
        (2, 3, 8, "1", 1),
        (1, 3, 8, "1", 0),
    ],
)
def test_each_local_rank_has_its_gpu(gpus, local_rank, local_size, shared, expected, monkeypatch):
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", shared)
    machine = Machine(gpus=gpus)
    with on(machine) as taken:
        assert engine_of(H, machine, local_rank, local_size).choose_device("auto") == torch.device("cuda", expected)
        assert taken == [torch.device("cuda", expected)]


def test_device_files_of_other_jobs_are_no_gpus(tmp_path):
    (tmp_path / "nvidia0").mkdir()  # cannot be opened for writing, whoever asks
    for name in ("nvidia1", "nvidia2", "nvidiactl"):
        (tmp_path / name).touch()
    assert gpu.openable({}, tmp_path) == 2
    assert gpu.openable({"CUDA_VISIBLE_DEVICES": "0"}, tmp_path) == 1


# ---- ranks with each other

GPU_A, GPU_B, UNKNOWN = ("cuda", "0:1:0"), ("cuda", "0:2:0"), ("cuda", "")
SAME = (
    r"ranks 0 and 1 on x have the same GPU \(0:1:0\), or slices of it \(MIG\), and NCCL wants one for each rank: start as "
    r"many ranks as GPUs, or show each rank its own \(CUDA_VISIBLE_DEVICES\)"
)
SIDE_BY_SIDE = [
    # where each rank is, and the line
    ([("x", "cpu"), ("x", "cpu")], None),
    ([("x", *GPU_A), ("x", *GPU_B), ("y", *GPU_A)], None),
    ([("x", *GPU_A), ("x", *GPU_A)], SAME),
    ([("x", *GPU_A), ("x", *GPU_A), ("x", "cpu")], r"rank 2 on x has no GPU, rank 0 on x has one: give every rank a GPU"),
    ([("x", "cpu"), ("y", *GPU_A)], "rank 0 on x has no GPU, rank 1 on y has one: give every rank a GPU, or use --dev"),
    ([("y", *GPU_B), ("x", *GPU_A), ("x", *GPU_B), ("x", *GPU_A)], "ranks 1 and 3 on x have the same GPU"),
    ([("x", *UNKNOWN), ("x", *UNKNOWN)], None),
    ([("x", *GPU_A, "one boot"), ("x", *GPU_A, "another")], None),  # machines of one name
]  # fmt: skip


class Rank(SerialEngine):
    """A rank whose all-gather gives what all ranks would have sent."""

    def __init__(self, places: Sequence[tuple[Any, ...]]):
        super().__init__(tuning=False, rank=0, size=1, launcher="none")
        self.size, self.places, self.device = len(places), places, torch.device(places[0][1])

    def all_gather_object(self, value: object, name: str) -> list[Any]:
        assert name == "gpus"
        return [list(place) for place in self.places]


@pytest.mark.parametrize(("places", "expected"), SIDE_BY_SIDE)
@pytest.mark.parametrize("shared", [False, True])
def test_ranks_with_one_gpu_or_with_and_without_are_named(places, expected, shared, monkeypatch):
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", str(int(shared)))
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 30, 7))
    monkeypatch.setattr(gpu, "rank_device", lambda device: gpu.RankDevice("x", "cpu"))
    engine = Rank(places)
    if expected is None or (shared and "no GPU" not in expected):
        gpu.require_own(engine)
        assert engine.notes == ["ranks share a GPU (NCCL_MULTI_RANK_GPU_ENABLE=1): for tests, not for speed"] * bool(
            expected
        )
    else:
        with pytest.raises(UserError, match=expected) as caught:
            gpu.require_own(engine)
        assert caught.value.everywhere


def test_a_place_has_the_address_of_its_gpu(monkeypatch):
    about = SimpleNamespace(pci_domain_id=0, pci_bus_id=65, pci_device_id=0, uuid="1a-2b", total_memory=80)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: about)
    host, boot = socket.gethostname(), Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert gpu.rank_device(torch.device("cuda", 0)) == (host, "cuda", "0:65:0", boot, 80)
    assert gpu.rank_device(torch.device("cpu")) == (host, "cpu", "", "", 0)
    assert gpu.pci_address(torch.device("cuda", 0)) == "0000:41:00.0"
    about = SimpleNamespace(uuid="1a-2b", total_memory=80)  # as an older torch has it
    assert gpu.rank_device(torch.device("cuda", 0)).bus == "1a-2b"


@pytest.mark.parametrize(("shared", "expected"), [("", 40), ("1", 20)])
def test_the_memory_that_each_rank_has_is_that_of_the_smallest_gpu(shared, expected, monkeypatch):
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", shared)
    monkeypatch.setattr(gpu, "rank_device", lambda device: gpu.RankDevice("x", "cuda"))
    gpu.require_own(engine := Rank([("x", *GPU_A, "", 80), ("x", *GPU_B, "", 40)]))
    assert engine.gpu_bytes == expected


def test_more_than_two_ranks_on_a_gpu_are_refused_where_two_are_accepted():
    places = [gpu.RankDevice("x", "cuda", "0:1:0"), gpu.RankDevice("x", "cuda", "0:2:0")] * 3
    assert gpu.conflict(places[:4], shared=True) is None
    said = gpu.conflict(places, shared=True)
    assert said == (
        "ranks 0, 2 and 4 on x have the same GPU (0:1:0), and NCCL takes 2 at most (with NCCL_MULTI_RANK_GPU_ENABLE=1): "
        "start fewer ranks"
    )


@pytest.mark.parametrize(("nccl", "expected"), [((2, 30, 7), [None, "1"]), ((2, 28, 9), ["rank0", "1"])])
def test_before_nccl_2_30_each_rank_of_a_shared_gpu_names_a_host_of_its_own(nccl, expected, monkeypatch):
    """With a stand-in for the version. tests/gpu runs it."""
    own = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "1"}  # what the user has set stays
    monkeypatch.setattr(os, "environ", own)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: nccl)
    monkeypatch.setattr(gpu, "rank_device", lambda device: gpu.RankDevice("x", "cpu"))
    gpu.require_own(Rank([("x", *GPU_A), ("x", *GPU_A)]))
    assert [own.get(name) for name in ("NCCL_HOSTID", "NCCL_NVLS_ENABLE")] == expected
