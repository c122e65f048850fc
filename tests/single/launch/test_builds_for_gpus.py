"""Where Horovod is built with NCCL, with whose CUDA and NCCL, and what of a site's settings reaches the build."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

LAUNCH = Path(__file__).resolve().parents[3] / "launch"
sys.path.insert(0, str(LAUNCH))

import build_horovod  # noqa: E402
import cuda_toolkit  # noqa: E402
import horovod_source  # noqa: E402
import site_settings  # noqa: E402
import target  # noqa: E402
from steps import Refusal  # noqa: E402

STAND_IN = Path(__file__).parent / "stand_in"
TORCH = target.Torch("2.15.0+cu132", "13.2", "", True, "")
CPU_TORCH = target.Torch("2.15.0+cpu", "", "", True, "")
OLDER_TORCH = target.Torch("2.9.1+cu128", "12.8", "", True, "")
ROCM_TORCH = target.Torch("2.15.0+rocm7.1", "", "7.1", True, "")


def options(**chosen):
    return argparse.Namespace(**({"cpu": False, "gpu": False, "cuda_home": None, "mpi": "none", "patch": []} | chosen))


def program(path, says):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\nprintf '%s' '{says}'\n")
    path.chmod(0o755)
    return path


def a_cuda(home, version):
    """A CUDA directory, of which the version can be asked and which has headers."""
    program(home / "bin" / "nvcc", f"Cuda compilation tools, release {version}, V{version}.1")
    (home / "include").mkdir()
    (home / "include" / "cuda_runtime.h").touch()
    return home


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine without GPUs, schedulers, CUDA and site settings, whose torch brings CUDA 13. Its PATH: bin."""
    for name in [
        *site_settings.matching(r"HOROVOD_\w+|CUDA_HOME|CXX|CCL_ROOT"),
        *site_settings.matching(site_settings.MPI),
    ]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin")
    monkeypatch.setattr(site_settings, "has_nvidia_gpu", lambda: False)
    for library in ("cu13/lib/libcudart.so.13", "nccl/lib/libnccl.so.2"):
        (tmp_path / "nvidia" / library).parent.mkdir(parents=True)
        (tmp_path / "nvidia" / library).touch()
    monkeypatch.setattr(cuda_toolkit, "SITE", tmp_path / "nvidia")
    monkeypatch.setattr(cuda_toolkit, "USUAL", tmp_path / "no" / "cuda")
    monkeypatch.setattr(target, "torch_of_interpreter", lambda: TORCH)
    return tmp_path


SINFO = {"sinfo": "gpu:h100:4(S:0-1)\n(null)"}


@pytest.mark.parametrize(
    ("chosen", "torch", "environment", "programs", "expected"),  # True, False, or what is refused
    [
        ({}, TORCH, {}, {}, False),  # a laptop, or CI
        ({}, TORCH, {}, {"nvcc": "release 13.0,"}, False),  # a developer's
        ({}, TORCH, {"GPU": "here"}, {}, True),
        ({"cpu": True}, TORCH, {"GPU": "here", "CUDA_HOME": "/opt/cuda", "HOROVOD_GPU": "CUDA"}, SINFO, False),
        ({}, TORCH, {"CUDA_HOME": "/opt/cuda"}, {}, True),
        ({}, TORCH, {}, SINFO, True),  # login nodes
        ({}, TORCH, {}, {"sinfo": "(null)"}, False),
        ({}, TORCH, {}, {"pbsnodes": "node1\n     resources_available.ngpus = 4"}, True),
        ({}, TORCH, {}, {"pbsnodes": "node1\n     resources_available.ngpus = 0"}, False),
        ({}, TORCH, {}, {"lshosts": "HOST_NAME   gpu_id       gpu_model   gpu_driver\nhosta       0      H100   580.1"},
            True),
        ({}, TORCH, {}, {"lshosts": "HOST_NAME   gpu_id       gpu_model   gpu_driver"}, False),
        ({}, TORCH, {}, {"flux": "4 Nodes, 16 Cores, 8 GPUs"}, True),
        ({}, TORCH, {}, {"flux": "4 Nodes, 16 Cores, 0 GPUs"}, False),
        ({}, CPU_TORCH, {"GPU": "here", "CUDA_HOME": "/opt/cuda"}, SINFO, False),
        ({"gpu": True}, TORCH, {}, {}, True),
        ({"gpu": True}, CPU_TORCH, {}, {}, "--gpu, but this torch has no CUDA"),
        ({}, TORCH, {"HOROVOD_GPU_OPERATIONS": "NCCL"}, {}, True),
        ({}, TORCH, {"HOROVOD_NCCL_HOME": "/opt/nccl"}, {}, True),
        ({}, TORCH, {"HOROVOD_CYCLE_TIME": "1"}, {}, False),  # of a run
        ({}, CPU_TORCH, {"HOROVOD_GPU_ALLREDUCE": "NCCL"}, {}, "HOROVOD_GPU_ALLREDUCE, but this torch has no CUDA"),
        ({}, ROCM_TORCH, {"HOROVOD_GPU": "ROCM"}, {}, True),
        ({}, TORCH, {"HOROVOD_GPU": "ROCM"}, {}, "HOROVOD_GPU, but this torch has no CUDA"),
    ],
)  # fmt: skip
def test_nccl_is_built_where_it_is_asked_for_or_gpus_are_in_sight(
    chosen: dict[str, bool], torch: target.Torch, environment: dict[str, str], programs: dict[str, str], expected: object,
    machine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    for name, says in programs.items():
        program(machine / "bin" / name, says)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if "GPU" in environment:
        monkeypatch.setattr(site_settings, "has_nvidia_gpu", lambda: True)
    if isinstance(expected, str):
        with pytest.raises(Refusal, match=expected):
            target.wants_nccl(options(**chosen), torch)
        return
    assert target.wants_nccl(options(**chosen), torch) is expected
    said = capsys.readouterr().out
    by_itself = torch is TORCH and not chosen and not site_settings.asked_for_gpus(options())
    assert said.startswith("with NCCL, because " if expected else "without NCCL: no GPU") if by_itself else not said
    assert "make setup SETUP=--gpu" in said or expected or not by_itself


@pytest.mark.parametrize(
    ("torch", "environment", "expected"),  # HERE: a directory with a CUDA 12.4 and a CUDA 13.0
    [
        (TORCH, {}, "CUDA 13.2 (wheels), NCCL "),
        (TORCH, {"CUDA_HOME": "HERE/13.0"}, "CUDA 13.0 (HERE/13.0), NCCL "),
        (TORCH, {"CUDA_HOME": "HERE/12.4"}, "CUDA 13.2 (wheels), NCCL "),
        (TORCH, {"CUDA_HOME": "HERE/none"}, "CUDA 13.2 (wheels), NCCL "),
        (TORCH, {"HOROVOD_CUDA_HOME": "HERE/13.0"}, "CUDA 13.0 (HERE/13.0), NCCL "),
        (TORCH, {"HOROVOD_CUDA_HOME": "HERE/12.4"},
            "HOROVOD_CUDA_HOME=HERE/12.4 is CUDA 12.4, but torch was built with 13.2"),
        (TORCH, {"--cuda-home": "HERE/12.4"},
            "--cuda-home HERE/12.4 is CUDA 12.4, but torch was built with 13.2: load"),
        (TORCH, {"--cuda-home": "HERE/none"}, "--cuda-home HERE/none: no working bin/nvcc"),
        (OLDER_TORCH, {"CUDA_HOME": "HERE/12.4"}, "CUDA 12.4 (HERE/12.4), NCCL "),
        (OLDER_TORCH, {"PATH": "HERE/12.4/bin"}, "CUDA 12.4 (HERE/12.4), NCCL "),
        (OLDER_TORCH, {"PATH": "HERE/13.0/bin"}, "no nvcc for torch's CUDA 12.8: its wheels have none before CUDA 13"),
    ],
)  # fmt: skip
def test_cuda_is_the_sites_or_comes_from_wheels_that_have_a_compiler(
    torch, environment, expected, machine, monkeypatch
):
    for version in ("12.4", "13.0"):
        a_cuda(machine / version, version)
    here = {name: value.replace("HERE", str(machine)) for name, value in environment.items()}
    home = here.pop("--cuda-home", None)
    for name, value in here.items():
        monkeypatch.setenv(name, value)
    if expected.startswith("CUDA"):
        cuda = cuda_toolkit.choose(torch.cuda, Path(home) if home else None, "")
        assert str(cuda).startswith(expected.replace("HERE", str(machine)))
        assert bool(cuda.requirements()) == ("wheels" in expected)
    else:
        with pytest.raises(Refusal) as refused:
            cuda_toolkit.choose(torch.cuda, Path(home) if home else None, "")
        assert expected.replace("HERE", str(machine)) in str(refused.value)


@pytest.mark.parametrize(
    ("capabilities", "listed", "expected"),
    [("", "", "80,90"), ("75", "", "75"), ("75,120", "", "75,120"), ("75", "70,80,90", "70,80,90")],
)
def test_architectures_are_those_in_sight_or_the_sites(capabilities, listed, expected, machine, monkeypatch):
    monkeypatch.setenv("HOROVOD_BUILD_CUDA_CC_LIST", listed)
    cuda = cuda_toolkit.choose("13.2", None, capabilities)
    assert str(cuda).endswith(f"for GPUs of {expected}")
    assert cuda.build_environment(machine / "tools", machine / "scratch")["HOROVOD_BUILD_CUDA_CC_LIST"] == expected


SITES = {  # variables of a site: whether they change a build for CPUs
    "HOROVOD_CPU_OPERATIONS": ("mpi", True),
    "HOROVOD_BUILD_ARCH_FLAGS": ("-mavx2", True),
    "CXXFLAGS": ("-O1", True),
    "MPI_HOME": ("/opt/mpich", True),
    "HOROVOD_NCCL_LINK": ("STATIC", False),
    "HOROVOD_GPU_OPERATIONS": ("NCCL", False),
    "HOROVOD_GPU_ALLREDUCE": ("NCCL", False),
    "HOROVOD_CYCLE_TIME": ("1", None),  # of a run
    "HOROVOD_WITHOUT_GLOO": ("1", None),
}


@pytest.mark.parametrize("name", SITES)
@pytest.mark.parametrize("gpu", [False, True])
def test_what_a_site_sets_reaches_the_build_its_key_and_the_user(name, gpu, machine, monkeypatch, capsys):
    monkeypatch.setattr(target, "mpi_identity", lambda choice: ("openmpi4.1.4 (/usr/bin/mpicxx)", []))
    asked = options(cpu=not gpu, gpu=gpu, mpi="system")
    plain, *_ = target.describe_target(asked)
    value, on_cpus = SITES[name]
    monkeypatch.setenv(name, value)
    changed, run_path, cuda = target.describe_target(asked)
    env = build_horovod.build_environment(changed, Path("/prefix"), Path("/tools"), run_path, 1)
    env |= cuda.build_environment(machine / "tools", machine / "scratch") if cuda else {}
    reaches = on_cpus is not None and (on_cpus or gpu)
    if name != "HOROVOD_WITHOUT_GLOO":
        assert env.get(name) == ((value.upper() if name == "HOROVOD_CPU_OPERATIONS" else value) if reaches else None)
    assert (changed.key() != plain.key()) == reaches
    site_settings.say(site_settings.build_settings(gpu, True))
    said = capsys.readouterr().out
    assert (name in said) == (reaches or name == "HOROVOD_WITHOUT_GLOO")
    # Horovod refuses both, and without either its CMake files build for CPUs.
    assert ("HOROVOD_GPU_OPERATIONS" in env) == (gpu and name != "HOROVOD_GPU_ALLREDUCE")


def test_a_sites_nccl_is_found_by_the_build_and_by_the_extension(machine, monkeypatch):
    prefix = machine / "opt" / "nccl"
    monkeypatch.setenv("HOROVOD_NCCL_HOME", str(prefix))
    with pytest.raises(Refusal, match=f"there is no {prefix}/include/nccl.h"):
        target.describe_target(options())
    (prefix / "include").mkdir(parents=True)
    (prefix / "include" / "nccl.h").write_text("#define NCCL_MAJOR 2\n#define NCCL_MINOR 27\n#define NCCL_PATCH 5\n")
    found, run_path, cuda = target.describe_target(options())
    assert f"NCCL 2.27.5 ({prefix}/include)" in found.cuda
    assert str(prefix / "lib") == run_path[1]  # before that of the wheel
    env = build_horovod.build_environment(found, Path("/prefix"), Path("/tools"), run_path, 1)
    assert cuda is not None
    assert (env | cuda.build_environment(machine / "tools", machine / "scratch"))["HOROVOD_NCCL_HOME"] == str(prefix)
    assert str(prefix / "lib") in env["HVDTRAIN_RPATH"].split(";")
    (prefix / "include" / "nccl.h").write_text("#define NCCL_MAJOR 2\n#define NCCL_MINOR 28\n#define NCCL_PATCH 3\n")
    assert target.describe_target(options())[0].key() != found.key()  # the site's update


def test_the_wheels_libraries_are_on_the_extensions_run_path(machine):
    """Else they are found only if torch is imported first."""
    _, run_path, _ = target.describe_target(options(gpu=True))
    assert run_path == ["$ORIGIN/../../torch/lib", "$ORIGIN/../../nvidia/nccl/lib", "$ORIGIN/../../nvidia/cu13/lib"]


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("HOROVOD_GPU_OPERATIONS", "MPI", "gradients on GPUs go over NCCL: unset it, or say NCCL"),
        ("HOROVOD_CPU_OPERATIONS", "CCL", "needs CCL_ROOT: load oneCCL, or unset it"),
    ],
)
def test_settings_that_cannot_work_are_refused(name, value, words, machine, monkeypatch):
    monkeypatch.setenv(name, value)
    with pytest.raises(Refusal, match=f"{name}={value}.*{words}"):
        target.describe_target(options())


LINKED = ("common.cc", "thread_pool.cc", "logging.cc", "ops/gpu_operations.cc", "ops/cuda_operations.cc")


@pytest.fixture
def failing_all_reduce(tmp_path):
    """Compile stand_in/gpu_error.cc with Horovod's own sources, patched."""
    sdist = target.default_cache() / "sources" / horovod_source.SDIST
    if not sdist.is_file() or shutil.which("g++") is None:
        pytest.skip("needs g++, and Horovod's source in the cache")
    source = horovod_source.unpack(horovod_source.checked_sdist(sdist), tmp_path)
    horovod_source.apply_patches(source)
    (tmp_path / "cuda_fp16.h").touch()
    parties = [source / "third_party" / name for name in ("flatbuffers/include", "eigen")]
    includes = [STAND_IN, tmp_path, source, *parties, *source.glob("third_party/boost/*/include")]
    first = [f"-include{header}" for header in ("stdexcept", "string", "horovod/common/logging.h")]
    command = ["g++", "-std=c++17", "-w", "-pthread", "-DHAVE_CUDA=1", "-DHAVE_GPU=1", *(f"-I{i}" for i in includes)]
    command += [*first, STAND_IN / "gpu_error.cc", *(source / "horovod/common" / name for name in LINKED)]
    # The rest of Horovod is declared and never called.
    command += ["-no-pie", "-Wl,-z,lazy", "-Wl,--unresolved-symbols=ignore-all", "-o", tmp_path / "run"]
    subprocess.run(command, check=True, timeout=300)
    return tmp_path / "run"


@pytest.mark.slow
def test_an_error_of_a_gpu_is_an_error_of_the_rank_and_no_abort(failing_all_reduce):
    """The thread that waits for CUDA events, from Horovod's sources (patch 24), on a CUDA runtime whose events fail.

    Without the patch, it aborts.
    """
    for completion, call in (("sync", "cudaEventSynchronize"), ("async", "cudaEventRecord")):
        done = subprocess.run([failing_all_reduce, completion], capture_output=True, text=True, timeout=60)
        said = (
            f"rank 3, GPU 1, allreduce.conv1.weight and 1 more: {call} failed: an illegal memory access was encountered"
        )
        assert done.stdout.splitlines() == [said, said, "shut_down 1"], done  # both tensors' callbacks
        assert done.stderr.count(said) == 1
        assert done.returncode == 0
