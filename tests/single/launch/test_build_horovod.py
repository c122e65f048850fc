"""The set-up programs without their slow parts: patches, cache, checks before anything runs, what a failure says."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import io
import os
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import threading
import time
from pathlib import Path

import pytest

LAUNCH = Path(__file__).resolve().parents[3] / "launch"
sys.path.insert(0, str(LAUNCH))

import build_horovod  # noqa: E402
import horovod_patches  # noqa: E402
import openmpi_wheel  # noqa: E402
import steps  # noqa: E402
from steps import BuildFailure, Pip, Refusal  # noqa: E402
from target import Target, pins  # noqa: E402

TARGET = Target(
    python="cpython-311-x86_64-linux-gnu",
    libc="glibc 2.36",
    cpu="avx f16c fma",
    torch="2.15.0+cu132",
    cxx11_abi=True,
    mpi="openmpi4.1.8 (wheel)",
    cuda="",
    flags="",
    patches="abc",
)


def program(name: str, *arguments: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(LAUNCH / name), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ | env)


# ----------------------------------------------------------------------------------------------------------- patches


def source_as_expected(root: Path) -> Path:
    for patch in horovod_patches.PATCHES:
        path = root / patch.file
        path.parent.mkdir(parents=True, exist_ok=True)
        text = path.read_text() if path.exists() else ""
        path.write_text(text + (patch.old + "\n") * (patch.old not in text))
    return root


@pytest.mark.parametrize(
    ("torch", "standard"), [("2.1.0", 17), ("2.9.1+cpu", 17), ("2.13.0", 17), ("2.14.0", 20), ("2.15.0+cu132", 20)]
)
def test_cxx_standard_follows_torch(tmp_path: Path, torch: str, standard: int) -> None:
    assert horovod_patches.cxx_standard(torch) == standard
    horovod_patches.apply(source_as_expected(tmp_path), torch)
    for name in ("CMakeLists.txt", "horovod/torch/CMakeLists.txt"):
        assert f"set(CMAKE_CXX_STANDARD {standard})" in (tmp_path / name).read_text()


@pytest.mark.parametrize("patch", horovod_patches.PATCHES, ids=lambda patch: f"{patch.file}: {patch.reason[:30]}")
def test_a_patch_that_does_not_apply_is_named(tmp_path: Path, patch: horovod_patches.Patch) -> None:
    path = source_as_expected(tmp_path) / patch.file
    path.write_text(path.read_text().replace(patch.old, "something else"))
    with pytest.raises(BuildFailure, match="does not apply") as failure:
        horovod_patches.apply(tmp_path, "2.15.0")
    assert patch.file in str(failure.value)


def test_patching_twice_is_refused(tmp_path: Path) -> None:
    horovod_patches.apply(source_as_expected(tmp_path), "2.15.0")
    with pytest.raises(BuildFailure):
        horovod_patches.apply(tmp_path, "2.15.0")


def test_patches_apply_to_the_release(tmp_path: Path) -> None:
    sdist = build_horovod.default_cache() / "sources" / horovod_patches.SDIST
    if not sdist.is_file():
        pytest.skip("Horovod's source is not in the cache: the wheel was")
    source = build_horovod.unpack(build_horovod.checked_sdist(sdist), tmp_path)
    horovod_patches.apply(source, "2.15.0", mpi=False)
    assert (
        "def mpi_built(verbose=False):\n    return False\n" in (source / "horovod" / "common" / "util.py").read_text()
    )


# ------------------------------------------------------------------------------------------------------- cache


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Target)])
def test_every_part_of_the_target_is_in_the_key(field: str) -> None:
    other = dataclasses.replace(TARGET, **{field: False if field == "cxx11_abi" else "other"})
    assert other.key() != TARGET.key()
    assert dataclasses.replace(TARGET).key() == TARGET.key()


def test_patch_level_is_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before = horovod_patches.fingerprint()
    monkeypatch.setattr(horovod_patches, "PATCHES", horovod_patches.PATCHES[:-1])
    assert horovod_patches.fingerprint() != before


def test_label_is_a_valid_local_version() -> None:
    assert TARGET.label() == "torch2.15.0.cpu.openmpi4.1.8"
    assert dataclasses.replace(TARGET, mpi="", cuda="13.2").label() == "torch2.15.0.gpu"


def test_cache_gives_back_whole_wheels_only(tmp_path: Path) -> None:
    wheel = tmp_path / "horovod-0.28.1-cp311.whl"
    wheel.write_bytes(b"wheel" * 1000)
    entry = tmp_path / "entry"
    entry.mkdir()
    assert build_horovod.cached_wheel(entry) is None
    stored = build_horovod.store_wheel(entry, wheel, TARGET)
    assert build_horovod.cached_wheel(entry) == stored
    assert sorted(path.name for path in entry.iterdir()) == ["entry.json", wheel.name]
    stored.write_bytes(stored.read_bytes()[:-1])  # truncated by a full disk, say
    assert build_horovod.cached_wheel(entry) is None


def test_a_full_cache_keeps_nothing_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: Path, target: Path) -> None:
        target.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    wheel = tmp_path / "horovod-0.28.1-cp311.whl"
    wheel.write_bytes(b"wheel")
    (tmp_path / "entry").mkdir()
    monkeypatch.setattr(build_horovod.shutil, "copyfile", full)
    with pytest.raises(OSError, match="No space left"):
        build_horovod.store_wheel(tmp_path / "entry", wheel, TARGET)
    assert list((tmp_path / "entry").iterdir()) == []


def test_second_builder_waits_for_the_first(tmp_path: Path) -> None:
    order = []

    def second() -> None:
        with build_horovod.only_one(tmp_path, "it"):
            order.append("second")

    with build_horovod.only_one(tmp_path, "it"):
        thread = threading.Thread(target=second)
        thread.start()
        time.sleep(0.3)
        order.append("first")
    thread.join(10)
    assert order == ["first", "second"]


# --------------------------------------------------------------------------------------------- checked before it runs


def trap_sdist(directory: Path) -> Path:
    """A source package that leaves a file behind if anything in it is run."""
    ran = directory / "RAN"
    code = f"open({str(ran)!r}, 'w'); from setuptools import setup; setup(name='horovod', version='0.28.1')"
    path = directory / horovod_patches.SDIST
    with tarfile.open(path, "w:gz") as archive:
        for name, text in (("setup.py", code), ("PKG-INFO", "Metadata-Version: 1.0\nName: horovod\nVersion: 0.28.1\n")):
            info = tarfile.TarInfo(f"horovod-0.28.1/{name}")
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text.encode()))
    return ran


def test_changed_source_is_refused_offline(tmp_path: Path) -> None:
    ran = trap_sdist(tmp_path)
    with pytest.raises(Refusal, match="sha256"):
        build_horovod.local_sdist(tmp_path / "cache", offline=tmp_path)
    assert not ran.exists()


def test_changed_source_from_the_index_is_refused_before_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = trap_sdist(tmp_path)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    pip = Pip(Path(sys.executable), tmp_path / "log")
    with pytest.raises(Refusal, match="sha256"):
        build_horovod.fetch_sdist(tmp_path / "cache", pip, dict(os.environ))
    assert not ran.exists()
    assert not list((tmp_path / "cache").rglob("*.tar.gz"))
    # The trap works: with its own hash, pip runs its setup.py.
    digest = hashlib.sha256((tmp_path / horovod_patches.SDIST).read_bytes()).hexdigest()
    monkeypatch.setattr(horovod_patches, "SDIST_SHA256", digest)
    build_horovod.fetch_sdist(tmp_path / "cache", pip, dict(os.environ))
    assert ran.exists()


def test_offline_without_the_source_says_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match=r"lacks horovod-0\.28\.1\.tar\.gz.*--download"):
        build_horovod.local_sdist(tmp_path / "cache", offline=tmp_path)


def test_offline_asks_no_configured_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    trap_sdist(elsewhere)
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("PIP_FIND_LINKS", str(elsewhere))
    pip = Pip(Path(sys.executable), tmp_path / "log", offline=tmp_path / "empty")
    with pytest.raises(Refusal, match="--download"):
        pip("download", "horovod", "-d", tmp_path / "out", doing="get it")


# ------------------------------------------------------------------------------------------------------ what it says


@pytest.mark.parametrize(
    ("log", "shown", "remedy"),
    [
        (
            "[ 10%] x\na.cc:1:2: error: no member 'x'\n|\nb.cc:1: error: later\n",
            "a.cc:1:2: error",
            "docs/installing.md",
        ),
        ("c++: fatal error: Killed signal terminated program cc1plus\n", "Killed signal", "--jobs 1"),
        ("fatal error: Python.h: No such file or directory\n", "Python.h", "python3-dev"),
        (
            "CMake Error at FindX:1 (message):\n  Could NOT find MPI (missing: MPI_CXX)\n",
            "Could NOT find MPI",
            "--mpi wheel",
        ),
        ("/usr/bin/ld: final link failed: No space left on device\n", "No space left", "TMPDIR"),
        ("nothing telling\n", "nothing telling", "docs/installing.md"),
    ],
)
def test_failed_build_ends_with_the_first_error_and_a_remedy(tmp_path: Path, log: str, shown: str, remedy: str) -> None:
    path = tmp_path / "build.log"
    path.write_text(log)
    text = build_horovod.explain_failure(path)
    assert shown in text
    assert remedy in text.splitlines()[-1]
    kept = next(line.split(": ", 1)[1] for line in text.splitlines() if line.startswith("whole log: "))
    assert Path(kept).read_text() == log
    Path(kept).unlink()


@pytest.mark.parametrize(
    ("output", "kind", "words"),
    [
        ("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES\n", Refusal, "sha256"),
        ("WARNING: Retrying ... NewConnectionError\nERROR: No matching distribution\n", Refusal, "--offline DIR"),
        ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device\n", Refusal, "space"),
        ("ERROR: Cannot install a and b\n", BuildFailure, "Cannot install a and b"),
    ],
)
def test_what_pip_says_becomes_one_line(output: str, kind: type[Exception], words: str) -> None:
    failure = steps.pip_failure(output, "install it", offline=None)
    assert isinstance(failure, kind)
    assert words in str(failure)
    assert len(str(failure).splitlines()) == 1


def test_no_compiler_and_an_old_one_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Refusal, match=r"no C\+\+ compiler"):
        build_horovod.check_compiler(20)
    old = tmp_path / "g++"
    old.write_text("#!/bin/sh\necho \"unrecognized command line option '-std=c++20'\" >&2; exit 1\n")
    old.chmod(0o755)
    with pytest.raises(Refusal, match="no make"):
        build_horovod.check_compiler(20)
    monkeypatch.setenv("CXX", "/no/such/compiler -O1")
    with pytest.raises(Refusal, match="CXX=/no/such/compiler"):
        build_horovod.check_compiler(20)
    monkeypatch.delenv("CXX")
    shutil.copy(old, tmp_path / "make")
    with pytest.raises(Refusal, match=r"cannot compile C\+\+20"):
        build_horovod.check_compiler(20)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("build_horovod.py", ["--offline", "/no/such/directory"]),
        ("build_horovod.py", ["--cuda-home", "/no/such/directory"]),
        ("build_horovod.py", ["--mpi", "mine"]),
        ("setup", ["--mpi", "mine"]),
        ("setup", ["--offline", "/no/such/directory"]),
        ("setup", ["--cpu", "--gpu"]),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(name: str, arguments: list[str]) -> None:
    result = program(name, *arguments)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert arguments[0] in result.stderr.splitlines()[-1]


def test_open_mpi_wheel_is_settled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    conf = tmp_path / "etc" / "openmpi-mca-params.conf"
    conf.parent.mkdir()
    conf.write_text("# as it came\n")
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(openmpi_wheel.sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(openmpi_wheel.importlib.metadata, "version", lambda name: "4.1.8")
    openmpi_wheel.settle()
    openmpi_wheel.settle()
    for line in ("rmaps_base_oversubscribe = 1", "btl = ^ofi"):
        assert conf.read_text().splitlines().count(line) == 1
    assert "OPAL_PREFIX" in (tmp_path / "hvdtrain_openmpi.pth").read_text()


def test_pins_name_what_setup_installs() -> None:
    program = runpy.run_path(str(LAUNCH / "setup"))
    named = {re.split(r"[^A-Za-z0-9_-]", requirement)[0] for requirement in program["project_requirements"]("dev")}
    assert set(pins()) == named | {"torch", "torchvision", "openmpi", "mpi4py", "cmake", "setuptools"}
